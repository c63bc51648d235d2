"""Small deterministic stand-ins, for tests that need no model.

`FakeExecutor` keeps token ids where a real executor keeps keys and values, and makes each token a pure function of the
prefix that it reads back through the page table. So a wrong page, a missing copy or a stale slot changes tokens.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import zlib
from array import array
from collections.abc import Callable, Iterable, Sequence

from pinnate.core.batch import Sample, ScheduledSequence, SchedulerOutput, StepResult, TokenLogprobs
from pinnate.core.errors import EngineDeadError
from pinnate.core.messages import FromEngine, ToEngine
from pinnate.core.request import Request
from pinnate.core.sampling import SamplingParams

EOS = 256  # of ByteTokenizer
PAD = 257
VOCAB_SIZE = 258
EMPTY = -1


def next_token(prefix: Sequence[int], params: SamplingParams, seed: int, index: int, vocab_size: int) -> int:
    """The token after `prefix`; seed and choice matter only where the request samples."""
    key = array("q", prefix).tobytes()
    if not params.is_greedy:
        key += array("q", (seed, index)).tobytes()
    return zlib.crc32(key) % vocab_size


def expected_tokens(request: Request, index: int = 0, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """All output tokens of one choice, by the definition: what any engine with a FakeExecutor must produce."""
    params, tokens = request.sampling, list(request.prompt_token_ids)
    eos = () if params.ignore_eos else request.eos_token_ids
    output: list[int] = []
    while len(output) < request.max_tokens:
        banned = {*eos, *params.stop_token_ids} if len(output) < params.min_tokens else set()
        token = next_token(tokens, params, request.seed, index, vocab_size)
        while token in banned:
            token = (token + 1) % vocab_size
        tokens.append(token)
        output.append(token)
        if token in eos or token in params.stop_token_ids:
            break
    return output


class FakeExecutor:
    """An Executor over pages of token ids. `script` replaces the function of the prefix where a test needs a certain
    text; `fail_when` makes a step raise."""

    def __init__(
        self,
        page_size: int,
        vocab_size: int = VOCAB_SIZE,
        script: Callable[[list[int]], int] | None = None,
        fail_when: Callable[[SchedulerOutput], bool] | None = None,
    ) -> None:
        self.page_size = page_size
        self.vocab_size = vocab_size
        self.script = script
        self.fail_when = fail_when
        self.batches: list[SchedulerOutput] = []
        self.closed = False
        self.kv_committed_bytes = 0
        self._pages: dict[int, array[int]] = {}  # a token id for each slot, EMPTY where nothing was computed

    def execute(self, output: SchedulerOutput) -> StepResult:
        self.batches.append(output)
        if self.fail_when is not None and self.fail_when(output):
            raise RuntimeError("the fake executor was told to fail")
        for source, target in output.copies:
            copied, kept = self._page(source), self._page(target)
            for slot, token in enumerate(copied):
                if token != EMPTY:
                    kept[slot] = token
        for sequence in output.sequences:
            for position, token in enumerate(sequence.token_ids, sequence.start):
                page, slot = divmod(position, self.page_size)
                self._page(sequence.page_table[page])[slot] = token
        tokens: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        scores = {}
        for sequence in output.sequences:
            prefix = self._prefix(sequence)
            for sample in sequence.samples:
                token = self._sample(prefix, sample)
                tokens.append(token)
                logprobs.append(_logprobs(token) if sample.params.logprobs is not None else None)
            if sequence.score is not None:
                scores[sequence.seq_id] = [_logprobs(token) for token in sequence.score]
        return StepResult(tokens, logprobs, scores)

    @property
    def page_bytes(self) -> int:
        return 8 * self.page_size

    def read_pages(self, pages: array[int], out: bytearray | memoryview) -> None:
        memoryview(out).cast("B")[:] = b"".join(self._page(page).tobytes() for page in pages)

    def write_pages(self, pages: array[int], data: bytes | bytearray | memoryview) -> None:
        slots = array("q", bytes(data))
        for i, page in enumerate(pages):
            self._pages[page] = slots[i * self.page_size : (i + 1) * self.page_size]

    def describe(self) -> dict[str, object]:
        return {"executor": "fake"}

    def close(self) -> None:
        self.closed = True

    def _page(self, page: int) -> array[int]:
        return self._pages.setdefault(page, array("q", [EMPTY] * self.page_size))

    def _prefix(self, sequence: ScheduledSequence) -> list[int]:
        """What the pages hold of the sequence, whole pages at a time. Raises KeyError where that is nothing."""
        length = sequence.start + len(sequence.token_ids)
        tokens = array("q")
        for page in sequence.page_table[: -(-length // self.page_size)]:
            tokens += self._pages[page]
        del tokens[length:]
        if EMPTY in tokens or len(tokens) < length:
            raise KeyError(f"sequence {sequence.seq_id}: nothing was computed for one of {length} positions")
        return tokens.tolist()

    def _sample(self, prefix: list[int], sample: Sample) -> int:
        if sample.target >= 0:
            return sample.target
        if self.script is not None:
            return self.script(prefix)
        token = next_token(prefix, sample.params, sample.seed, sample.index, self.vocab_size)
        while token in sample.banned:
            token = (token + 1) % self.vocab_size
        return token


def _logprobs(token: int) -> TokenLogprobs:
    return TokenLogprobs(token, -1.0 - token, 1, [(token, -1.0 - token)])


class ByteTokenizer:
    """One token for each byte, an EOS and one more special token."""

    vocab_size = VOCAB_SIZE
    eos_token_ids = (EOS,)
    bos_token_id = None
    strips_leading_space = False

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:  # noqa: ARG002
        return list(text.encode())

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        return b"".join(self.token_bytes(i) for i in ids if not (skip_special_tokens and i >= EOS)).decode(
            errors="replace"
        )

    def token_bytes(self, token_id: int) -> bytes:
        return {EOS: b"<eos>", PAD: b"<pad>"}.get(token_id) or bytes([token_id])

    def is_special(self, token_id: int) -> bool:
        return token_id >= EOS


def spell(text: str, num_prompt_tokens: int) -> Callable[[list[int]], int]:
    """A FakeExecutor script: the output is `text` (one token a byte), then EOS."""
    tokens = [*text.encode(), EOS]
    return lambda prefix: tokens[min(len(prefix) - num_prompt_tokens, len(tokens) - 1)]


def make_request(request_id: str, prompt: Sequence[int], **sampling: object) -> Request:
    """Greedy, 8 tokens, no EOS, unless told otherwise."""
    eos = sampling.pop("eos_token_ids", ())
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, "seed": 1, **sampling})
    return Request(request_id=request_id, prompt_token_ids=list(prompt), sampling=params, eos_token_ids=eos)


class ThreadClient:
    """An EngineClient whose core runs in a thread of this process. `kill` makes it die like a process does."""

    def __init__(self, make_core: Callable[[ThreadClient], object], info: dict[str, object]) -> None:
        self.info = info
        self.sent: list[ToEngine] = []
        self._down: queue.SimpleQueue[ToEngine | None] = queue.SimpleQueue()
        self._up: asyncio.Queue[FromEngine | None] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._core = make_core(self)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    # EngineClient
    heartbeat_age = 0.0

    async def ready(self) -> dict[str, object]:
        return self.info

    def send(self, message: ToEngine | FromEngine) -> None:
        if threading.current_thread() is self._thread:  # the core's port
            self._loop.call_soon_threadsafe(self._up.put_nowait, message)
        else:
            self.sent.append(message)
            self._down.put(message)

    async def close(self) -> None:
        self._down.put(None)
        await asyncio.to_thread(self._thread.join)

    # port of the core in its thread, client of the engine in its loop
    def receive(self, wait: bool | None = None):
        return self._receive_up() if wait is None else self._receive_down(wait)

    def kill(self) -> None:
        self._down.put(None)
        self._up.put_nowait(None)

    async def _receive_up(self) -> FromEngine:
        message = await self._up.get()
        if message is None:
            raise EngineDeadError("the fake engine was killed")
        return message

    def _receive_down(self, wait: bool) -> list[ToEngine]:
        messages = [self._down.get()] if wait else []
        while not self._down.empty():
            messages.append(self._down.get())
        if None in messages:
            raise SystemExit
        return messages

    def _run(self) -> None:
        try:
            while True:
                self._core.step()
        except SystemExit:
            pass

"""GrammarIntake: requests whose structured output is being compiled, on their way to the scheduler.

Knows: one backend, made when the first such request comes; a cache of grammars. Must not know: schedulers, executors,
how a grammar is written. A thread compiles, so that the loop goes on; what a client may send was checked before it
came here (engine/grammar_checker.py), so a compile takes about a millisecond, a large schema some tens."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

import msgspec

from pinnate.core.errors import PinnateError, UnsupportedError
from pinnate.core.messages import TokenOutput
from pinnate.core.request import FinishReason, Request
from pinnate.core.sampling import SamplingParams
from pinnate.core.structured import Matcher, StructuredOutput

if TYPE_CHECKING:
    from pinnate.text.grammars.backend import GrammarBackend

MAX_CACHED = 128  # compiled grammars
MAX_CACHED_BYTES = 16 << 20  # of their texts
WAIT_SECONDS = 0.02  # how long an idle loop waits for a compile before it looks for messages


class Startable(Protocol):
    """A compiled language."""

    is_spoilt: bool

    def start(self) -> Matcher: ...


class Arrival(NamedTuple):
    """A request that is ready for the scheduler, or the outputs that end it. `aborted` are choices that left
    meanwhile."""

    request: Request
    matcher: Matcher | None
    aborted: list[int]
    outputs: list[TokenOutput]


@dataclass(slots=True)
class _Pending:
    request: Request
    grammar: Future[Startable]
    aborted: list[int] = field(default_factory=list)


class GrammarCache:
    """Compiled grammars by kind and text, least recently used first out. Thread-safe."""

    def __init__(
        self,
        make_backend: Callable[[], GrammarBackend],
        most: int = MAX_CACHED,
        most_bytes: int = MAX_CACHED_BYTES,
    ) -> None:
        self._make_backend = make_backend
        self._backend: GrammarBackend | None = None
        self._most, self._most_bytes = most, most_bytes
        self._known: OrderedDict[tuple[str, str], Startable] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, structured: StructuredOutput) -> Startable | None:
        key = (structured.kind, structured.text)
        with self._lock:
            grammar = self._known.get(key)
            if grammar is None:
                return None
            if grammar.is_spoilt:
                self._drop(key)
                return None
            self._known.move_to_end(key)
            return grammar

    def compile(self, structured: StructuredOutput) -> Startable:
        """Called in one thread at a time.

        Raises:
            GrammarError, InvalidRequestError: it cannot be compiled.
        """
        known = self.get(structured)
        if known is not None:
            return known
        if self._backend is None:
            self._backend = self._make_backend()
        grammar = self._backend.compile(structured)
        key = (structured.kind, structured.text)
        with self._lock:
            self._known[key] = grammar
            self._bytes += len(structured.text)
            while len(self._known) > self._most or (self._bytes > self._most_bytes and len(self._known) > 1):
                self._drop(next(iter(self._known)))
        return grammar

    def _drop(self, key: tuple[str, str]) -> None:
        del self._known[key]
        self._bytes -= len(key[1])


class GrammarIntake:
    """Owned by one EngineCore; one thread calls everything here."""

    def __init__(self, cache: GrammarCache) -> None:
        self._cache = cache
        self._pending: dict[str, _Pending] = {}
        self._pool: ThreadPoolExecutor | None = None

    def __len__(self) -> int:
        return len(self._pending)

    def take(self, request: Request) -> Matcher | None:
        """The matcher of a request whose grammar is known; None: it is being compiled, and `arrivals` will have it."""
        structured = request.sampling.structured_output
        assert structured is not None
        known = self._cache.get(structured)
        if known is not None:
            return known.start()
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="pinnate-grammars")
        self._pending[request.request_id] = _Pending(request, self._pool.submit(self._cache.compile, structured))
        return None

    def abort(self, request_ids: Iterable[str], index: int | None) -> list[TokenOutput]:
        """Ends pending requests; one choice of one (`index`) when it has arrived."""
        outputs: list[TokenOutput] = []
        for request_id in request_ids:
            pending = self._pending.get(request_id)
            if pending is None:
                continue
            if index is not None:
                pending.aborted.append(index)
                continue
            del self._pending[request_id]
            pending.grammar.cancel()
            outputs += _ends(pending.request, FinishReason.ABORT)
        return outputs

    def arrivals(self) -> list[Arrival]:
        """What is ready, in order of arrival."""
        done = [pending for pending in self._pending.values() if pending.grammar.done()]
        return [self._arrive(pending) for pending in done]

    def wait(self) -> bool:
        """Waits a little for a compile where there is one. Whether there is."""
        if not self._pending:
            return False
        wait([pending.grammar for pending in self._pending.values()], WAIT_SECONDS, return_when="FIRST_COMPLETED")
        return True

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _arrive(self, pending: _Pending) -> Arrival:
        request = pending.request
        del self._pending[request.request_id]
        try:
            return Arrival(request, pending.grammar.result().start(), pending.aborted, [])
        except PinnateError as error:
            return Arrival(request, None, [], _ends(request, FinishReason.ERROR, str(error)))


def _ends(request: Request, reason: FinishReason, error: str | None = None) -> list[TokenOutput]:
    return [
        TokenOutput(request.request_id, index, [], finish_reason=reason, error=error)
        for index in range(request.sampling.n)
    ]


def checked_params(params: SamplingParams) -> SamplingParams:
    """With the structured output in the form that the engine takes. For programs that trust what they ask for: the
    check runs here, and nothing limits its time.

    Raises:
        InvalidRequestError, UnsupportedError: naming the field and the path inside it.
    """
    if params.structured_output is None:
        return params
    from pinnate.text.grammars.check import check
    from pinnate.text.grammars.faults import Fault

    try:
        checked = check(params.structured_output)
    except Fault as fault:
        raise fault.error(params.structured_output.param) from None
    return msgspec.structs.replace(params, structured_output=checked)


def no_backend() -> GrammarBackend:
    """
    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError("this engine compiles no structured outputs", param="structured_outputs")


class LazyBackend:
    """Makes the backend of one model when called: its tokenizer, its vocabulary's trie. Takes some 0.3 s, once."""

    def __init__(self, model: str, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._eos = tuple(eos_token_ids)

    def __call__(self) -> GrammarBackend:
        from pinnate.engine.model_text import load_model_text
        from pinnate.text.grammars.backend import LLGuidanceBackend, VocabularyBytes

        tokenizer = load_model_text(self._model).tokenizer
        eos = tuple(dict.fromkeys((*tokenizer.eos_token_ids, *self._eos)))
        return LLGuidanceBackend(VocabularyBytes.of(tokenizer, self._vocab_size, eos))

"""A fake engine with AsyncEngine's surface, and an app called without a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from starlette.applications import Starlette

from pinnate.core.batch import TokenLogprobs
from pinnate.core.errors import ContextLengthError, InvalidRequestError, QueueFullError
from pinnate.core.messages import EngineStats
from pinnate.core.request import FinishReason
from pinnate.core.sampling import SamplingParams
from pinnate.engine.output_processor import OutputDelta
from pinnate.server.app import create_app
from pinnate.server.settings import ServerSettings
from pinnate.server.state import Phase, ServerState
from pinnate.text.chat_template import ChatTemplate

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}]{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}{{ extra }}"
)
VOCAB = 256
EOS = 0


class ByteTokenizer:
    """A token is a byte; 0 is the one special token."""

    vocab_size = VOCAB
    bos_token = eos_token = ""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:  # noqa: ARG002
        return list(text.encode())

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:  # noqa: ARG002
        return bytes(ids).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return b"<eos>" if token_id == EOS else bytes([token_id])

    def is_special(self, token_id: int) -> bool:
        return token_id == EOS

    def token_id(self, token: str) -> int | None:
        return EOS if token == "<eos>" else None


class FakeStream:
    """Its steps are deltas, lists of deltas that come together, errors, and events to wait for."""

    def __init__(self, engine: FakeEngine, steps: list[Any]) -> None:
        self.engine = engine
        self.steps = list(steps)
        self.ended = False
        self.aborted = False
        self.is_waiting = True
        self._failure: Exception | None = None
        self._changed = asyncio.Event()

    def abort(self) -> None:
        if not self.ended:
            self.aborted = True

    def stop(self) -> None:
        self.steps, self._stopped = [OutputDelta(0, "", [], finish_reason=FinishReason.ABORT)], True
        self._changed.set()

    def fail(self, error: Exception) -> None:
        self.aborted, self._failure = True, error
        self._changed.set()

    def nudge(self) -> None:
        self._changed.set()

    async def take_all(self) -> list[OutputDelta] | None:
        await asyncio.sleep(0)
        if self.steps and isinstance(self.steps[0], asyncio.Event):
            if not await self._wait(self.steps[0]):
                return []
            del self.steps[0]
        if not self.steps:
            self.ended = True
            return None
        self.is_waiting = False
        step = self.steps.pop(0)
        if isinstance(step, Exception):
            self.ended = True
            raise step
        return step if isinstance(step, list) else [step]

    async def _wait(self, event: asyncio.Event) -> bool:
        """For the event; False after a nudge."""
        waits = [asyncio.create_task(e.wait()) for e in (event, self._changed)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        self._changed.clear()
        if self._failure is not None:
            raise self._failure
        return event.is_set()

    async def __aiter__(self) -> AsyncIterator[OutputDelta]:
        while (deltas := await self.take_all()) is not None:
            for delta in deltas:
                yield delta


@dataclass
class Submitted:
    prompt: list[int]
    params: SamplingParams
    salt: str
    priority: int
    cache_report: bool = False


def score(
    token_id: int, logprob: float = -0.5, rank: int = 1, top: list[tuple[int, float]] | None = None
) -> TokenLogprobs:
    return TokenLogprobs(token_id, logprob, rank, top or [])


def spell(text: str, index: int = 0, cached: int = 0) -> list[OutputDelta]:
    """One delta for each byte of an ASCII text, the last one ends by EOS."""
    deltas = [OutputDelta(index, char, [ord(char)], num_cached_tokens=cached) for char in text]
    return [*deltas, OutputDelta(index, "", [EOS], finish_reason=FinishReason.STOP, num_cached_tokens=cached)]


@dataclass
class FakeEngine:
    """Answers `ok` unless `script` says otherwise; checks what AsyncEngine's admission checks."""

    script: Callable[[int, SamplingParams], list[Any]] | None = None
    chat_template: ChatTemplate | None = field(default_factory=lambda: ChatTemplate(TEMPLATE))
    state: str = "ready"
    max_model_len: int = 100
    full: bool = False
    heartbeat_age: float = 0.0
    submitted: list[Submitted] = field(default_factory=list)
    streams: list[FakeStream] = field(default_factory=list)
    stats: EngineStats = field(default_factory=EngineStats)
    info: dict[str, Any] = field(default_factory=lambda: {"dtype": "float32", "max_num_seqs": 64})
    commands: list[str] = field(default_factory=list)
    arguments: list[dict[str, Any]] = field(default_factory=list)  # of the commands
    replies: list[dict[str, Any] | Exception] = field(default_factory=list)  # to the coming commands
    tokenizer: ByteTokenizer = field(default_factory=ByteTokenizer)
    vocab_size: int = VOCAB

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    async def command(self, name: str, **arguments: Any) -> dict[str, Any]:
        self.commands.append(name)
        self.arguments.append(arguments)
        reply = self.replies.pop(0) if self.replies else {"freed_pages": 3}
        if isinstance(reply, Exception):
            raise reply
        return reply

    def queue_seconds(self) -> float:
        return 2.5

    def check_queue(self, num_prompt_tokens: int = 0) -> None:  # noqa: ARG002
        if self.full:
            raise QueueFullError("the queue is full", retry_after=6.1)

    async def submit(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        cache_salt: str = "",
        priority: int = 0,
        cache_report: bool = False,
    ) -> FakeStream:
        assert request_id
        if any(not 0 <= token < VOCAB for token in [*prompt, *params.logit_bias, *params.stop_token_ids]):
            raise InvalidRequestError("prompt: token id is not in the vocabulary", param="prompt")
        if len(prompt) + (params.max_tokens or 1) > self.max_model_len:
            raise ContextLengthError(
                f"the context is {self.max_model_len} tokens, the prompt has {len(prompt)}", param="prompt"
            )
        self.check_queue(len(prompt))
        number = len(self.submitted)
        self.submitted.append(Submitted(list(prompt), params, cache_salt, priority, cache_report))
        stream = FakeStream(self, self.script(number, params) if self.script else list(spell("ok")))
        self.streams.append(stream)
        return stream


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    writes: list[bytes]

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return dict(error)

    def events(self) -> list[Any]:
        assert self.body.endswith(b"\n\n")
        lines = self.body.decode().split("\n\n")[:-1]
        assert all(line.startswith("data: ") for line in lines)
        return [line[6:] if line[6:] == "[DONE]" else json.loads(line[6:]) for line in lines]


class Client:
    """Calls the ASGI app; `gone` set makes the client leave."""

    def __init__(self, app: Starlette, engine: FakeEngine, state: ServerState) -> None:
        self.app, self.engine, self.state = app, engine, state
        self.gone = asyncio.Event()

    async def call(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: dict[str, str] | None = None,
        chunk: int = 1 << 16,
        query: str = "",
        scope: dict[str, Any] | None = None,
    ) -> Answer:
        parts = [body[i : i + chunk] for i in range(0, len(body), chunk)] or [b""]
        messages: Iterator[dict[str, Any]] = iter(
            [{"type": "http.request", "body": p, "more_body": i + 1 < len(parts)} for i, p in enumerate(parts)]
        )
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            message = next(messages, None)
            if message is not None:
                return message
            await self.gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        given = {"content-type": "application/json", **(headers or {})}
        raw = [(k.encode(), v.encode("latin-1")) for k, v in given.items() if v]
        full_scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": method, "scheme": "http",
            "path": path, "raw_path": path.encode(), "query_string": query.encode(), "root_path": "", "headers": raw,
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8000),
            **(scope or {}),
        }  # fmt: skip
        await self.app(full_scope, receive, send)
        if not sent:
            return Answer(0, {}, b"", [])
        assert sent[0]["type"] == "http.response.start"
        writes = [m.get("body", b"") for m in sent[1:]]
        names = {k.decode(): v.decode() for k, v in sent[0]["headers"]}
        return Answer(sent[0]["status"], names, b"".join(writes), writes)

    async def post(self, path: str, body: Any, **kw: Any) -> Answer:
        return await self.call("POST", path, body if isinstance(body, bytes) else json.dumps(body).encode(), **kw)

    async def complete(self, **fields: Any) -> Answer:
        return await self.post("/v1/completions", {"prompt": "hi", **fields})

    async def chat(self, **fields: Any) -> Answer:
        return await self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], **fields})


def make_client(engine: FakeEngine | None, **settings: Any) -> Client:
    state = ServerState("/models/Tiny.Q4_1.gguf", ServerSettings(**settings))
    state.engine = engine  # type: ignore[assignment]
    state.phase = Phase.SERVING
    return Client(create_app(state), engine or FakeEngine(), state)


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
async def client(engine: FakeEngine) -> Client:
    return make_client(engine)

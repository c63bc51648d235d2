"""A client of any OpenAI-compatible server: one streamed request, and when its tokens came.

Knows: the API's fields and chunks, what counts as the first token. Must not know: load, statistics. A request that
fails is an Outcome with an error, never an exception.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import msgspec

from pinnate.bench.connection import Origin, Response, open_response
from pinnate.bench.datasets import Prompt
from pinnate.core.errors import EngineError

Message = dict[str, str]
_ERROR_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Target:
    """A server and how to ask it."""

    origin: Origin
    model: str
    chat: bool
    api_key: str | None = None
    temperature: float = 0.0
    ignore_eos: bool = False
    timeout: float = 3600.0  # seconds for a whole request

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def headers(self) -> dict[str, str]:
        key = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        return {"Content-Type": "application/json", **key}

    def body(self, prompt: Prompt | list[Message], output_len: int) -> bytes:
        fields: dict[str, Any] = {
            "model": self.model,
            "messages" if self.chat else "prompt": prompt,
            "max_tokens": output_len,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            fields["ignore_eos"] = True
        return msgspec.json.encode(fields)


@dataclass(slots=True)
class Outcome:
    """What became of one request. Times are in seconds; `start` is on perf_counter's clock.

    `ttft` and `latency` count from the moment the connection is opened; `latency` ends with the last chunk of output.
    `itl` holds the gaps between chunks that carry output. They are complete where `error` is None.
    """

    prompt_len: int
    start: float = 0.0
    ttft: float = 0.0
    latency: float = 0.0
    itl: list[float] = field(default_factory=list)
    output_len: int = 0
    text: str = ""
    error: str | None = None

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None where there is only one."""
        return (self.latency - self.ttft) / (self.output_len - 1) if self.output_len > 1 else None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class _Stream:
    """Reads one stream's events into its outcome."""

    def __init__(self, outcome: Outcome, chat: bool) -> None:
        self._outcome = outcome
        self._chat = chat
        self._last: float | None = None  # when the last output came
        self._chunks = 0
        self._usage: _Usage | None = None
        self._texts: list[str] = []
        self._ended = False

    def event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self._ended = True
            return
        chunk = _decode(data)
        if chunk.error is not None:
            raise _Failed(_message(chunk.error))
        self._usage = chunk.usage or self._usage
        for choice in chunk.choices:
            self._choice(choice, now)

    def _choice(self, choice: _Choice, now: float) -> None:
        delta = choice.delta
        text = choice.text if delta is None else delta.content or delta.reasoning_content or delta.reasoning
        # A first completion chunk without text holds a token all the same: a part of a character. A first chat chunk
        # without text holds the role, and some servers send it before they compute anything.
        first = self._last is None and not self._chat
        if text or first or (choice.finish_reason is not None and self._last is None):
            self._arrived(now)
        if text:
            self._texts.append(text)
        if choice.finish_reason is not None:
            self._ended = True
            self._outcome.latency = now - self._outcome.start

    def _arrived(self, now: float) -> None:
        outcome = self._outcome
        self._chunks += 1
        if self._last is None:
            outcome.ttft = now - outcome.start
        else:
            outcome.itl.append(now - self._last)
        self._last = now
        outcome.latency = now - outcome.start

    def finish(self) -> None:
        outcome = self._outcome
        outcome.text = "".join(self._texts)
        usage = self._usage or _Usage()
        # A server that counts nothing sends about one chunk for each token.
        outcome.output_len = usage.completion_tokens if usage.completion_tokens is not None else self._chunks
        outcome.prompt_len = usage.prompt_tokens if usage.prompt_tokens is not None else outcome.prompt_len
        if not self._ended:
            raise _Failed("the stream ended without [DONE] or a finish_reason")
        if self._last is None:
            raise _Failed("the stream held no output")


class _Failed(Exception):
    pass


async def send(target: Target, prompt: Prompt | list[Message], prompt_len: int, output_len: int) -> Outcome:
    """One streamed request. `prompt_len` stands unless the server counts it itself."""
    outcome = Outcome(prompt_len)
    stream = _Stream(outcome, target.chat)
    body = target.body(prompt, output_len)
    outcome.start = perf_counter()
    limit = asyncio.timeout(target.timeout)
    try:
        async with (
            limit,
            open_response(target.origin, "POST", target.path, headers=target.headers(), body=body) as response,
        ):
            if response.status != 200:
                raise _Failed(f"HTTP {response.status}: {_message(await response.read_all())}")
            await _read_events(response, stream)
        stream.finish()
    except (OSError, msgspec.DecodeError, _Failed) as error:
        late = f"no complete answer in {target.timeout:g} s"
        outcome.error = late if limit.expired() else str(error) or type(error).__name__
    return outcome


async def _read_events(response: Response, stream: _Stream) -> None:
    rest = b""
    while part := await response.read_part():
        now = perf_counter()
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                stream.event(line[5:].strip(), now)


async def first_model(origin: Origin, api_key: str | None) -> str:
    """The name of the first model that the server lists.

    Raises:
        EngineError: it cannot be reached or lists none.
    """
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    where = f"{origin.host}:{origin.port}{origin.prefix}/v1/models"
    try:
        async with open_response(origin, "GET", "/v1/models", headers=headers) as response:
            body = await response.read_all()
        if response.status != 200:
            raise EngineError(f"{where}: HTTP {response.status}: {_message(body)}")
        return str(msgspec.json.decode(body)["data"][0]["id"])
    except OSError as error:
        raise EngineError(f"{where}: {error}") from None
    except (msgspec.DecodeError, KeyError, IndexError, TypeError):
        raise EngineError(f"{where}: no list of models; name one with --model") from None


def _message(error: Any) -> str:
    """The words of an error as servers send it: an object, a nested one, or any text; one line."""
    if isinstance(error, bytes):
        try:
            error = msgspec.json.decode(error)
        except msgspec.DecodeError:
            error = error.decode("utf-8", "replace")
    while isinstance(error, dict):
        inner = error.get("error", error.get("message", error.get("detail")))
        error = inner if inner is not None else str(error)
    return " ".join(str(error).split())[:_ERROR_CHARACTERS]

"""One request, followed through every part of the engine, with its real tokens, pages and bytes. The walk through
docs/architecture.md shows what this prints.

python examples/one_request.py [MODEL]
"""

from __future__ import annotations

import asyncio
import re
import sys
from array import array
from collections import deque
from dataclasses import replace
from typing import Any

import msgspec

from pinnate.core.batch import SchedulerOutput, StepResult
from pinnate.core.config import EngineConfig
from pinnate.core.messages import Abort, FromEngine, StepOutputs, ToEngine
from pinnate.core.request import Request
from pinnate.engine.async_engine import AsyncEngine
from pinnate.engine.inproc import InprocClient
from pinnate.engine.model_text import load_model_text
from pinnate.executor.forward_batch import build_forward_batch
from pinnate.server import chat
from pinnate.server.app import CHAT
from pinnate.server.endpoint import GenerationEndpoint, Route
from pinnate.server.generation import Job, Output
from pinnate.server.protocol.common import Usage
from pinnate.server.settings import ServerSettings
from pinnate.server.state import Phase, ServerState
from pinnate.server.streaming import ChatChunkWriter
from pinnate.text.parsers.events import ChatEvent, ChatParser
from pinnate.weights.resolve import resolve_model

PAGE_SIZE = 16
seen: list[str] = []


def show(where: str, what: object) -> None:
    seen.append(f"{where:<20}{what}")


def run_of(numbers: Any) -> str:
    """`[0 1 2 3 4 5]` as `0..5`"""
    values = list(numbers)
    consecutive = len(values) > 2 and values == list(range(values[0], values[-1] + 1))
    return f"{values[0]}..{values[-1]}" if consecutive else " ".join(map(str, values))


class Here:
    """An EngineClient whose engine runs in this process, so that we can look into it. Messages are packed and unpacked
    as they are on their way to the engine's process and back."""

    def __init__(self, config: EngineConfig) -> None:
        self._client = InprocClient(config)
        self._arrived: deque[FromEngine] = deque()
        self._woken = asyncio.Event()
        executor: Any = self._client.core.executor
        self._execute = executor.execute
        executor.execute = self._watched_step

    heartbeat_age = 0.0

    async def ready(self) -> dict[str, Any]:
        return self._client.info

    def send(self, message: ToEngine) -> None:
        data = msgspec.msgpack.encode(message)
        if isinstance(message, Request):
            show(" 3 Request, down", f"{kilobytes(data)}: {message.request_id}, {len(message.prompt_token_ids)} tokens")
        if isinstance(message, Abort):
            show(" 9 Abort, down", f"{len(data)} bytes: choice {message.index} of {message.request_ids[0]}")
        self._client.send(msgspec.msgpack.decode(data, type=ToEngine))
        self._woken.set()

    async def receive(self) -> FromEngine:
        while not self._arrived:
            await asyncio.sleep(0)  # lets the server have its turn between two steps, as another process would
            if self._client.core.is_idle:
                await self._woken.wait()
            self._woken.clear()
            self._arrived += self._client.step()
        data = msgspec.msgpack.encode(self._arrived.popleft())
        message: FromEngine = msgspec.msgpack.decode(data, type=FromEngine)
        if isinstance(message, StepOutputs) and message.outputs:
            ids = [output.token_ids for output in message.outputs]
            show(" 8 StepOutputs, up", f"{kilobytes(data)}: tokens {ids}")
        return message

    async def close(self) -> None:
        self._client.close()

    def _watched_step(self, output: SchedulerOutput) -> StepResult:
        batch = build_forward_batch(output, PAGE_SIZE)
        for part in output.sequences:
            draws = [sample.position for sample in part.samples]
            show(
                " 5 SchedulerOutput",
                f"sequence {part.seq_id}: tokens {token_text(part.token_ids)} from position {part.start},",
            )
            show("", f"pages {list(part.page_table)}, draws token {draws}, copies {list(output.copies)}")
            show(" 6 ForwardBatch", f"positions {run_of(batch.positions)}, slots {run_of(batch.slots)},")
            show("", f"context {run_of(batch.contexts)}, logits of row {run_of(batch.logit_rows)}")
        result: StepResult = self._execute(output)
        show(" 6 StepResult", f"tokens {result.token_ids}")
        return result


def kilobytes(data: bytes) -> str:
    return f"{len(data) / 1000:.1f} KB"


def token_text(token_ids: array[int]) -> str:
    ids = [str(token) for token in token_ids]
    return " ".join(ids if len(ids) < 6 else [*ids[:3], "...", ids[-1], f"({len(ids)})"])


class WatchedParser:
    def __init__(self, parser: ChatParser) -> None:
        self._parser = parser

    def push(self, text: str) -> list[ChatEvent]:
        events = self._parser.push(text)
        show("10 events", f"{text!r} -> {events}")
        return events

    def finish(self) -> list[ChatEvent]:
        return self._parser.finish()


class WatchedWriter(ChatChunkWriter):
    def write(self, outputs: list[Output]) -> bytes:
        for _, delta in outputs:
            end = f"finish_reason {delta.finish_reason}, stop_reason {delta.stop_reason!r}"
            show(" 9 OutputDelta", f"text {delta.text!r}, tokens {delta.token_ids}, {end}")
        return super().write(outputs)

    def end(self, usage: Usage) -> bytes:
        show("10 usage", f"{usage.prompt_tokens} + {usage.completion_tokens} tokens")
        return super().end(usage)


async def watched_prepare(state: ServerState, engine: AsyncEngine, fields: dict[str, Any]) -> Job:
    job = await chat.prepare(state, engine, fields)
    ids = job.prompts[0].token_ids
    params = job.params
    show(" 1 SamplingParams", f"temperature {params.temperature:g}, max_tokens {params.max_tokens}, stop {params.stop}")
    show(" 2 prompt, its end", repr(engine.tokenizer.decode(ids[-14:], skip_special_tokens=False)))
    show(" 2 prompt, ids", f"{len(ids)}: {' '.join(map(str, ids[:6]))} ... {' '.join(map(str, ids[-14:]))}")
    return replace(job, new_parser=lambda: WatchedParser(job.new_parser()))


async def ask(endpoint: GenerationEndpoint, question: str) -> None:
    """A POST to the endpoint, as an ASGI server makes it."""
    body = msgspec.json.encode(
        {
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": 16,
            "stop": ["."],
            "stream": True,
            "request_id": "one",
        }
    )
    messages = deque([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> dict[str, Any]:
        if not messages:
            await asyncio.Event().wait()  # the client stays
        return messages.popleft()

    async def send(message: Any) -> None:
        for line in message.get("body", b"").decode().split("\n\n"):
            if line:
                show("10 SSE line", re.sub(r'\{.*"choices"', '{..., "choices"', line))

    show(" 1 body", body.decode())
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}
    await endpoint(scope, receive, send)


async def main() -> None:
    model = str(resolve_model(sys.argv[1] if len(sys.argv) > 1 else None))
    config = EngineConfig(model=model, page_size=PAGE_SIZE, num_pages=64, dtype="float32")
    client = Here(config)
    engine = AsyncEngine(load_model_text(model), client, await client.ready(), lambda: Here(config))
    state = ServerState(model, ServerSettings())
    state.engine, state.phase = engine, Phase.SERVING
    endpoint = GenerationEndpoint(state, Route(watched_prepare, WatchedWriter, CHAT.reply))
    await ask(endpoint, "What is the capital of Italy?")  # somebody else was here before
    seen.clear()
    await ask(endpoint, "What is the capital of France?")
    await engine.close()
    print("\n".join(seen))


if __name__ == "__main__":
    asyncio.run(main())

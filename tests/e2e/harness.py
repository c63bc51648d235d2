"""Starting the real server, and talking to it over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

START_SECONDS = 60.0


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Server:
    """`pinnate serve` in a process of its own; `log` is its stdout and stderr."""

    def __init__(self, folder: Path, *flags: str, model: str | None = None) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / f"server-{self.port}.log"
        arguments = [sys.executable, "-m", "pinnate.cli.main", "serve", *([model] if model else [])]
        environment = {k: v for k, v in os.environ.items() if k != "PINNATE_API_KEY"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*arguments, "--port", str(self.port), *flags],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=folder,
            )  # fmt: skip

    def health(self) -> int:
        """Status of /health; 0 where nothing answers."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def wait_until(self, *statuses: int, seconds: float = START_SECONDS) -> Server:
        end = time.monotonic() + seconds
        while (status := self.health()) not in statuses:
            assert time.monotonic() < end, f"/health is {status}, not {statuses}: {self.text()[-2000:]}"
            assert self.process.poll() is None or 0 in statuses, f"the server ended: {self.text()[-2000:]}"
            time.sleep(0.02)
        return self

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def children(self) -> list[int]:
        """Process ids of its children."""
        found = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        return [int(pid) for path in found for pid in path.read_text().split()]

    def resident_bytes(self) -> int:
        """Of its processes together."""
        lines = [Path(f"/proc/{pid}/statm").read_text() for pid in (self.process.pid, *self.children())]
        return sum(int(line.split()[1]) for line in lines) * os.sysconf("SC_PAGE_SIZE")

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def exit_code(self, seconds: float = 10.0) -> int:
        return self.process.wait(timeout=seconds)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.signal()
            try:
                self.process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@dataclass
class Answer:
    status: int
    body: bytes
    headers: dict[str, str]

    @property
    def json(self) -> Any:
        return json.loads(self.body, parse_constant=_no_constant)

    @property
    def error(self) -> dict[str, Any]:
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert "Traceback" not in error["message"]
        return dict(error)

    def choice(self, index: int = 0) -> dict[str, Any]:
        return dict(self.json["choices"][index])

    @property
    def text(self) -> str:
        choice = self.choice()
        return str(choice["text"] if "text" in choice else choice["message"]["content"])

    @property
    def texts(self) -> list[str]:
        return [choice["text"] for choice in self.json["choices"]]

    @property
    def cached(self) -> int:
        return int(self.json["usage"]["prompt_tokens_details"]["cached_tokens"])


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


@dataclass
class Streamed:
    """The events of one stream, in order; `done` counts [DONE], `times` are those of events with text."""

    status: int = 0
    body: bytes = b""
    events: list[dict[str, Any]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    done: int = 0
    complete: bool = False

    def pieces(self, index: int = 0) -> list[str]:
        found = []
        for choice in self.choices(index):
            piece = choice["text"] if "text" in choice else choice["delta"].get("content")
            if piece:
                found.append(piece)
        return found

    def choices(self, index: int = 0) -> list[dict[str, Any]]:
        return [c for event in self.events for c in event.get("choices", ()) if c["index"] == index]

    def text(self, index: int = 0) -> str:
        return "".join(self.pieces(index))

    def finish(self, index: int = 0) -> list[str]:
        return [c["finish_reason"] for c in self.choices(index) if c["finish_reason"] is not None]

    def feed(self, line: bytes) -> None:
        if not line.startswith(b"data: "):
            assert not line, line
        elif line == b"data: [DONE]":
            self.done += 1
        else:
            assert not self.done, "an event after [DONE]"
            event = json.loads(line[6:], parse_constant=_no_constant)
            self.events.append(event)
            if any(c.get("text") or c.get("delta", {}).get("content") for c in event.get("choices", ())):
                self.times.append(time.monotonic())

    @property
    def error(self) -> dict[str, Any] | None:
        found = [event["error"] for event in self.events if "error" in event]
        assert len(found) <= 1
        return found[0] if found else None


class Api:
    """A client of one server. Fields default to greedy and 8 tokens."""

    def __init__(self, server: Server, session: aiohttp.ClientSession, model: str) -> None:
        self.server, self.session, self.model = server, session, model

    async def request(self, method: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
        given = {"Content-Type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}}
        async with self.session.request(method, self.server.url + path, data=body, headers=given) as answer:
            return Answer(answer.status, await answer.read(), dict(answer.headers))

    async def get(self, path: str) -> Answer:
        return await self.request("GET", path)

    async def post(self, path: str, body: Any) -> Answer:
        return await self.request("POST", path, body if isinstance(body, bytes) else json.dumps(body).encode())

    def completion_body(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        return {"model": self.model, "prompt": prompt, "temperature": 0, "max_tokens": 8, **fields}

    def chat_body(self, content: Any, **fields: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
        return {"model": self.model, "messages": messages, "temperature": 0, "max_tokens": 8, **fields}

    async def complete(self, prompt: Any, **fields: Any) -> Answer:
        return await self.post("/v1/completions", self.completion_body(prompt, **fields))

    async def chat(self, content: Any, **fields: Any) -> Answer:
        return await self.post("/v1/chat/completions", self.chat_body(content, **fields))

    async def stream(self, prompt: Any, leave_after: int | None = None, **fields: Any) -> Streamed:
        body = self.completion_body(prompt, stream=True, **fields)
        return await self.stream_of("/v1/completions", body, leave_after)

    async def stream_chat(self, content: Any, **fields: Any) -> Streamed:
        return await self.stream_of("/v1/chat/completions", self.chat_body(content, stream=True, **fields))

    async def stream_of(self, path: str, body: dict[str, Any], leave_after: int | None = None) -> Streamed:
        """`leave_after` n events with text: closes the connection then."""
        streamed, rest = Streamed(), b""
        async with self.session.post(self.server.url + path, json=body) as answer:
            streamed.status = answer.status
            if answer.status != 200:
                streamed.body = await answer.read()
                return streamed
            assert answer.headers["Content-Type"].startswith("text/event-stream")
            with contextlib.suppress(aiohttp.ClientPayloadError):  # cut off: `complete` stays False
                async for part in answer.content.iter_any():
                    *lines, rest = (rest + part).split(b"\n")
                    for line in lines:
                        streamed.feed(line)
                    if leave_after is not None and len(streamed.times) >= leave_after:
                        answer.close()
                        return streamed
                streamed.complete = True
        return streamed

    async def drop(self, body: dict[str, Any], seconds: float, *, reset: bool = False) -> None:
        """Sends a completion request and leaves after some time, by FIN or by RST."""
        data = json.dumps(body).encode()
        _, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        writer.write(
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n".encode()
            + data
        )
        await asyncio.sleep(seconds)
        if reset:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.close()

    async def metrics(self) -> dict[str, float]:
        """Values by name without the prefix, summed over labels. The text must parse."""
        values: dict[str, float] = {}
        for family in text_string_to_metric_families((await self.get("/metrics")).body.decode()):
            for sample in family.samples:
                name = sample.name.removeprefix("pinnate:")
                values[name] = values.get(name, 0.0) + sample.value
        return values

    async def until_idle(self, seconds: float = 5.0) -> dict[str, float]:
        """Waits until nothing runs or waits."""
        end = time.monotonic() + seconds
        while True:
            values = await self.metrics()
            if values["num_requests_running"] == values["num_requests_waiting"] == 0:
                return values
            assert time.monotonic() < end, f"still running {seconds} s later"
            await asyncio.sleep(0.05)

    async def bytes_beside_kv(self, seconds: float = 20.0) -> int:
        """Resident bytes of all processes less the committed KV memory, once idle time has committed all of that: an
        idle server takes its pool's memory part by part, and a reading in between means nothing."""
        end, before = time.monotonic() + seconds, 0
        while True:
            resident, committed = self.server.resident_bytes(), int((await self.metrics())["kv_committed_bytes"])
            if resident >= committed and abs(resident - before) < 1 << 20:
                return resident - committed
            assert time.monotonic() < end, f"{resident} bytes, {before} before: still changing after {seconds} s"
            before = resident
            await asyncio.sleep(0.3)


def fresh_ids(count: int) -> list[int]:
    """Ids that no request has begun with: a random word, then counting."""
    return [random.randrange(3000, 48000), *counting_ids(count - 1)]


def counting(last: int, first: int = 1) -> str:
    return ", ".join(str(number) for number in range(first, last + 1)) + ","


def ids_of(text: str) -> list[int]:
    """Token ids of a text of digits, commas and blanks in SmolLM2's vocabulary: one for each character."""
    return [28 if char == "," else 216 if char == " " else 32 + int(char) for char in text]


def counting_ids(count: int) -> list[int]:
    return ids_of(counting(2000)[:count])

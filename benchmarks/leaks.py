"""Requests that are aborted at random moments in random ways, and what they leave behind: nothing.

    python benchmarks/leaks.py [--requests 2000] [--out FILE] [--executor simulated] [-- FLAGS OF pinnate serve]

Starts a small server (8 sequences at once, steps of 1 ms) and sends it requests of every kind: plain and streamed, n
choices, several prompts, beams, best_of, schemas that must be compiled, and the other APIs. Most clients leave: in the
middle of their own body, while queued, compiling, in the prompt, in the output; by FIN, by RST, by closing their half
alone. At ten points, with everybody gone: gauges, the books of the KV memory, memory and open files of both processes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

CLIENTS = 24
POINTS = 10
FLAGS = ("--max-num-seqs", "8", "--max-num-batched-tokens", "256", "--max-model-len", "2048", "--num-pages", "1200")
WAYS = ("fin", "rst", "half", "cut body", "stay")
WEIGHTS = (35, 25, 15, 15, 10)

GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "kv_pages", "kv_pages_free")

Body = tuple[str, dict[str, Any]]  # path, fields


def ids(rng: random.Random) -> list[int]:
    return [rng.randrange(3, 40_000) for _ in range(rng.choice((5, 100, 1000)))]


def plain(rng: random.Random) -> Body:
    return "/v1/completions", {"prompt": ids(rng)}


def chat(rng: random.Random) -> Body:
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi " * rng.randrange(1, 300)}]}


def choices(rng: random.Random) -> Body:
    return "/v1/completions", {"prompt": ids(rng), "n": rng.randrange(2, 9)}


def prompts(rng: random.Random) -> Body:
    return "/v1/completions", {"prompt": [ids(rng) for _ in range(3)], "n": 2, "logprobs": 2}


def beams(rng: random.Random) -> Body:
    return "/v1/completions", {"prompt": ids(rng), "n": 4, "use_beam_search": True, "max_tokens": 200}


def best_of(rng: random.Random) -> Body:
    return "/v1/completions", {"prompt": ids(rng), "best_of": 4, "stream": False}


def schema(rng: random.Random) -> Body:
    names = [f"field{rng.randrange(10**9)}" for _ in range(8)]
    properties = {name: {"type": "string", "maxLength": 500} for name in names}
    wanted = {"type": "object", "properties": properties, "required": names, "additionalProperties": False}
    path, fields = chat(rng)
    return path, {**fields, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": wanted}}}


def messages(rng: random.Random) -> Body:
    return "/v1/messages", {"model": "SmolLM2-135M-Instruct", **chat(rng)[1]}


def responses(rng: random.Random) -> Body:
    limit = {"max_output_tokens": rng.choice((20, 600)), "max_tokens": None}
    return "/v1/responses", {"input": "hi " * rng.randrange(1, 300), "store": False, **limit}


def generate(rng: random.Random) -> Body:
    sampling = {"max_new_tokens": 200, "ignore_eos": True, "n": 2}
    return "/generate", {"input_ids": [ids(rng) for _ in range(2)], "sampling_params": sampling, "max_tokens": None}


Kinds = tuple[Callable[[random.Random], Body], ...]
KINDS: Kinds = (
    plain, chat, choices, prompts, beams, best_of, schema, messages, responses, generate,
)  # fmt: skip


def make_request(rng: random.Random, kinds: Kinds) -> bytes:
    path, fields = rng.choice(kinds)(rng)
    free = path in ("/v1/completions", "/v1/chat/completions") and "response_format" not in fields
    length = {"ignore_eos": True} if free else {}
    body = {"max_tokens": rng.choice((20, 600)), "stream": rng.random() < 0.5, **length, **fields}
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


class Crowd:
    """CLIENTS clients at once, until the wanted number of requests has been made. `seen` counts ways and answers."""

    def __init__(self, port: int, rng: random.Random, kinds: Kinds) -> None:
        self._port = port
        self._rng = rng
        self._kinds = kinds
        self.seen: Counter[str] = Counter()

    async def run(self, count: int) -> None:
        left = iter(range(count))

        async def client() -> None:
            for _ in left:
                await self._one(make_request(self._rng, self._kinds), self._rng.choices(WAYS, WEIGHTS)[0])

        await asyncio.gather(*(client() for _ in range(CLIENTS)))

    async def _one(self, request: bytes, way: str) -> None:
        self.seen[way] += 1
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, limit=1 << 26)
        try:
            if way == "cut body":
                writer.write(request[: self._rng.randrange(1, len(request))])
                await asyncio.sleep(self._rng.random() * 0.01)
                return
            writer.write(request)
            if way == "stay":
                await self._read_answer(reader)
                return
            await self._wait_a_while(reader)
            if way == "half":
                writer.write_eof()
                await asyncio.wait_for(reader.read(-1), 20)
            elif way == "rst":
                connection = writer.get_extra_info("socket")
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        except ConnectionError:
            self.seen["connection ended"] += 1
        finally:
            writer.close()

    async def _wait_a_while(self, reader: asyncio.StreamReader) -> None:
        """Up to 200 ms; or until there is output, and then a little."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(reader.read(1000), self._rng.expovariate(25))
            await asyncio.sleep(self._rng.random() * 0.05)

    async def _read_answer(self, reader: asyncio.StreamReader) -> None:
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
        self.seen[head.split(b" ", 2)[1].decode()] += 1
        # Answers have a length or are chunked and end with an empty chunk.
        length = [int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
        await asyncio.wait_for(reader.readexactly(length[0]) if length else reader.readuntil(b"\r\n0\r\n\r\n"), 60)


class Server:
    def __init__(self, executor: str, flags: list[str]) -> None:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self.port = int(s.getsockname()[1])
        pace = ["--simulated-step-ms", "1"] if executor == "simulated" else []
        command = [sys.executable, "-m", "pinnate.cli.main", "serve", "--port", str(self.port), "--executor", executor]
        self.process = subprocess.Popen([*command, *pace, *FLAGS, *flags], stdout=subprocess.DEVNULL)
        end = time.monotonic() + 60
        while not self._is_ready():
            if time.monotonic() > end or self.process.poll() is not None:
                raise SystemExit("the server did not start")
            time.sleep(0.05)
        children = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        self.processes = {
            "server": self.process.pid,
            "engine": int("".join(p.read_text() for p in children).split()[0]),
        }

    def call(self, method: str, path: str) -> bytes:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", method=method)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return bytes(answer.read())

    def metrics(self) -> dict[str, float]:
        """By name and labels, as they are written."""
        lines = [line.rsplit(" ", 1) for line in self.call("GET", "/metrics").decode().splitlines()]
        return {name.removeprefix("pinnate:"): float(value) for name, value in lines if not name.startswith("#")}

    def gauges(self) -> dict[str, float]:
        values = self.metrics()
        return {name: values[name] for name in GAUGES}

    def aborted_choices(self) -> int:
        return int(self.metrics()['request_success_total{finished_reason="abort"}'])

    async def settle(self, seconds: float = 20.0) -> dict[str, Any]:
        """Waits until nothing runs or waits; what is then left. Raises where it should be nothing."""
        end = time.monotonic() + seconds
        while True:
            now = await asyncio.to_thread(self.gauges)
            if now["num_requests_running"] == now["num_requests_waiting"] == now["kv_cache_usage_perc"] == 0:
                break
            if time.monotonic() > end:
                raise SystemExit(f"something is left {seconds} s after the last client: {now}")
            await asyncio.sleep(0.02)
        await asyncio.to_thread(self.call, "POST", "/debug/check_integrity")
        await asyncio.to_thread(self.call, "POST", "/flush_cache")
        now = await asyncio.to_thread(self.gauges)
        if now["kv_pages_free"] != now["kv_pages"]:
            raise SystemExit(f"pages are lost: {now}")
        return {name: footprint(pid) for name, pid in self.processes.items()}

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=20)

    def _is_ready(self) -> bool:
        try:
            return bool(self.call("GET", "/health")) or True
        except OSError:
            return False


def footprint(pid: int) -> dict[str, float]:
    status = Path(f"/proc/{pid}/status").read_text().split("\n")
    values = dict(line.split(":", 1) for line in status if ":" in line)
    return {
        "rss_mb": int(values["VmRSS"].split()[0]) / 1024,
        "threads": int(values["Threads"]),
        "files": len(list(Path(f"/proc/{pid}/fd").iterdir())),
    }


async def measure(
    server: Server, requests: int, seed: int, *, points: int = POINTS, kinds: Kinds = KINDS
) -> dict[str, Any]:
    """Footprints of both processes after each of `points` rounds.

    Raises:
        SystemExit: a round left something behind.
    """
    crowd = Crowd(server.port, random.Random(seed), kinds)
    rounds = []
    for _ in range(points):
        await crowd.run(requests // points)
        rounds.append(await server.settle())
    aborted = await asyncio.to_thread(server.aborted_choices)
    seen = dict(sorted(crowd.seen.items()))
    return {"requests": requests, "seen": seen, "aborted_choices": aborted, "rounds": rounds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--executor", default="simulated")
    parser.add_argument("--kinds", default=",".join(kind.__name__ for kind in KINDS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("flags", nargs="*", help="more flags of pinnate serve, after --")
    args = parser.parse_args()
    kinds = tuple(kind for kind in KINDS if kind.__name__ in args.kinds.split(","))
    server = Server(args.executor, args.flags)
    try:
        result = asyncio.run(measure(server, args.requests, args.seed, kinds=kinds))
    finally:
        code = server.stop()
    print(result["seen"], "aborted choices", result["aborted_choices"], "exit code", code)
    for number, found in enumerate(result["rounds"], 1):
        both = "   ".join(
            f"{name} {f['rss_mb']:.1f} MB {f['files']} files {f['threads']} threads" for name, f in found.items()
        )
        print(f"{number * args.requests // POINTS:>6} requests   {both}")
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

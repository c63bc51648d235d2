"""What one streamed token costs the API process: HTTP, JSON, tokenising, detokenising; no model behind it.

    python benchmarks/server_cost.py [--streams 64] [--seconds 8] [--repeats 3] [--rate 16000] [--out FILE]

Starts `pinnate serve --executor simulated`: the real server, engine process and scheduler, with tokens made up at once.
A client in this process reads raw sockets and counts events. The CPU time of the server's process (not the engine's)
comes from /proc. Two loads for each route:

    paced   steps come at the given tokens per second in all, so each token is an event of its own: the cost of a token
    full    steps come as fast as they can; a server that cannot keep up merges tokens into fewer events
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

PROMPT = "Pinnate serves large language models: many users, one machine or many, and an API in front of it. " * 3
OUTPUT_TOKENS = 500
BARS = {"cpu_us_per_token": 60.0, "tokens_per_second": 15_000.0}
_TICK = os.sysconf("SC_CLK_TCK")


class Load:
    """Keeps `streams` streamed requests under way, each on a connection of its own."""

    def __init__(self, port: int, streams: int, chat: bool) -> None:
        prompt: dict[str, Any] = {"messages": [{"role": "user", "content": PROMPT}]} if chat else {"prompt": PROMPT}
        fields = {**prompt, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "stream": True, "temperature": 0.7}
        body = json.dumps(fields).encode()
        path = "/v1/chat/completions" if chat else "/v1/completions"
        lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json", f"Content-Length: {len(body)}"]
        self._request = "\r\n".join([*lines, "", ""]).encode() + body
        self._selector = selectors.DefaultSelector()
        self.events = 0
        self.bytes = 0
        self._sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(streams)]
        for connection in self._sockets:
            connection.setblocking(False)
            self._selector.register(connection, selectors.EVENT_READ)

    def start(self) -> None:
        for connection in self._sockets:
            connection.sendall(self._request)

    def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                self._read(key.fileobj)

    def close(self) -> None:
        for connection in self._sockets:
            connection.close()
        self._selector.close()

    def _read(self, connection: Any) -> None:
        data = connection.recv(1 << 16)
        if not data or data.startswith(b"HTTP/1.1 4") or data.startswith(b"HTTP/1.1 5"):
            raise SystemExit(f"the server refused or left: {data[:300]!r}")
        self.bytes += len(data)
        self.events += data.count(b"data: {")
        if b"data: [DONE]" in data:
            connection.sendall(self._request)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process, all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


def generated(port: int) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith("pinnate:generation_tokens_total "):
                return float(line.split()[1])
    raise SystemExit("/metrics has no generation_tokens_total")


def start_server(port: int, streams: int, step_ms: float, flags: list[str]) -> subprocess.Popen[bytes]:
    command = [
        *(sys.executable, "-m", "pinnate.cli.main", "serve", "--port", str(port), "--executor", "simulated"),
        *("--simulated-step-ms", str(step_ms), "--max-num-seqs", str(streams), "--max-num-batched-tokens", "2048"),
        *("--max-model-len", "2048", "--num-pages", str(streams * 128), *flags),
    ]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health"):
                return process
        except OSError:
            time.sleep(0.05)
    raise SystemExit(f"the server did not start: {process.poll()}")


def measure(port: int, process: subprocess.Popen[bytes], streams: int, chat: bool, seconds: float) -> dict[str, float]:
    load = Load(port, streams, chat)
    load.start()
    load.run(1.0)  # connections open, caches warm
    before = (generated(port), load.events, load.bytes, cpu_seconds(process.pid), time.monotonic())
    load.run(seconds)
    after = (generated(port), load.events, load.bytes, cpu_seconds(process.pid), time.monotonic())
    load.close()
    tokens, events, size, cpu, wall = (b - a for a, b in zip(before, after, strict=True))
    return {
        "tokens_per_second": tokens / wall,
        "cpu_us_per_token": cpu / tokens * 1e6,
        "cpu_us_per_event": cpu / events * 1e6,
        "events_per_token": events / tokens,
        "bytes_per_event": size / events,
        "cpu_share": cpu / wall,
    }


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def run(args: argparse.Namespace, load: str, chat: bool) -> dict[str, Any]:
    port = free_port()
    step_ms = 0.0 if load == "full" else args.streams / args.rate * 1000
    process = start_server(port, args.streams, step_ms, args.flags)
    try:
        rounds = [measure(port, process, args.streams, chat, args.seconds) for _ in range(args.repeats)]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=20)
    medians = {name: statistics.median(round[name] for round in rounds) for name in rounds[0]}
    return {"route": "chat" if chat else "completions", "load": load, "streams": args.streams, **medians}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rate", type=float, default=16_000.0, help="tokens per second of the paced load")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--routes", default="completions,chat")
    parser.add_argument("--loads", default="paced,full")
    parser.add_argument("--out", type=Path)
    parser.add_argument("flags", nargs="*", help="more flags of pinnate serve, after --")
    args = parser.parse_args()
    results = []
    print(f"{'route':<13}{'load':<7}{'tokens/s':>10}{'us/token':>10}{'us/event':>10}{'events/token':>14}{'CPU':>7}")
    for load in args.loads.split(","):
        for route in args.routes.split(","):
            m = run(args, load, route == "chat")
            results.append(m)
            numbers = f"{m['tokens_per_second']:>10.0f}{m['cpu_us_per_token']:>10.1f}{m['cpu_us_per_event']:>10.1f}"
            print(f"{route:<13}{load:<7}{numbers}{m['events_per_token']:>14.3f}{m['cpu_share']:>7.0%}", flush=True)
    if args.out:
        args.out.write_text(json.dumps({"bars": BARS, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()

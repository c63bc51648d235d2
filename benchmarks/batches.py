"""Batches beside live traffic: what they cost it, how fast they are, what their order is worth.

    python benchmarks/batches.py [--parts order,throughput,latency] [--out benchmarks/results/batches.json]

order        hit rate of the prefix cache in a pool that holds a fraction of all prefixes: the requests in the order of
             the file, sent one after another as places are free, and as a batch, which runs depth first
throughput   the same requests as a batch, and live over HTTP with as many at once
latency      a live stream now and then: alone, above a batch that fills the engine, above the same requests sent live

Each part starts its own server with the default model. Parts of an existing --out file that are not run are kept.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
from serving import free_port, start_server, stop_server

MODEL = "SmolLM2-135M-Instruct"
FINISHED = ("completed", "failed", "expired", "cancelled")
SEED = 7

Body = dict[str, Any]


def tree(groups: int, members: int, shared: int, own: int, max_tokens: int) -> list[Body]:
    """Requests in `groups` that share `shared` prompt tokens each, shuffled."""
    rng = random.Random(SEED)
    bodies = []
    for _ in range(groups):
        prefix = [rng.randrange(1000, 40_000) for _ in range(shared)]
        for _ in range(members):
            prompt = prefix + [rng.randrange(1000, 40_000) for _ in range(own)]
            bodies.append({"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True})
    rng.shuffle(bodies)
    return bodies


class Server:
    """`pinnate serve` with a data directory, and a client of it."""

    def __init__(self, *flags: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._port = free_port()
        self._process, _ = start_server(self._port, ["--data-dir", self._folder.name, *flags])

    async def __aenter__(self) -> Server:
        self._session = aiohttp.ClientSession(
            f"http://127.0.0.1:{self._port}",
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
        )
        await self.complete({"prompt": "warm up", "max_tokens": 8})
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._session.close()
        stop_server(self._process)
        self._folder.cleanup()

    async def complete(self, body: Body) -> dict[str, int]:
        """Returns its usage."""
        async with self._session.post("/v1/completions", json=body) as answer:
            answer.raise_for_status()
            usage: dict[str, Any] = (await answer.json())["usage"]
            return {"prompt": usage["prompt_tokens"], "cached": usage["prompt_tokens_details"]["cached_tokens"]}

    async def stream(self, body: Body) -> tuple[float, list[float]]:
        """Seconds to the first token, and between the others."""
        began = time.perf_counter()
        times: list[float] = []
        async with self._session.post("/v1/completions", json={**body, "stream": True}) as answer:
            answer.raise_for_status()
            times += [time.perf_counter() async for line in answer.content if line.startswith(b"data: {")]
        return times[0] - began, [b - a for a, b in itertools.pairwise(times)]

    async def all_live(self, bodies: Sequence[Body], at_once: int) -> list[dict[str, int]]:
        gate = asyncio.Semaphore(at_once)

        async def one(body: Body) -> dict[str, int]:
            async with gate:
                return await self.complete(body)

        return await asyncio.gather(*(one(body) for body in bodies))

    async def start_batch(self, bodies: Sequence[Body]) -> str:
        lines = [
            json.dumps({"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body})
            for i, body in enumerate(bodies)
        ]
        form = aiohttp.FormData()
        form.add_field("purpose", "batch")
        form.add_field("file", "\n".join(lines).encode(), filename="in.jsonl")
        async with self._session.post("/v1/files", data=form) as answer:
            file_id = (await answer.json())["id"]
        asked = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
        async with self._session.post("/v1/batches", json=asked) as answer:
            batch: dict[str, str] = await answer.json()
            return batch["id"]

    async def batch(self, batch_id: str, *statuses: str) -> dict[str, Any]:
        while True:
            async with self._session.get(f"/v1/batches/{batch_id}") as answer:
                batch: dict[str, Any] = await answer.json()
            if batch["status"] in (statuses or FINISHED):
                return batch
            await asyncio.sleep(0.02)

    async def cancel(self, batch_id: str) -> None:
        async with self._session.post(f"/v1/batches/{batch_id}/cancel") as answer:
            await answer.read()


async def order(repeats: int) -> dict[str, Any]:
    """24 prefixes of 256 tokens in a pool of 2048, four requests at once."""
    bodies = tree(groups=24, members=6, shared=256, own=16, max_tokens=4)
    rows = []
    for _ in range(repeats):
        async with Server("--num-pages", "128", "--max-num-seqs", "4", "--max-model-len", "1024") as server:
            began = time.perf_counter()
            usages = await server.all_live(bodies, 4)
            live = time.perf_counter() - began
        hits = sum(each["cached"] for each in usages) / sum(each["prompt"] for each in usages)
        async with Server("--num-pages", "128", "--max-num-seqs", "4", "--max-model-len", "1024") as server:
            began = time.perf_counter()
            usage = (await server.batch(await server.start_batch(bodies)))["usage"]
            batch = time.perf_counter() - began
        found = usage["input_tokens_details"]["cached_tokens"] / usage["input_tokens"]
        rows.append({"hit_rate_file_order": hits, "hit_rate_batch": found, "s_file_order": live, "s_batch": batch})
    return medians(rows) | {"requests": len(bodies), "best_hit_rate": 5 / 6 * 256 / 272}


async def throughput(repeats: int) -> dict[str, Any]:
    """160 prompts of 96 tokens without anything in common, 48 tokens of output."""
    bodies = tree(groups=160, members=1, shared=64, own=32, max_tokens=48)
    rows = []
    async with Server() as server:
        for repeat in range(repeats):
            seconds: dict[str, float] = {}
            for kind in ("live", "batch") if repeat % 2 else ("batch", "live"):  # the machine's speed drifts
                fresh = [{**body, "cache_salt": f"{kind}-{repeat}"} for body in bodies]
                began = time.perf_counter()
                if kind == "live":
                    await server.all_live(fresh, 73)  # as many as a batch has in flight with 64 places
                else:
                    batch = await server.batch(await server.start_batch(fresh))
                    assert batch["request_counts"]["completed"] == len(bodies)
                seconds[kind] = time.perf_counter() - began
            rows.append({f"{kind}_requests_per_s": len(bodies) / each for kind, each in seconds.items()})
    return medians(rows)


async def latency(repeats: int) -> dict[str, Any]:
    """A stream of 64 prompt tokens and 32 of output, `repeats` times 4, in three surroundings."""
    rng = random.Random(SEED)
    below = tree(groups=40, members=50, shared=64, own=32, max_tokens=256)

    async def measure(server: Server) -> dict[str, float]:
        firsts, gaps = [], []
        for _ in range(4 * repeats):
            prompt = [rng.randrange(1000, 40_000) for _ in range(64)]
            first, between = await server.stream(
                {"prompt": prompt, "max_tokens": 32, "temperature": 0, "ignore_eos": True}
            )
            firsts.append(first)
            gaps += between
            await asyncio.sleep(0.1)
        return {
            "ttft_ms_p50": 1e3 * statistics.median(firsts), "ttft_ms_max": 1e3 * max(firsts),
            "tpot_ms_p50": 1e3 * statistics.median(gaps), "tpot_ms_p95": 1e3 * statistics.quantiles(gaps, n=20)[-1],
        }  # fmt: skip

    async with Server() as server:
        alone = await measure(server)
        batch_id = await server.start_batch(below)
        await server.batch(batch_id, "in_progress")
        await asyncio.sleep(1)
        above_batch = await measure(server)
        await server.cancel(batch_id)
        await server.batch(batch_id)
        flood = asyncio.create_task(server.all_live(below, 73))
        await asyncio.sleep(1)
        above_live = await measure(server)
        flood.cancel()
    return {"alone": alone, "above_a_batch": above_batch, "above_the_same_live": above_live}


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


PARTS = {"order": order, "throughput": throughput, "latency": latency}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results: dict[str, Any] = {}
    if args.out is not None and args.out.exists():
        results = json.loads(args.out.read_text())
    for part in args.parts.split(","):
        results[part] = {"repeats": args.repeats, **asyncio.run(PARTS[part](args.repeats))}
        print(part, json.dumps(results[part], indent=1), flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps({**results, "model": MODEL, "cpus": os.cpu_count()}, indent=1) + "\n")


if __name__ == "__main__":
    main()

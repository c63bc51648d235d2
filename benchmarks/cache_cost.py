"""What the prefix cache costs where nothing is ever found in it: the same random requests with it and without.

    python benchmarks/cache_cost.py [--requests 200] [--repeats 5] [--out FILE]

Requests of 64 + 32 tokens, 32 at a time, the engine in this process. The cache is Python, so its cost is the
difference in time outside the native call, as a share of the whole time; wall times are noisier than that. Medians.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from step_overhead import TimedProgram

from pinnate.core.config import EngineConfig
from pinnate.core.request import Request
from pinnate.core.sampling import SamplingParams
from pinnate.engine.inproc import InprocClient
from pinnate.weights.resolve import resolve_model

PROMPT, OUTPUT, CONCURRENCY = 64, 32, 32


def run(requests: int, seed: int, caching: bool) -> dict[str, float]:
    """Seconds in all, and of those outside the native call."""
    config = EngineConfig(
        model=str(resolve_model(None)), max_num_seqs=CONCURRENCY, enable_prefix_caching=caching, kv_cache_memory=1 << 28
    )
    client = InprocClient(config)
    program = TimedProgram(client.core.executor._program)  # type: ignore[attr-defined]
    client.core.executor._program = program  # type: ignore[attr-defined]
    rng = random.Random(seed)
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, min_tokens=OUTPUT, ignore_eos=True, seed=0)
    left = [[rng.randrange(100, 40000) for _ in range(PROMPT)] for _ in range(requests)]
    number, running, wall, native = 0, 0, 0.0, 0.0
    while left or running:
        begin = time.perf_counter()
        while left and running < CONCURRENCY:
            prompt = left.pop()
            client.send(Request(request_id=str(number), prompt_token_ids=prompt, sampling=params, eos_token_ids=(2,)))
            number, running = number + 1, running + 1
        program.seconds = 0.0
        messages: list[Any] = client.step()
        wall += time.perf_counter() - begin
        native += program.seconds
        running -= sum(o.finish_reason is not None for m in messages for o in getattr(m, "outputs", ()))
    client.close()
    return {"seconds": wall, "python_s": wall - native}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    runs = [{c: run(args.requests, seed, c) for c in (True, False)} for seed in range(args.repeats)]
    result = {
        "with": {k: statistics.median(r[True][k] for r in runs) for k in ("seconds", "python_s")},
        "without": {k: statistics.median(r[False][k] for r in runs) for k in ("seconds", "python_s")},
        "cost": statistics.median((r[True]["python_s"] - r[False]["python_s"]) / r[False]["seconds"] for r in runs),
    }
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Python's share of a decode step: all of EngineCore.step that is not the native call, and msgpack of its outputs.

    python benchmarks/step_overhead.py [--rows 1,8,32,64] [--steps 100] [--out FILE]

The engine runs in this process with the default model; a wrapper times the native call. Medians over steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import msgspec

from pinnate.core.config import EngineConfig
from pinnate.core.kv_events import KVEventsConfig
from pinnate.core.request import Request
from pinnate.core.sampling import SamplingParams
from pinnate.engine.inproc import InprocClient
from pinnate.weights.resolve import resolve_model

PROMPT = 64


class TimedProgram:
    """Stands in for the native program and notes how long each run took."""

    def __init__(self, program: Any) -> None:
        self._program = program
        self.seconds = 0.0

    def run(self, *args: Any) -> Any:
        begin = time.perf_counter()
        result = self._program.run(*args)
        self.seconds = time.perf_counter() - begin
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)


def measure(rows: int, steps: int, kv_events: KVEventsConfig | None = None) -> dict[str, float]:
    """Medians in seconds of a step in which `rows` sequences decode."""
    config = EngineConfig(
        model=str(resolve_model(None)),
        max_num_seqs=rows,
        max_num_batched_tokens=max(512, rows),
        kv_events=kv_events,
    )
    client = InprocClient(config)
    program = TimedProgram(client.core.executor._program)  # type: ignore[attr-defined]
    client.core.executor._program = program  # type: ignore[attr-defined]
    params = SamplingParams(temperature=0.0, max_tokens=steps + 16, min_tokens=steps + 16, ignore_eos=True, seed=0)
    for i in range(rows):
        prompt = [100 + (i * 7919 + j * 31) % 40000 for j in range(PROMPT)]
        client.send(Request(request_id=str(i), prompt_token_ids=prompt, sampling=params, eos_token_ids=(2,)))
    for _ in range(rows * PROMPT // 512 + 4):
        client.step()
    encoder = msgspec.msgpack.Encoder()
    whole, native, encode = [], [], []
    for _ in range(steps):
        begin = time.perf_counter()
        messages = client.step()
        ran = time.perf_counter()
        for message in messages:
            encoder.encode(message)
        encode.append(time.perf_counter() - ran)
        whole.append(ran - begin)
        native.append(program.seconds)
    client.close()
    python = statistics.median(w - n + e for w, n, e in zip(whole, native, encode, strict=True))
    step = statistics.median(w + e for w, e in zip(whole, encode, strict=True))
    return {
        "rows": rows,
        "step_s": step,
        "native_s": statistics.median(native),
        "python_s": python,
        "share": python / step,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,8,32,64")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--kv-events", action="store_true", help="publish KV events meanwhile, to nobody")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    print(f"{'rows':>5}{'step ms':>11}{'native ms':>11}{'python ms':>11}{'share':>8}")
    results = []
    for rows in (int(r) for r in args.rows.split(",")):
        m = measure(rows, args.steps, KVEventsConfig(endpoint="tcp://127.0.0.1:*") if args.kv_events else None)
        results.append(m)
        milliseconds = "".join(f"{m[key] * 1e3:>11.3f}" for key in ("step_s", "native_s", "python_s"))
        print(f"{rows:>5}{milliseconds}{m['share']:>8.1%}")
    if args.out:
        args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

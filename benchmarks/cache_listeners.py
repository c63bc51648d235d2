"""What the control plane costs with and without those who listen to the prefix tree: KV events, cache reports.

    python benchmarks/cache_listeners.py [--mode off,events,reports,both] [--repeat 7] [--out FILE]

The scheduler and the KV memory run a mixed load with no model behind them: 32 sequences decode, prompts with a shared
prefix come and go, the pool is small enough that pages are evicted all the time. CPU time of the engine's thread for
each step, median over repeats that take turns; `events` publishes to a real socket with one subscriber. `--once MODE`:
one run and nothing else, for an instruction counter (valgrind --tool=callgrind).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

import zmq

from pinnate.core.batch import SchedulerOutput, StepResult
from pinnate.core.config import EngineConfig
from pinnate.core.kv_events import KVEventsConfig
from pinnate.core.request import Request
from pinnate.core.sampling import SamplingParams
from pinnate.engine.build_cache import build_cache
from pinnate.scheduler.scheduler import Scheduler

MODES = ("off", "events", "reports", "both")
STEPS, PAGES, PREFIX = 600, 600, 192


def run(mode: str, steps: int = STEPS) -> tuple[float, int]:
    """CPU seconds of this thread for each step, and pages evicted."""
    with tempfile.TemporaryDirectory() as folder, zmq.Context() as context:
        endpoint = f"ipc://{folder}/events"
        publishes = mode in ("events", "both")
        config = EngineConfig(
            model="",
            kv_events=KVEventsConfig(endpoint=endpoint) if publishes else None,
            cache_report="own" if mode in ("reports", "both") else "off",
        )
        parts = build_cache(config, PAGES, 0)
        reader = context.socket(zmq.SUB)
        reader.setsockopt(zmq.LINGER, 0)
        reader.setsockopt(zmq.SUBSCRIBE, b"")
        if publishes:
            reader.connect(endpoint)
        scheduler = Scheduler(
            parts.cache, max_num_seqs=32, max_num_batched_tokens=512, max_model_len=4096, explainer=parts.explainer
        )
        seconds = work(scheduler, parts.events.publish if parts.events is not None else None, steps)
        evicted = parts.cache.evicted_pages
        if parts.events is not None:
            parts.events.close()
        reader.close()
    return seconds / steps, evicted


def work(scheduler: Scheduler, publish: object, steps: int) -> float:
    rng = random.Random(0)
    prefixes = [[rng.randrange(50_000) for _ in range(PREFIX)] for _ in range(4)]
    params = SamplingParams(max_tokens=96, seed=0, ignore_eos=True)
    waiting = [
        Request(request_id=str(i), prompt_token_ids=rng.choice(prefixes) + [rng.randrange(50_000) for _ in range(64)],
                sampling=params)
        for i in range(steps)
    ]  # fmt: skip
    running = 0
    seconds = 0.0
    for _ in range(steps):
        begin = time.thread_time()
        while running < 34 and waiting:
            scheduler.add(waiting.pop())
            running += 1
        output = scheduler.schedule()
        assert output is not None
        result = _execute(output, rng)
        ended = scheduler.update(output, result)
        if publish is not None:
            publish()  # type: ignore[operator]
        seconds += time.thread_time() - begin
        running -= sum(1 for token in ended if token.finish_reason is not None)
    return seconds


def _execute(output: SchedulerOutput, rng: random.Random) -> StepResult:
    count = sum(len(part.samples) for part in output.sequences)
    return StepResult([rng.randrange(50_000) for _ in range(count)], [None] * count, {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", default=",".join(MODES))
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--once", choices=MODES)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.once:
        run(args.once, args.steps)
        return
    modes = args.mode.split(",")
    samples: dict[str, list[float]] = {mode: [] for mode in modes}
    evicted = 0
    for _ in range(args.repeat):
        for mode in modes:
            seconds, evicted = run(mode, args.steps)
            samples[mode].append(seconds)
    medians = {mode: statistics.median(values) for mode, values in samples.items()}
    base = medians[modes[0]]
    print(f"{args.steps} steps, {evicted} pages evicted")
    for mode, value in medians.items():
        print(f"{mode:>10}{value * 1e6:>10.1f} us a step{(value - base) * 1e6:>+10.1f} us{value / base:>8.3f}x")
    if args.out:
        args.out.write_text(json.dumps({"steps": args.steps, "evicted": evicted, "seconds": medians}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""How the KV memory is given out, and what that is worth: one row for each allocation scheme, on the same traces.

    python benchmarks/allocation.py [--scheme max,pow2,...] [--repeats 3] [--lock FILE] [--out FILE]

The default model in this process, a pool of 12,288 tokens, 64 users at a time. `single`: each sends one request, as in
the PagedAttention paper. `chats`: conversations of several turns; a turn sends the whole history (chat_trace.py). The
scheduler and the executor are the engine's own; the contiguous schemes put their allocator (contiguous.py) in the place
of its paged one. What is counted are the steps in which a request waits, so that memory decides the batch.

Outputs are forced to their lengths, so what a step schedules does not depend on the values of tokens. Memory is thus
counted over the whole trace with the executor skipped (checked: the passes that are timed find the same counts), and
speed in short windows, spread evenly over the trace, in which every step is run: the mean time of a step with prompt
tokens and of one without, times the numbers of such steps in the trace. A timed pass gives one figure; passes of the
schemes take turns; medians. With `--lock` a round of timed passes holds that file exclusively.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from allocation_pass import (
    BATCHED_TOKENS,
    MAX_MODEL_LEN,
    MAX_NUM_SEQS,
    NUM_PAGES,
    PAGE_SIZE,
    SCHEMES,
    USERS,
    Pass,
    Scheme,
    run_trace,
)
from chat_trace import Lengths, draw_lengths, draw_trace
from sharing import measure_sharing

from pinnate.core.config import EngineConfig
from pinnate.engine.inproc import InprocClient
from pinnate.executor.base import Executor
from pinnate.weights.resolve import resolve_model

WINDOWS = 8  # of each timed pass
Trace = list[list[Lengths]]


def evenly(steps: int, repeat: int, repeats: int) -> Callable[[int], bool]:
    """WINDOWS steps of `steps`, evenly spaced; each repeat has others."""
    starts = {int((i + (repeat + 0.5) / repeats) * steps / WINDOWS) for i in range(WINDOWS)}
    return lambda step: step in starts


def summarise(scheme: Scheme, dry: Pass, timed: list[Pass]) -> dict[str, Any]:
    for other in timed:
        if (other.memory, other.counters) != (dry.memory, dry.counters):
            raise RuntimeError(f"{scheme.title}: what was scheduled depends on the values of tokens")
    speeds = [p.outputs / p.estimated_seconds for p in timed]
    totals = [(p.outputs + p.prompts) / p.estimated_seconds for p in timed]
    return {
        "title": scheme.title,
        **dry.memory,
        **dry.counters,
        "requests": dry.requests,
        "output_tokens_per_s": statistics.median(speeds) if speeds else None,
        "output_tokens_per_s_of_each_pass": speeds,
        "computed_tokens_per_s": statistics.median(totals) if totals else None,
        "timed_seconds": sum(sum(kind) for p in timed for kind in p.seconds.values()),
    }


@contextlib.contextmanager
def holding(lock: Path | None, mode: int) -> Iterator[None]:
    if lock is None:
        yield
        return
    with lock.open("a") as file:
        fcntl.flock(file, mode)
        yield


def measure(
    names: list[str], executor: Executor, traces: dict[str, Trace], repeats: int, lock: Path | None
) -> Iterator[dict[str, dict[str, Any]]]:
    """For each trace its schemes' rows: once memory is counted, and again after each round of timed passes. Where every
    request is a conversation of its own there is nothing to share."""
    todo = [(t, name) for t in traces for name in names if t == "chats" or not SCHEMES[name].sharing]
    with holding(lock, fcntl.LOCK_SH):
        dry = {(t, name): run_trace(SCHEMES[name], executor, traces[t]) for t, name in todo}
    timed: dict[tuple[str, str], list[Pass]] = {row: [] for row in todo}
    yield rows_of(traces, dry, timed)
    for repeat in range(repeats):
        with holding(lock, fcntl.LOCK_EX):
            for t, name in todo:
                windows = evenly(int(dry[t, name].memory["steps"]), repeat, repeats)
                timed[t, name].append(run_trace(SCHEMES[name], executor, traces[t], windows=windows))
        yield rows_of(traces, dry, timed)


def rows_of(
    traces: Iterable[str], dry: dict[tuple[str, str], Pass], timed: dict[tuple[str, str], list[Pass]]
) -> dict[str, dict[str, Any]]:
    return {
        t: {name: summarise(SCHEMES[name], dry[t, name], timed[t, name]) for trace, name in dry if trace == t}
        for t in traces
    }


def describe_trace(trace: Trace) -> dict[str, float]:
    turns = [turn for conversation in trace for turn in conversation]
    prompts = [
        sum(map(sum, conversation[:i])) + conversation[i][0] for conversation in trace for i in range(len(conversation))
    ]
    return {
        "conversations": len(trace),
        "requests": len(turns),
        "mean_input": statistics.fmean(asked for asked, _ in turns),
        "median_input": statistics.median(asked for asked, _ in turns),
        "mean_prompt": statistics.fmean(prompts),
        "mean_output": statistics.fmean(wanted for _, wanted in turns),
        "median_output": statistics.median(wanted for _, wanted in turns),
    }


def show(rows: dict[str, Any]) -> None:
    columns = ("stored_of_pool", "stored_of_reserved", "reserved_for_later", "reserved_for_nothing", "cached", "free")
    print(f"{'':<44}{'of pool':>9}{'of rsvd':>9}{'later':>9}{'never':>9}{'cached':>9}{'free':>9}"
          f"{'batch':>7}{'max':>5}{'tok/s':>8}{'preempt':>9}")  # fmt: skip
    for row in rows.values():
        shares = "".join(f"{row[column]:>9.1%}" for column in columns)
        speed = f"{row['output_tokens_per_s']:>8.0f}" if row["output_tokens_per_s"] else f"{'-':>8}"
        print(f"{row['title']:<44}{shares}{row['mean_batch']:>7.1f}{row['max_batch']:>5}{speed}{row['preemptions']:>9}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scheme", default=",".join(SCHEMES))
    parser.add_argument("--requests", type=int, default=200, help="of each trace, about")
    parser.add_argument("--repeats", type=int, default=3, help="passes that are timed; 0: memory only")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lock", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    begin = time.perf_counter()
    config = EngineConfig(
        model=str(resolve_model(None)),
        num_pages=NUM_PAGES,
        page_size=PAGE_SIZE,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=BATCHED_TOKENS,
        max_model_len=MAX_MODEL_LEN,
    )
    client = InprocClient(config)
    executor = client.core.executor
    traces = {
        "single": draw_trace(args.seed, args.requests, goes_on=0.0),
        "chats": draw_trace(args.seed, args.requests * 2 // 5),
    }
    with holding(args.lock, fcntl.LOCK_SH):
        sharing = measure_sharing(executor, NUM_PAGES, PAGE_SIZE, MAX_MODEL_LEN, draw_lengths)
    setup = {
        "model": Path(config.model).name,
        "pool_tokens": NUM_PAGES * PAGE_SIZE,
        "users": USERS,
        "max_model_len": MAX_MODEL_LEN,
        "device": client.info["device"],
    }
    result = {"setup": setup, "sharing": sharing}
    for rows in measure(args.scheme.split(","), executor, traces, args.repeats, args.lock):
        result |= {t: {"trace": describe_trace(trace), "schemes": rows[t]} for t, trace in traces.items()}
        result["wall_seconds_with_waits_for_the_lock"] = time.perf_counter() - begin
        if args.out:
            args.out.write_text(json.dumps(result, indent=1) + "\n")
    client.close()
    for t, trace in traces.items():
        print(t, describe_trace(trace))
        show(rows[t])
    print(json.dumps(sharing, indent=1))


if __name__ == "__main__":
    main()

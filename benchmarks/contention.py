"""What one busy process on the machine costs: throughput quiet and beside a spinning process, in turn, in one run.

    python benchmarks/contention.py [--streams 32] [--rounds 3] [--out FILE]

On two cores a fair share beside one spinning process is three quarters of the machine for two threads that split the
rest, and half of it for a team whose every step waits for its slower thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

from pinnate.core.sampling import SamplingParams
from pinnate.engine.llm import LLM

PROMPT, OUTPUT = 32, 64


def throughput(llm: LLM, streams: int, salt: int) -> float:
    """Output tokens a second."""
    prompts = [[100 + (salt * 104729 + i * 7919 + j * 31) % 40000 for j in range(PROMPT)] for i in range(streams)]
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, min_tokens=OUTPUT, ignore_eos=True)
    begin = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return streams * OUTPUT / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    quiet, busy = [], []
    with LLM() as llm:
        throughput(llm, args.streams, 0)
        for round_ in range(args.rounds):
            quiet.append(throughput(llm, args.streams, 2 * round_ + 1))
            spinner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            try:
                busy.append(throughput(llm, args.streams, 2 * round_ + 2))
            finally:
                spinner.kill()
                spinner.wait()
    share = statistics.median(b / q for b, q in zip(busy, quiet, strict=True))
    print(f"quiet {statistics.median(quiet):.0f} tok/s, beside a spinning process {statistics.median(busy):.0f} tok/s")
    print(f"share kept: {share:.0%}")
    if args.out:
        args.out.write_text(json.dumps({"quiet": quiet, "busy": busy, "share": share}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""What the disk tier gives and costs: loading a prompt's pages against computing it, and writing them beside the steps.

    python benchmarks/kv_tiers.py [--model PATH] [--lengths 128,512,1024,2000] [--repeat 5] [--out FILE]

For each length, in turn and with medians over repeats: the time to the first token of a fresh prompt without a tier and
with one (write-through beside it), and of the same prompt in a new engine that finds it on disk, once with the files in
the system's page cache and once without. Engines run in this process; their start is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

from pinnate.core.config import EngineConfig
from pinnate.core.messages import StepOutputs
from pinnate.core.request import Request
from pinnate.core.sampling import SamplingParams
from pinnate.engine.inproc import InprocClient
from pinnate.weights.resolve import resolve_model

ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, seed=0)


class Engine:
    def __init__(self, model: str, folder: Path | None, length: int) -> None:
        disk = {} if folder is None else {"kv_disk": str(folder)}
        pages = length // 16 + 40
        self.client = InprocClient(EngineConfig(model=model, num_pages=pages, max_model_len=length + 64, **disk))
        self.first_token(random_prompt(64))  # threads, caches

    def first_token(self, prompt: list[int]) -> tuple[float, int]:
        """Seconds, and how many tokens were cached."""
        began = time.perf_counter()
        self.client.send(Request(request_id="r", prompt_token_ids=prompt, sampling=ONE_TOKEN))
        outputs = []
        while not outputs:
            for message in self.client.step():
                assert isinstance(message, StepOutputs)
                outputs += message.outputs
        return time.perf_counter() - began, outputs[0].num_cached_tokens

    def close(self) -> None:
        self.client.close()


def random_prompt(length: int) -> list[int]:
    return [random.randrange(1000, 30_000) for _ in range(length)]


def forget_files(folder: Path) -> int:
    """Writes the files to the disk and drops them from the page cache; returns the bytes of one."""
    size = 0
    for path in folder.glob("*/*.kv"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            size = path.stat().st_size
    return size


def measure(model: str, length: int, repeat: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in ("compute", "compute and store", "cached file", "disk")}
    megabytes = 0.0
    for _ in range(repeat):
        prompt = random_prompt(length)
        with tempfile.TemporaryDirectory(dir=".") as place:
            folder = Path(place) / "kv"
            for name, where in (("compute", None), ("compute and store", folder), ("cached file", folder)):
                engine = Engine(model, where, length)
                seconds, cached = engine.first_token(prompt)
                assert (cached > 0) == (name == "cached file")
                times[name].append(seconds)
                engine.close()
            megabytes = length // 16 * forget_files(folder) / 1e6
            engine = Engine(model, folder, length)
            seconds, cached = engine.first_token(prompt)
            assert cached >= length - 16
            times["disk"].append(seconds)
            engine.close()
    medians = {name: statistics.median(values) for name, values in times.items()}
    print(
        f"{length:6d} tokens {megabytes:7.1f} MB | computed {medians['compute'] * 1e3:7.1f} ms"
        f" = {length / medians['compute']:6.0f} tokens/s | file in page cache {medians['cached file'] * 1e3:6.1f} ms"
        f" = {megabytes / medians['cached file']:5.0f} MB/s, x{medians['compute'] / medians['cached file']:.1f}"
        f" | from the disk {medians['disk'] * 1e3:6.1f} ms = {megabytes / medians['disk']:5.0f} MB/s,"
        f" x{medians['compute'] / medians['disk']:.1f}"
        f" | computed and stored x{medians['compute and store'] / medians['compute']:.3f}",
        flush=True,
    )
    return {"tokens": length, "megabytes": megabytes} | medians


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--lengths", default="128,512,1024,2000")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    model = str(resolve_model(args.model))
    rows = [measure(model, int(length), args.repeat) for length in args.lengths.split(",")]
    if args.out is not None:
        args.out.write_text(json.dumps({"model": Path(model).name, "cpus": os.cpu_count(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()

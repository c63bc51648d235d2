"""`pinnate bench`: the machine's limits, and how near to them the engine comes."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from pinnate.core.autoconfig import choose_threads
from pinnate.core.config import read_environment
from pinnate.core.machine import read_machine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", help="model to measure (default: the default model)")
    parser.add_argument("--dtype", default="auto", choices=("auto", "bfloat16", "float32"))
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repeats", type=int, default=3, help="counted runs of each workload; the median is shown")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write everything measured to FILE")
    parser.add_argument("--limits-only", action="store_true", help="measure the machine, load no model")


def run(args: argparse.Namespace) -> int:
    report = measure_limits(args.threads)
    limits = report["limits"]
    print(
        f"machine: {report['threads']} threads, {report['isa']}: bf16 {limits['bf16_gflops']:.0f} GFLOP/s, "
        f"fp32 {limits['f32_gflops']:.0f} GFLOP/s, int8 {limits['int8_gops']:.0f} GOP/s, "
        f"memory {limits['read_gbs']:.1f} GB/s"
    )
    if not args.limits_only:
        report |= measure_engine(args, limits)
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def measure_limits(threads: int | None, seconds: float = 0.5) -> dict[str, Any]:
    from pinnate import _native

    isa = read_environment().isa
    used = choose_threads(threads, read_machine()).value
    limits = _native.measure_peaks(used, isa, seconds)
    return {"threads": used, "isa": isa, "cpu": _native.cpu_features()["model"], "limits": limits}


def measure_engine(args: argparse.Namespace, limits: dict[str, float]) -> dict[str, Any]:
    from pinnate.bench.offline import WORKLOADS, measure
    from pinnate.bench.roofline import Peaks, work_of
    from pinnate.engine.llm import LLM
    from pinnate.models.load import load_model
    from pinnate.weights.resolve import resolve_model

    path = resolve_model(args.model)
    with LLM(str(path), dtype=args.dtype, threads=args.threads) as llm:
        dtype = str(llm.info["dtype"])
        wide = dtype == "float32"
        work = work_of(load_model(path).graph, element_bytes=4 if wide else 2)
        peaks = Peaks(limits["f32_gflops" if wide else "bf16_gflops"] * 1e9, limits["read_gbs"] * 1e9)
        print(f"model: {path.name}, {dtype}")
        print(f"{'workload':<24}{'seconds':>9}{'tokens/s':>10}{'limit s':>9}{'x limit':>9}")
        rows = []
        for workload in WORKLOADS:
            m = measure(llm, int(llm.info["vocab_size"]), workload, work, peaks, args.repeats)
            print(
                f"{workload.name:<24}{m.seconds:>9.3f}{m.tokens_per_second:>10.1f}{m.limit_seconds:>9.3f}{m.ratio:>9.2f}"
            )
            rows.append(
                {
                    "workload": workload.name,
                    "seconds": m.seconds,
                    "tokens_per_second": m.tokens_per_second,
                    "limit_seconds": m.limit_seconds,
                    "ratio": m.ratio,
                }
            )
        return {"model": path.name, "dtype": dtype, "workloads": rows}

"""Serving benchmark: our server under a load client, against the machine's own limit measured in the same run.

    python benchmarks/serving.py --load PATH/load.py --limits PATH/limits.py [--workloads batch,single,fewshot]
        [--repeats 3] [--out benchmarks/results/NAME.json] [-- FLAGS OF pinnate serve]

The load client drives any OpenAI-compatible server over streaming HTTP with seeded workloads of exact token lengths;
the limits script turns measured peaks into the roofline time of each workload. For each repetition the peaks are
measured anew (the machine's speed drifts), then every workload runs with fresh text. Prints medians; x = wall / limit.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import defaultdict
from pathlib import Path
from typing import Any

SETTLE_SECONDS = 3.0  # the engine commits memory in idle time: peaks measured beside that would flatter it


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def start_server(port: int, flags: list[str]) -> tuple[subprocess.Popen[bytes], float]:
    """-> the process and the seconds from its start to the first 200 of /health."""
    begin = time.perf_counter()
    command = [str(Path(sys.executable).with_name("pinnate")), "serve", "--port", str(port), *flags]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while time.perf_counter() - begin < 120:
        if process.poll() is not None:
            raise SystemExit(f"the server ended with code {process.returncode}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1) as reply:
                if reply.status == 200:
                    return process, time.perf_counter() - begin
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.02)
    raise SystemExit("the server did not become ready in 120 s")


def stop_server(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()


def measure_peaks(threads: int | None) -> dict[str, float]:
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [str(Path(sys.executable).with_name("pinnate")), "bench", "--limits-only", "--json", file.name]
        if threads:
            command += ["--threads", str(threads)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        limits: dict[str, float] = json.loads(Path(file.name).read_text())["limits"]
        return limits


def roofline(script: Path, peaks: dict[str, float]) -> dict[str, dict[str, float]]:
    """precision -> workload -> seconds."""
    command = [
        sys.executable, str(script), "--bf16-gflops", str(peaks["bf16_gflops"]),
        "--int8-gops", str(peaks["int8_gops"] or 1), "--gbs", str(peaks["read_gbs"]),
    ]  # fmt: skip
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    table: dict[str, dict[str, float]] = json.loads(out)
    return table


def run_load(script: Path, port: int, pid: int, workloads: str, salt: str, model: str) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.jsonl"
        command = [
            sys.executable, str(script), "--base-url", f"http://127.0.0.1:{port}", "--model", model,
            "--workload", workloads, "--salt", salt, "--server-pid", str(pid),
            "--flavour", "ours", "--out", str(out), "--label", "pinnate",
        ]  # fmt: skip
        subprocess.run(command, check=True)
        return [json.loads(line) for line in out.read_text().splitlines()]


def figures(result: dict[str, Any], limits: dict[str, float]) -> dict[str, dict[str, float]]:
    """One load result -> name -> {value, limit, x}; `single` is split in time per token and time to first token."""
    name = str(result["workload"])
    if name == "single":
        decode, prompt = result["parts"]["decode"], result["parts"]["long_prompt"]
        pairs = {
            "single.tpot": (decode["tpot_ms_p50"] / 1e3, limits["single.tpot"]),
            "single.ttft2000": (prompt["ttft_ms_p50"] / 1e3, limits["single.ttft2000"]),
        }
    else:
        pairs = {name: (result["wall_s"], limits[name])}
    return {k: {"value": v, "limit": bound, "x": v / bound} for k, (v, bound) in pairs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", type=Path, required=True)
    parser.add_argument("--limits", type=Path, required=True)
    parser.add_argument("--workloads", default="batch,single,fewshot,mixed,multiturn,parallel")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--precision", default="bf16", choices=("bf16", "int8", "int4"), help="which limit applies")
    parser.add_argument(
        "--model", default="SmolLM2-135M-Instruct", help="name to send; the server's default model answers"
    )
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path)
    parser.add_argument("flags", nargs="*", help="flags of pinnate serve, after --")
    args = parser.parse_args()

    port = free_port()
    flags = args.flags + (["--threads", str(args.threads)] if args.threads else [])
    rows: dict[str, list[dict[str, float]]] = defaultdict(list)
    raw: list[dict[str, Any]] = []
    process, ready = start_server(port, ["--served-model-name", args.model, *flags])
    try:
        for repeat in range(args.repeats):
            time.sleep(SETTLE_SECONDS)
            peaks = measure_peaks(args.threads)
            limits = roofline(args.limits, peaks)[args.precision]
            print(f"repetition {repeat + 1}: {json.dumps({k: round(v, 1) for k, v in peaks.items()})}", flush=True)
            for result in run_load(args.load, port, process.pid, args.workloads, f"{os.getpid()}-{repeat}", args.model):
                result.pop("per_request", None)
                raw.append({"peaks": peaks, **result})
                for name, row in figures(result, limits).items():
                    rows[name].append(row)
    finally:
        stop_server(process)

    print(f"\nready after {ready:.2f} s; medians of {args.repeats}\n{'figure':<18}{'seconds':>10}{'limit':>10}{'x':>7}")
    medians = {n: {k: statistics.median(r[k] for r in rs) for k in ("value", "limit", "x")} for n, rs in rows.items()}
    for name, m in medians.items():
        print(f"{name:<18}{m['value']:>10.4f}{m['limit']:>10.4f}{m['x']:>7.2f}")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        document = {"flags": flags, "ready_s": ready, "medians": medians, "runs": raw}
        args.out.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()

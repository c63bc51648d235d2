"""`pinnate doctor`: what pinnate finds on this machine, what it would choose, and why.

Knows: how to lay facts out. Must not know: how a choice is made (core/autoconfig.py).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Any

from pinnate import __version__
from pinnate.cli.arguments import add_engine_arguments, add_model_arguments, engine_config
from pinnate.core.autoconfig import choose_threads
from pinnate.core.config import EngineConfig, read_environment
from pinnate.core.errors import ConfigError, ModelError
from pinnate.core.machine import Machine, read_machine

_PACKAGES = ("numpy", "tokenizers", "jinja2", "msgspec", "pyzmq", "starlette", "uvicorn", "huggingface-hub")
Section = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="the same as one JSON object")
    add_model_arguments(parser)
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """0 when a model could be served, 1 when `problems` says why not."""
    problems: list[str] = []
    machine = read_machine()
    report: dict[str, Any] = {
        "versions": _versions(),
        "cpu": _cpu(problems),
        "machine": _machine(args, machine),
        "model": {},
        "plan": {},
    }
    try:
        config = engine_config(args)
        report["model"], report["plan"] = _model(config, machine, problems)
    except (ModelError, ConfigError) as error:
        problems.append(str(error))
    report["problems"] = problems
    print(json.dumps(report, indent=1) if args.json else _as_text(report))
    return 1 if problems else 0


def _versions() -> Section:
    versions = {"pinnate": __version__, "python": platform.python_version(), "system": platform.platform()}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def _cpu(problems: list[str]) -> Section:
    """CPU features and the kernels chosen."""
    try:
        from pinnate._native import cpu_features
    except ImportError as error:
        problems.append(f"the native module cannot be loaded: {error}; build it with `make install`")
        return {}
    features = cpu_features()
    wanted = read_environment().isa
    isas: list[str] = list(features["isas"])
    if wanted == "auto":
        chosen, why = isas[0], "the best that this CPU can run"
    else:
        chosen, why = wanted, "set by PINNATE_ISA"
        if wanted not in isas:
            problems.append(f"PINNATE_ISA is {wanted}, but this CPU can run {', '.join(isas)}")
    return {
        "model": features["model"],
        "features": list(features["flags"]),
        "instruction sets": isas,
        "kernels": {"value": chosen, "reason": why},
    }


def _machine(args: argparse.Namespace, machine: Machine) -> Section:
    threads = choose_threads(getattr(args, "threads", None), machine)
    limit = machine.memory_limit
    return {
        "cpus allowed": machine.cpus,
        "cores allowed": machine.cores,
        "cpu quota": machine.cpu_quota,
        "memory available": machine.memory_available,
        "memory limit": limit,
        "threads": {"value": threads.value, "reason": threads.reason},
    }


def _model(config: EngineConfig, machine: Machine, problems: list[str]) -> tuple[Section, Section]:
    """Facts of the model, and the choices for it with their reasons."""
    from pinnate.models.load import load_model

    model = load_model(config.model)
    path = Path(config.model)
    facts = {
        "path": str(path),
        "family": model.config.family,
        "layers": len(model.graph.kv_layers),
        "vocabulary": model.graph.vocab_size,
        "context": model.config.max_position_embeddings,
        "warnings": list(model.warnings),
    }
    try:
        from pinnate.engine.build import plan_engine
    except ImportError as error:
        problems.append(f"the engine cannot be loaded: {error}")
        return facts, {}
    plan = plan_engine(config, model, machine)
    return facts, {
        "dtype": {"value": plan.dtype.value, "reason": plan.dtype.reason},
        "quantization": {"value": plan.quantization.value, "reason": plan.quantization.reason},
        "weights": [group._asdict() for group in plan.weights],
        "max_model_len": {"value": plan.max_model_len.value, "reason": plan.max_model_len.reason},
        "KV type": {"value": plan.kv_cache_dtype.value, "reason": plan.kv_cache_dtype.reason},
        "KV layers": plan.groups.reason,
        "page size": config.page_size,
        "page bytes": plan.page_bytes,
        "pages": {"value": plan.num_pages.value, "reason": plan.num_pages.reason},
        "KV bytes": plan.num_pages.value * plan.page_bytes,
        "memory": plan.memory.lines()[0],
        "KV tokens": plan.memory.lines()[1],
    }


def _as_text(report: dict[str, Any]) -> str:
    width = 2 + max(len(key) for section in report.values() if isinstance(section, dict) for key in section)
    lines: list[str] = []
    for title, section in report.items():
        if isinstance(section, dict) and section:
            lines += [title, *(f"  {key:<{width}}{_shown(key, value)}" for key, value in section.items())]
    problems = report["problems"]
    return "\n".join([*lines, "problems", *(f"  {problem}" for problem in problems or ["none"])])


def _shown(key: str, value: Any) -> str:
    if isinstance(value, dict):
        return str(
            value["reason"] if str(value["value"]) in value["reason"] else f"{value['value']}: {value['reason']}"
        )
    if value is None or value == []:
        return "none"
    if key == "weights":
        groups = [f"{g['pieces']} in {g['format']} ({_mib(g['bytes'])}; {g['reason']})" for g in value]
        return "; ".join(groups)
    if isinstance(value, list):
        return " ".join(str(item) for item in value)
    if key in ("memory available", "memory limit", "KV bytes", "page bytes"):
        return _mib(value)
    return str(value)


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"

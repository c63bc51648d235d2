"""Flags that several sub-commands share, and the way from flags to settings.

Knows: spellings, units, which setting a flag sets. Must not know: defaults of settings (core/config.py has them); a
flag that is not given is not passed on.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from pinnate.core.config import (
    CACHE_REPORTS,
    EVICTION_POLICIES,
    EXECUTORS,
    KV_CACHE_DTYPES,
    POLICIES,
    QUANTIZATIONS,
    EngineConfig,
    read_environment,
)
from pinnate.core.errors import ConfigError
from pinnate.core.kv_events import KVEventsConfig
from pinnate.core.sampling import SamplingParams
from pinnate.weights.resolve import resolve_model

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMGT]?)(?:i?B)?", re.IGNORECASE)
_DTYPE_ALIASES = {"bf16": "bfloat16", "fp32": "float32", "float": "float32"}
ALSO = "Spellings of vLLM, SGLang and llama.cpp for the same settings are accepted too."


def byte_size(text: str) -> int:
    """Bytes from `1048576`, `512M`, `1.5GiB`; the units are powers of 1024."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 512M or 2G")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def kv_events_config(text: str) -> KVEventsConfig:
    """The JSON object that vLLM's and SGLang's flag of this name takes."""
    try:
        return msgspec.json.decode(text, type=KVEventsConfig)
    except (msgspec.MsgspecError, ConfigError) as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("--kv-events-config: ")) from None


def add_flag(group: argparse._ActionsContainer, *names: str, aliases: Iterable[str] = (), **options: Any) -> None:
    """A flag and other spellings of it, which the help leaves out. Not given: absent from the namespace."""
    action = group.add_argument(*names, default=argparse.SUPPRESS, **options)
    hidden = {**options, "help": argparse.SUPPRESS, "dest": action.dest}
    for alias in aliases:
        group.add_argument(alias, default=argparse.SUPPRESS, **hidden)


def add_model_arguments(parser: argparse.ArgumentParser, *, positional: bool = True) -> None:
    text = "GGUF file, Hugging Face folder, org/name or org/name/FILE.gguf (default: the bundled model)"
    group = parser.add_argument_group("model")
    if positional:
        group.add_argument("positional_model", metavar="MODEL", nargs="?", help=text)
    add_flag(group, "--model", "-m", aliases=["--model-path"], metavar="MODEL", help="the same" if positional else text)
    add_flag(
        group, "--max-model-len", aliases=["--context-length", "--ctx-size"], type=int, metavar="N",
        help="longest prompt and output together, in tokens (default: the model's context)",
    )  # fmt: skip


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of EngineConfig except those of the model."""
    parser.epilog = ALSO
    group = parser.add_argument_group("compute")
    add_flag(group, "--dtype", metavar="TYPE", help="auto, bfloat16 or float32")
    add_flag(
        group, "--quantization", "-q", choices=QUANTIZATIONS, metavar="TYPE",
        help="of the weights: none (held in the dtype), int8, or int4 (8 bits where the file holds more than 4)",
    )  # fmt: skip
    add_flag(group, "--threads", "-t", type=int, metavar="N", help="default: the physical cores this process may use")
    add_flag(
        group, "--executor", choices=EXECUTORS,
        help="native; reference (NumPy, slow, for checks); simulated (no model: noise at once, for load tests)",
    )  # fmt: skip
    group.add_argument("--simulated-step-ms", type=float, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    add_flag(
        group,
        "--seed",
        aliases=["--random-seed"],
        type=int,
        metavar="N",
        help="draws the seeds of requests that give none",
    )
    _add_memory_arguments(parser)
    group = parser.add_argument_group("scheduling")
    add_flag(
        group, "--max-num-seqs", aliases=["--max-running-requests", "--parallel"], type=int, metavar="N",
        help="sequences decoded at the same time",
    )  # fmt: skip
    add_flag(
        group, "--max-num-batched-tokens", aliases=["--chunked-prefill-size"], type=int, metavar="N",
        help="tokens computed in one step",
    )  # fmt: skip
    add_flag(
        group, "--schedule-policy", aliases=["--scheduling-policy"], choices=POLICIES,
        help="fcfs: in order of arrival; lpm: longest cached prefix first",
    )  # fmt: skip
    add_flag(
        group, "--max-num-queued-reqs", aliases=["--max-queued-requests"], type=int, metavar="N",
        help="waiting requests before new ones are refused",
    )  # fmt: skip
    for spelling in ("--max-num-queued-tokens", "--max-queued-tokens"):  # docs/faults.md
        group.add_argument(
            spelling, type=int, dest="max_num_queued_tokens", default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )


def _add_memory_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("memory")
    add_flag(
        group, "--kv-cache-memory", aliases=["--kv-cache-memory-bytes"], type=byte_size, metavar="SIZE",
        help="of the KV pool: 512M, 2G, ... (default: from the free memory)",
    )  # fmt: skip
    add_flag(
        group, "--kv-cache-dtype", choices=KV_CACHE_DTYPES, help="auto: as --dtype; int8: half the size of bfloat16"
    )
    add_flag(
        group, "--num-pages", aliases=["--num-gpu-blocks-override"], type=int, metavar="N",
        help="of the KV pool, instead of its size",
    )  # fmt: skip
    add_flag(group, "--page-size", aliases=["--block-size"], type=int, metavar="N", help="tokens in a page")
    add_flag(
        group, "--no-prefix-caching", aliases=["--no-enable-prefix-caching", "--disable-radix-cache"],
        action="store_const", const=False, dest="enable_prefix_caching", help="compute every prompt anew",
    )  # fmt: skip
    group.add_argument(
        "--enable-prefix-caching", action="store_const", const=True, default=argparse.SUPPRESS, help=argparse.SUPPRESS
    )
    add_flag(
        group, "--eviction-policy", aliases=["--radix-eviction-policy"], choices=EVICTION_POLICIES,
        help="which cached prefix goes first: lru; lfu: fewest hits; slru: never hit, then lru; "
        "priority: of the least urgent requests, then lru",
    )  # fmt: skip
    add_flag(
        group, "--pin-quota", type=float, metavar="SHARE",
        help="of the KV pool that POST /pin_prefix may keep cached, 0 to 0.9 (default: 0, no pinning)",
    )  # fmt: skip
    add_flag(
        group, "--kv-disk", metavar="DIR",
        help="keep cached pages on disk too, across restarts; at most --kv-disk-size SIZE (8G)",
    )  # fmt: skip
    group.add_argument("--kv-disk-size", type=byte_size, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    add_flag(
        group, "--cache-report", choices=CACHE_REPORTS,
        help="own: requests may ask why their cached prefix ended where it did; "
        "all: also whether another salt has more, and GET /debug/cache (for trusted clients)",
    )  # fmt: skip
    add_flag(
        group, "--kv-events-config", type=kv_events_config, dest="kv_events", metavar="JSON",
        help=argparse.SUPPRESS,  # its JSON needs more than a line: docs/http-api.md
    )  # fmt: skip


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    add_flag(group, "--max-tokens", "-n", type=int, metavar="N", help="longest output, in tokens")
    add_flag(group, "--temperature", type=float, metavar="T", help="0 takes the most likely token each time")
    add_flag(group, "--top-p", type=float, metavar="P", help="sample from the likeliest tokens of this mass")
    add_flag(group, "--top-k", type=int, metavar="K", help="sample from this many likeliest tokens")
    add_flag(group, "--stop", action="append", metavar="TEXT", help="end the output here; may be repeated")


def model_of(args: argparse.Namespace) -> str | None:
    """The model as named, by position or flag; None is the default one.

    Raises:
        ConfigError: it is named twice.
    """
    named = (getattr(args, "positional_model", None), getattr(args, "model", None))
    given = {name for name in named if name is not None}
    if len(given) > 1:
        raise ConfigError(f"two models are named: {' and '.join(sorted(given))}")
    return given.pop() if given else None


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of EngineConfig that flags or the environment set; the model is not among them."""
    names = [name for name in EngineConfig.__struct_fields__ if name != "model" and hasattr(args, name)]
    settings = {name: getattr(args, name) for name in names}
    if "dtype" in settings:
        settings["dtype"] = _DTYPE_ALIASES.get(settings["dtype"], settings["dtype"])
    return settings | {"isa": read_environment().isa}


def engine_config(args: argparse.Namespace, **defaults: Any) -> EngineConfig:
    """The whole configuration, with the model found. `defaults` are this command's own, below the flags.

    Raises:
        ConfigError: a value is out of range.
        ModelError: the model is not found.
    """
    settings = {"log_level": read_environment().log_level} | defaults | engine_settings(args)
    EngineConfig(model="", **settings)  # a wrong flag is reported before a model is downloaded
    return EngineConfig(model=str(resolve_model(model_of(args))), **settings)


def sampling_params(args: argparse.Namespace, **defaults: Any) -> SamplingParams:
    """
    Raises:
        ConfigError, InvalidRequestError: a value is out of range.
    """
    names = [name for name in ("max_tokens", "temperature", "top_p", "top_k", "stop") if hasattr(args, name)]
    values = defaults | {name: getattr(args, name) for name in names}
    return SamplingParams(**{**values, "stop": tuple(values.get("stop", ()))})


def is_hub_name(model: str | None) -> bool:
    """Whether the model is known by its name on the hub rather than by a path."""
    return model is not None and not Path(model).expanduser().exists()

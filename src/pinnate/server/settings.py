"""ServerSettings: what an operator sets about the HTTP side.

Knows: names, defaults, ranges. Must not know: the engine's settings (`core/config.py`), or how a flag is parsed.
"""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Any

import msgspec

from pinnate.core.errors import ConfigError
from pinnate.core.logs import LOG_FORMATS, LOG_LEVELS
from pinnate.core.sampling import MAX_LOGPROBS
from pinnate.server.limits import ServerLimits

# What a GGUF's file name says after the model's own name: `Model.Q4_1.gguf`, `model-q4_k_m.gguf`, `m-BF16.gguf`.
_QUANTISATION = re.compile(r"[.\-](?:I?Q\d\w*|BF16|F16|F32)$", re.IGNORECASE)
DEFAULT_MAX_LOGPROBS = 20
MAX_KEY_LENGTH = 512
_KEY = re.compile(rf"[!-~]{{1,{MAX_KEY_LENGTH}}}")
_ENDPOINT = re.compile(r"https?://[^/\s?#]+(/[^\s]*)?")
METRICS_COMPAT = ("none", "vllm", "sglang", "both")
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#\s@*]+")


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the HTTP server. Sizes in bytes, times in seconds.

    `served_model_name`: names that requests may use, the first one is shown; empty means the name of the model's
    file or folder. `chat_template`: path of a file that replaces the model's own template. `tool_call_parser` and
    `reasoning_parser`: names in text/parsers/registry.py, "auto" for the chat template's. `shutdown_timeout`: how long
    requests in flight may go on after SIGTERM. `port` 0 takes a free one. `strict` refuses requests with unknown
    fields, which otherwise get a warning. `api_keys`: one of them is needed of clients; none: everybody may call.
    `admin_api_keys`: with them set, the operator's routes need one of these. `allowed_origins`: of web pages that may
    call (CORS), `*` is all. `access_log`: one line for each request. `metrics_compat`: whose names /metrics shows too.
    `otlp_traces_endpoint`: where spans are sent, by OTLP over HTTP.
    `max_logprobs`: alternatives that a request may ask for at each token.
    `data_dir`: folder of files and batches, which are off without it, and of stored responses, else kept in memory.

    Raises:
        ConfigError: a value is out of range; the message names the flag.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    admin_api_keys: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    chat_template: str | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    shutdown_timeout: float = 30.0
    max_logprobs: int = DEFAULT_MAX_LOGPROBS
    limits: ServerLimits = ServerLimits()
    strict: bool = False
    data_dir: str | None = None
    access_log: bool = False
    log_level: str = "info"
    log_format: str = "text"
    metrics_compat: str = "none"
    otlp_traces_endpoint: str | None = None

    def __post_init__(self) -> None:
        if (self.tool_call_parser, self.reasoning_parser) != ("auto", "auto"):
            _check_parsers(self.tool_call_parser, self.reasoning_parser)
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port must be from 0 to 65535, got {self.port}")
        if not self.shutdown_timeout >= 0:
            raise ConfigError(f"--shutdown-timeout must be at least 0, got {self.shutdown_timeout}")
        if not 0 <= self.max_logprobs <= MAX_LOGPROBS:
            raise ConfigError(f"--max-logprobs must be from 0 to {MAX_LOGPROBS}, got {self.max_logprobs}")
        for flag, keys in (("--api-key", self.api_keys), ("--admin-api-key", self.admin_api_keys)):
            if any(_KEY.fullmatch(key) is None for key in keys):
                raise ConfigError(f"{flag}: a key is 1 to {MAX_KEY_LENGTH} visible ASCII characters, no blanks")
        if set(self.api_keys) & set(self.admin_api_keys):
            raise ConfigError("--admin-api-key: a key is an API key too, it must be another one")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ConfigError("--ssl-certfile and --ssl-keyfile are needed together")
        if self.metrics_compat not in METRICS_COMPAT:
            raise ConfigError(
                f"--metrics-compat must be one of {', '.join(METRICS_COMPAT)}, got {self.metrics_compat!r}"
            )
        for flag, value, known in (
            ("--log-level", self.log_level, LOG_LEVELS),
            ("--log-format", self.log_format, LOG_FORMATS),
        ):
            if value not in known:
                raise ConfigError(f"{flag} must be one of {', '.join(known)}, got {value!r}")
        if self.otlp_traces_endpoint is not None and _ENDPOINT.fullmatch(self.otlp_traces_endpoint) is None:
            raise ConfigError(
                f"--otlp-traces-endpoint {self.otlp_traces_endpoint!r} is not a URL such as http://localhost:4318"
            )
        for origin in self.allowed_origins:
            if _ORIGIN.fullmatch(origin) is None:
                raise ConfigError(
                    f"--allowed-origins: {origin!r} is not an origin such as https://chat.example.com (no path), or *"
                )
        if self.data_dir is not None and not self.data_dir.strip():
            raise ConfigError("--data-dir: the folder's name is empty")
        if any(not name for name in self.served_model_name):
            raise ConfigError("--served-model-name must not be empty")

    def public(self) -> dict[str, Any]:
        """All of it but the keys, of which only the number is told."""
        hidden = {"api_keys": len(self.api_keys), "admin_api_keys": len(self.admin_api_keys)}
        return {**msgspec.to_builtins(self), **hidden}

    @property
    def max_body_bytes(self) -> int:
        return self.limits.max_body_bytes


def _check_parsers(tool_call_parser: str, reasoning_parser: str) -> None:
    # Imported where a flag is given: the parsers are no part of a start that gives none.
    from pinnate.text.parsers.registry import choose_reasoning_format, choose_tool_format

    choose_tool_format(None, tool_call_parser)
    choose_reasoning_format(None, reasoning_parser)


def model_names(model: str, served_model_name: tuple[str, ...]) -> tuple[str, ...]:
    """The names under which `model` (path or org/name) is served, the one to show first.

    Without names of the operator's: `dir/Model.Q4_1.gguf` is served as `Model`, a folder under its own name.
    """
    if served_model_name:
        return served_model_name
    name = PurePath(model).name
    if name.lower().endswith(".gguf"):
        name = _QUANTISATION.sub("", name[: -len(".gguf")])
    return (name or model,)

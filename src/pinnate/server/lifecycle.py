"""The server's life: engine process first, then HTTP; ready; signals; drain; end.

Knows: the order of a start and of an end, uvicorn. Must not know: routes, requests.

The port is bound before anything is loaded, and answers at once: /health is 503 until the model can serve. On SIGTERM
or SIGINT new requests get 503, requests under way go on for up to `shutdown_timeout` seconds and are then ended
with an error; a second signal ends them at once. Exit code 0 in all of these.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop

from pinnate.core.config import EngineConfig
from pinnate.core.errors import ConfigError
from pinnate.core.logs import setup_logging
from pinnate.engine.child import EngineChild
from pinnate.engine.launch import Launched
from pinnate.server.grammar_metrics import grammar_source
from pinnate.server.listener import open_listener, raise_descriptor_limit
from pinnate.server.settings import ServerSettings
from pinnate.server.tls import check_certificate
from pinnate.server.tracing import check_tracing

if TYPE_CHECKING:
    import uvicorn

    from pinnate.engine.async_engine import AsyncEngine
    from pinnate.server.batches.batches import Batches
    from pinnate.server.batches.storage import Storage
    from pinnate.server.responses.disk_store import DiskStore
    from pinnate.server.state import ServerState

BACKLOG = 2048
LAST_WRITES_SECONDS = 2  # for what is being sent when all requests have ended
SIGNALS = (signal.SIGINT, signal.SIGTERM)

_PLAN_LABELS = ("memory", "KV pool", "")  # of MemoryPlan.lines

_logger = logging.getLogger("pinnate.server")


def serve(config: EngineConfig, settings: ServerSettings, launched: Launched | None = None) -> int:
    """Serves until a signal ends it; returns the exit code. `config.model` is a path. `launched`: the engine
    process, where it has been started already.

    Raises:
        ConfigError: a setting cannot be honoured, the address among them.
        ModelError: the model cannot be read or is not supported.
        EngineDeadError: the engine process ended while it started.
    """
    began = time.monotonic()
    setup_logging(settings.log_level, settings.log_format)
    check_certificate(settings.ssl_certfile, settings.ssl_keyfile)
    check_tracing(settings.otlp_traces_endpoint)
    listener = open_listener(settings.host, settings.port)
    gc.disable()  # until it serves: what is made until then is here to stay, and is looked at no more (gc.freeze)
    try:
        template = _read_template(settings.chat_template)
        storage = _open_storage(settings.data_dir)
        # The engine's process loads the model while this one imports the web framework.
        child = EngineChild(config, launched=launched)
        return uvloop.run(_Life(config, settings, listener, began).run(child, template, storage))
    finally:
        listener.close()
        gc.enable()


def _read_template(path: str | None) -> str | None:
    try:
        return None if path is None else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {path}: {error}") from None


def _open_storage(folder: str | None) -> Storage | None:
    if folder is None:
        return None
    from pinnate.server.batches.storage import Storage

    return Storage(Path(folder))


def _make_batches(state: ServerState, storage: Storage) -> Batches:
    from pinnate.server.app import BATCH_ROUTES
    from pinnate.server.batches.batches import Batches

    return Batches(state, storage, BATCH_ROUTES)


def _make_response_store(folder: Path) -> DiskStore:
    from pinnate.server.responses.disk_store import DiskStore

    return DiskStore(folder)


class _Life:
    """One run of the server. `run` is called once."""

    def __init__(self, config: EngineConfig, settings: ServerSettings, listener: socket.socket, began: float) -> None:
        self._config = config
        self._settings = settings
        self._listener = listener
        self._began = began
        self._signals = 0
        self._signalled = asyncio.Event()

    async def run(self, child: EngineChild, template: str | None, storage: Storage | None) -> int:
        # Heavy imports, made while the child works: the reason why they are here and not at the top.
        from pinnate.engine.async_engine import AsyncEngine

        starting = asyncio.create_task(AsyncEngine.start(self._config, child))
        await asyncio.sleep(0)

        from pinnate.server.app import create_app
        from pinnate.server.state import Phase, ServerState

        state = ServerState(self._config.model, self._settings)
        responses = None
        if storage is not None:
            state.batches = _make_batches(state, storage)
            state.responses = responses = _make_response_store(storage.folder)
            opening = asyncio.create_task(responses.open())  # noqa: F841, RUF006 - `close` waits
        server = _make_server(create_app(state), self._settings)
        serving = asyncio.create_task(server.serve(sockets=[self._listener]))
        stopping = asyncio.create_task(self._signalled.wait())
        try:
            await self._take_signals(server, serving)
            await asyncio.wait((starting, stopping, serving), return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                state.engine = starting.result()
                state.engine.listen(state.metrics.record_stats)
                state.metrics.sources.append(grammar_source(state.engine.grammars))
                _adopt_template(state, state.engine, template)
                state.phase = Phase.SERVING
                gc.freeze()
                gc.enable()
                self._announce(state, state.engine)
                if state.batches is not None:
                    state.batches.start()
                await asyncio.wait((stopping, serving), return_when=asyncio.FIRST_COMPLETED)
            state.phase = Phase.SHUTTING_DOWN
            if state.batches is not None:  # the next start goes on with them
                await state.batches.stop()
            await self._drain(state)
            return 0
        finally:
            stopping.cancel()
            await _end(server, serving, starting)
            for close in state.closers:
                await asyncio.to_thread(close)
            if responses is not None:
                await responses.close()
            if storage is not None:
                await storage.close()

    async def _take_signals(self, server: uvicorn.Server, serving: asyncio.Task[None]) -> None:
        """Once uvicorn has set its own handlers, in place of them."""
        while not server.started and not serving.done():
            await asyncio.sleep(0.002)
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        self._signals += 1
        self._signalled.set()

    async def _drain(self, state: ServerState) -> None:
        deadline = time.monotonic() + self._settings.shutdown_timeout
        if state.ongoing:
            _logger.info("waiting for %d requests, at most %.0f s", len(state.ongoing), self._settings.shutdown_timeout)
        while state.ongoing and self._signals < 2 and time.monotonic() < deadline:
            await asyncio.wait(set(state.ongoing), timeout=0.1)
        if state.ongoing:
            _logger.warning("ending %d requests that are still under way", len(state.ongoing))
            state.stop_requests()
            await asyncio.wait(set(state.ongoing), timeout=LAST_WRITES_SECONDS)

    def _announce(self, state: ServerState, engine: AsyncEngine) -> None:
        host, port = self._listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        if host in ("0.0.0.0", "::"):
            shown = "localhost"
        scheme = "http" if self._settings.ssl_certfile is None else "https"
        url, seconds = f"{scheme}://{shown}:{port}", time.monotonic() - self._began
        if self._settings.log_format == "json":
            _logger.info("serving", extra={"fields": _facts(state, engine, url, seconds)})
        else:
            print(_banner(state, engine, url, seconds), flush=True)


def _make_server(app: object, settings: ServerSettings) -> uvicorn.Server:
    import uvicorn

    from pinnate.server.connection import connection_factory

    limits = settings.limits
    config = uvicorn.Config(
        app,  # type: ignore[arg-type]
        http=connection_factory(limits, limits.connections_for(raise_descriptor_limit())),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,  # access_log.py writes our own
        server_header=False,
        timeout_keep_alive=limits.idle_timeout,  # type: ignore[arg-type]
        timeout_graceful_shutdown=LAST_WRITES_SECONDS,
        backlog=BACKLOG,
        ssl_certfile=settings.ssl_certfile,
        ssl_keyfile=settings.ssl_keyfile,
    )
    return uvicorn.Server(config)


def _adopt_template(state: ServerState, engine: AsyncEngine, source: str | None) -> None:
    from pinnate.server.rendering import chat_formats
    from pinnate.text.chat_template import ChatTemplate

    if source is not None:
        tokenizer = engine.tokenizer
        state.chat_template = ChatTemplate(
            source, bos_token=tokenizer.bos_token or "", eos_token=tokenizer.eos_token or ""
        )
    chat_formats(state, engine).log()


async def _end(server: uvicorn.Server, serving: asyncio.Task[None], starting: asyncio.Task[AsyncEngine]) -> None:
    """Ends HTTP, then the engine, whatever state they are in. Leaves no process, socket or file."""
    for connection in list(server.server_state.connections):
        connection.refuse_unread()  # type: ignore[union-attr]  # they are of connection_factory's making
    server.should_exit = True
    starting.cancel()
    await asyncio.wait((serving, starting))
    if not starting.cancelled() and starting.exception() is None:
        await starting.result().close()


def _banner(state: ServerState, engine: AsyncEngine, url: str, seconds: float) -> str:
    """What a person wants to see at start: where it is, how to talk to it, what was chosen."""
    info, name = engine.info, state.model_names[0]
    key = "" if not state.settings.api_keys else " -H 'Authorization: Bearer YOUR_KEY'"
    body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello!"}}]}}'
    steps = ", ".join(f"{step} {duration:.2f}" for step, duration in info.get("startup", {}).items())
    return "\n".join(
        (
            f"Pinnate serves {name} at {url}",
            f"  model       {info['model']} ({info['family']}, context {info['max_model_len']} tokens)",
            f"  dtype       {info['dtype']}, {info['executor']} executor, {info['threads']} threads",
            f"  weights     {_weights(info['weights'])}, quantization {info['quantization']}",
            *(f"  {label:<11} {line}" for label, line in zip(_PLAN_LABELS, info["memory_plan"], strict=True)),
            f"  started in  {seconds:.2f} s ({steps})",
            "",
            f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\",
            f"    -d '{body}'",
        )
    )


def _facts(state: ServerState, engine: AsyncEngine, url: str, seconds: float) -> dict[str, Any]:
    """The banner for machines."""
    shown = ("family", "dtype", "quantization", "executor", "threads", "max_model_len", "kv_tokens", "memory_plan")
    return {
        "url": url,
        "model": state.model_names[0],
        "path": engine.info["model"],
        "start_seconds": round(seconds, 3),
    } | {name: engine.info[name] for name in shown}


def _weights(groups: list[dict[str, Any]]) -> str:
    """`60 MiB int4, 28 MiB int8`: groups of one format together."""
    sizes: dict[str, int] = {}
    for group in groups:
        sizes[group["format"]] = sizes.get(group["format"], 0) + group["bytes"]
    return ", ".join(f"{size / 2**20:.1f} MiB {name}" for name, size in sizes.items())

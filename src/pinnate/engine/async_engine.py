"""AsyncEngine: many requests at once, for programs built on asyncio (the server).

Knows: the engine's life (ready, dead, restarting, closed) and what is said to it. Must not know: HTTP, NumPy, how an
engine computes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from pinnate.core.config import EngineConfig
from pinnate.core.errors import REFUSALS, EngineDeadError, EngineError, ModelError, PinnateError
from pinnate.core.messages import Abort, Command, EngineStats, Reply, StepOutputs
from pinnate.core.request import is_background
from pinnate.core.sampling import SamplingParams
from pinnate.engine.admission import Admission, Limits
from pinnate.engine.child import EngineChild
from pinnate.engine.client import EngineClient, ProcessClient
from pinnate.engine.grammar_checker import GrammarChecker
from pinnate.engine.grammar_worker import WorkerStart
from pinnate.engine.model_text import ModelText, load_model_text
from pinnate.engine.open_requests import OpenRequests
from pinnate.engine.output_processor import OutputProcessor
from pinnate.engine.stream import RequestStream
from pinnate.text.bad_words import bad_word_ids
from pinnate.text.chat_template import ChatTemplate
from pinnate.text.grammars.limits import COMPILE_BYTES
from pinnate.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

State = Literal["ready", "dead", "restarting", "closed"]

THREAD_CHARACTERS = 2000  # longer texts are tokenised in a thread, so that the loop never stalls
FIRST_RESTART_SECONDS = 0.25
LAST_RESTART_SECONDS = 30.0
MODEL_FAULT_SECONDS = 5.0  # the engine has to say what is wrong with a model whose text side is at fault
HEALTHY_SECONDS = 60.0  # after a life this long the back-off begins anew


async def _both(loading: asyncio.Task[ModelText], starting: asyncio.Task[dict[str, Any]]) -> tuple[ModelText, Any]:
    """Where both fail the engine's error counts: that a model of an unknown kind lacks a tokenizer is no news."""
    try:
        text, info = await asyncio.gather(loading, starting)
        return text, info
    except ModelError:
        for task in (await asyncio.wait([starting], timeout=MODEL_FAULT_SECONDS))[0]:
            task.result()
        raise


class AsyncEngine:
    """One model, one engine behind a client, any number of streams. Belongs to one event loop.

    An engine that dies ends every open stream with EngineDeadError and is started again, with a growing delay; until
    it is ready, `submit` and `command` raise EngineDeadError at once.
    """

    def __init__(
        self,
        text: ModelText,
        client: EngineClient,
        info: dict[str, Any],
        connect: Callable[[], EngineClient],
        seed: int | None = None,
    ) -> None:
        """`client` is ready and gave `info`; `connect` starts another engine when this one has died. `seed` draws the
        seeds of requests that give none; without it the system's randomness does."""
        self._text = text
        self._client = client
        self._connect = connect
        self._open = OpenRequests()
        self._calls: dict[int, asyncio.Future[Reply]] = {}
        self._numbers = itertools.count(1)
        self._rng: random.Random = random.SystemRandom() if seed is None else random.Random(seed)
        self._draining = False
        self.grammars = GrammarChecker(self._vocabulary)
        self._on_stats: Callable[[EngineStats], None] | None = None
        self._state: State = "restarting"
        self._become_ready(info)
        self._supervisor = asyncio.create_task(self._supervise(), name="engine-supervisor")

    @classmethod
    async def start(cls, config: EngineConfig, child: EngineChild | None = None) -> AsyncEngine:
        """Starts the engine process, loads the model's text side meanwhile, returns when requests can be taken.

        `config.model` is a path (weights/resolve.py makes one of a name). `child` is an engine process of this very
        config that the caller has started already, to gain time; it is owned by the AsyncEngine from here on.

        Raises:
            ModelError, ConfigError: the engine cannot be started with this model or these settings.
            EngineDeadError: the engine process ended without a word.
        """

        def connect() -> EngineClient:
            return ProcessClient(EngineChild(config))

        client = ProcessClient(child) if child is not None else connect()
        loading = asyncio.create_task(asyncio.to_thread(load_model_text, config.model))
        starting = asyncio.create_task(client.ready())
        try:
            text, info = await _both(loading, starting)
        except BaseException:
            starting.cancel()
            await asyncio.gather(loading, starting, client.close(), return_exceptions=True)
            raise
        return cls(text, client, info, connect, config.seed)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._text.tokenizer

    @property
    def chat_template(self) -> ChatTemplate | None:
        return self._text.chat_template

    @property
    def info(self) -> dict[str, Any]:
        """Sizes, choices with their reasons, start-up times of the engine that runs (or ran last)."""
        return self._info

    @property
    def max_model_len(self) -> int:
        return self._admission.limits.max_model_len

    @property
    def vocab_size(self) -> int:
        return self._admission.limits.vocab_size

    @property
    def state(self) -> State:
        return self._state

    @property
    def heartbeat_age(self) -> float:
        """Seconds since the engine's process showed that it is alive; a long step does not count against it."""
        return self._client.heartbeat_age

    @property
    def stats(self) -> EngineStats:
        """As of the engine's latest step."""
        return self._stats

    def listen(self, on_stats: Callable[[EngineStats], None]) -> None:
        """`on_stats` gets the stats of every step, and those of each new engine before its first. It must be quick."""
        self._on_stats = on_stats

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if len(text) <= THREAD_CHARACTERS:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens=add_special_tokens)

    async def submit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        cache_salt: str = "",
        priority: int = 0,
        cache_report: bool = False,
    ) -> RequestStream:
        """Checks the request and sends it to the engine. `max_tokens` None means the rest of the context, `seed` None a
        random one. `request_id` is for logs; it need not be unique. The queue's limits are for live requests: whoever
        sends background ones bounds them, and neither kind is refused for the other.

        Raises:
            InvalidRequestError, ContextLengthError: as Limits.check; a structured output that cannot be followed.
            QueueFullError: too many sequences are in flight, or too many prompt tokens wait.
            EngineDeadError: the engine is not ready.
        """
        self._check_ready()
        background = is_background(priority)
        if params.structured_output is not None:
            if not background:
                self.check_queue(len(prompt_token_ids))
            checked = await self.grammars.check(params.structured_output, background=background)
            params = msgspec.structs.replace(params, structured_output=checked)
            self._check_ready()
        wire_id = f"{request_id}:{next(self._numbers)}"
        bad_words = await self._bad_words(params) if params.bad_words else ()
        request = self._admission.make_request(
            wire_id,
            prompt_token_ids,
            params,
            cache_salt=cache_salt,
            priority=priority,
            cache_report=cache_report,
            bad_word_ids=bad_words,
        )
        if not background:
            self.check_queue(len(prompt_token_ids))
        channel, place = self._open.add(OutputProcessor(request, self.tokenizer), request)
        self._client.send(request)
        return RequestStream(
            request_id, channel, place, lambda error: self._abort(wire_id, error), lambda: self._stop(wire_id)
        )

    def check_queue(self, num_prompt_tokens: int = 0) -> None:
        """Whether one more request would be taken; `submit` asks this too. For a refusal before any work is done.

        Raises:
            QueueFullError: with the numbers, and when there should be room.
        """
        limits = self._admission.limits
        self._open.gate.check(limits.max_sequences, limits.max_num_queued_tokens, num_prompt_tokens)

    def queue_seconds(self) -> float:
        """How long the prompts that wait now will take to be computed, at the rate of late."""
        return self._open.gate.waiting_seconds()

    async def command(self, name: str, **arguments: Any) -> dict[str, Any]:
        """`flush_cache`, `check_integrity`, `stats`, or one of engine/cache_commands.py.

        Raises:
            InvalidRequestError, UnsupportedError, NotFoundError: the engine refused what was asked.
            EngineError: the engine refused, with its reason.
            EngineDeadError: the engine is not ready, or died meanwhile.
        """
        self._check_ready()
        number = next(self._numbers)
        self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            self._client.send(Command(number, name, arguments))
            reply = await self._calls[number]
        finally:
            del self._calls[number]
        if reply.error is not None:
            refusal = REFUSALS.get(reply.kind or "")
            if refusal is not None:
                raise refusal(reply.error, param=reply.param, code=reply.code)
            raise EngineError(reply.error)
        return reply.result

    async def drain(self) -> None:
        """Takes no new requests and waits until those under way have ended."""
        self._draining = True
        await self._open.wait_until_empty()

    async def close(self) -> None:
        """Ends the engine and every stream. Nothing is left: no process, socket or file."""
        self._state = "closed"
        self._supervisor.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._supervisor
        self._end_all(EngineDeadError("the engine was shut down"))
        await self.grammars.close()
        await self._client.close()

    def _check_ready(self) -> None:
        if self._state != "ready":
            raise EngineDeadError(f"the engine is not ready: {self._state}")
        if self._draining:
            raise EngineDeadError("the engine is shutting down and takes no new requests")

    def _become_ready(self, info: dict[str, Any]) -> None:
        self._info = info
        eos = dict.fromkeys((*self.tokenizer.eos_token_ids, *info["eos_token_ids"]))
        self._admission = Admission(Limits.from_info(info), tuple(eos), self._rng)
        pages, committed = info["num_pages"], info.get("kv_committed_bytes", 0)
        self._take_stats(EngineStats(num_pages=pages, num_free_pages=pages, kv_committed_bytes=committed))
        self._state = "ready"

    def _take_stats(self, stats: EngineStats) -> None:
        self._stats = stats
        if self._on_stats is not None:
            self._on_stats(stats)

    def _abort(self, wire_id: str, error: PinnateError | None) -> None:
        if self._open.end(wire_id, error) and self._state == "ready":
            self._client.send(Abort([wire_id]))

    def _stop(self, wire_id: str) -> None:
        if self._state == "ready":
            self._client.send(Abort([wire_id]))

    def _vocabulary(self) -> WorkerStart:
        tokenizer, ids = self.tokenizer, range(self.vocab_size)
        return WorkerStart(
            tokens=[tokenizer.token_bytes(token) for token in ids],
            special=[token for token in ids if tokenizer.is_special(token)],
            eos=[token for token in (*tokenizer.eos_token_ids, *self._info["eos_token_ids"]) if token in ids],
            most_bytes=COMPILE_BYTES,
        )

    async def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        if sum(map(len, params.bad_words)) <= THREAD_CHARACTERS:
            return bad_word_ids(self.tokenizer, params.bad_words)
        return await asyncio.to_thread(bad_word_ids, self.tokenizer, params.bad_words)

    async def _supervise(self) -> None:
        """Reads outputs while the engine lives, starts another one when it has died."""
        delay = FIRST_RESTART_SECONDS
        while True:
            born = time.monotonic()
            try:
                await self._read()
            except Exception as error:
                self._state = "dead"
                log.error("engine lost: %s", error, exc_info=not isinstance(error, EngineDeadError))
                lost = self._end_all(EngineDeadError("the engine process died while it worked on this request"))
                log.error("%d requests were lost", lost)
            if time.monotonic() - born > HEALTHY_SECONDS:
                delay = FIRST_RESTART_SECONDS
            delay = await self._restart(delay)

    async def _read(self) -> None:
        while True:
            message = await self._client.receive()
            if isinstance(message, StepOutputs):
                self._take_stats(message.stats)
                self._open.start(message.started)
                for abort in self._open.deliver(message.outputs):
                    self._client.send(abort)
            elif isinstance(message, Reply):
                call = self._calls.get(message.command_id)
                if call is not None and not call.done():
                    call.set_result(message)

    async def _restart(self, delay: float) -> float:
        """Tries until an engine is ready; returns the delay to begin with next time."""
        while True:
            self._state = "dead"
            await self._client.close()
            await asyncio.sleep(delay)
            delay = min(2 * delay, LAST_RESTART_SECONDS)
            self._state = "restarting"
            try:
                self._client = self._connect()
                self._become_ready(await self._client.ready())
            except (PinnateError, OSError) as error:
                log.error("the engine could not be restarted, next try in %.1f s: %s", delay, error)
            else:
                log.warning("the engine was restarted")
                return delay

    def _end_all(self, error: EngineDeadError) -> int:
        for call in self._calls.values():
            if not call.done():
                call.set_exception(error)
        return self._open.end_all(error)

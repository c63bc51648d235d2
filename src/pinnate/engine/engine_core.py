"""EngineCore: the loop that is continuous batching.

Knows: the order of one step, what happens when a step fails, where the time goes. Must not know: how requests
are chosen (scheduler), how tokens are computed (executor), or where messages come from and go to (the port).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from time import perf_counter
from types import MappingProxyType
from typing import Any

import msgspec

from pinnate.core.batch import SchedulerOutput
from pinnate.core.errors import PinnateError
from pinnate.core.messages import Abort, Command, EngineStats, StepOutputs, ToEngine, TokenOutput
from pinnate.core.request import FinishReason, Request
from pinnate.core.structured import Matcher
from pinnate.engine.commands import CommandHandler, answer
from pinnate.engine.event_sink import EventSink, NoEvents
from pinnate.engine.grammar_intake import GrammarCache, GrammarIntake, no_backend
from pinnate.engine.mailbox import Port
from pinnate.engine.step_clock import StepClock
from pinnate.executor.base import Executor
from pinnate.kvcache.tiers.lower import LowerTiers, NoTiers
from pinnate.scheduler.scheduler import Scheduler

log = logging.getLogger(__name__)

NO_COMMANDS: Mapping[str, CommandHandler] = MappingProxyType({})


class EngineCore:
    """Owns the scheduler and the executor; one thread calls `step`.

    An executor that raises ends the requests of that step and nothing else. An error of the scheduler is a bug of
    ours with unknown consequences: it is not caught, and ends the engine.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        port: Port,
        *,
        check_integrity: bool = False,
        commands: Mapping[str, CommandHandler] = NO_COMMANDS,
        events: EventSink | None = None,
        tiers: LowerTiers | None = None,
        grammars: GrammarIntake | None = None,
    ) -> None:
        """`commands` are answered beside the core's own. `tiers` are the scheduler's. `grammars` compiles structured
        outputs; without it they are refused."""
        self._scheduler = scheduler
        self._executor = executor
        self._port = port
        self._check_integrity = check_integrity
        self._commands = {**self._own_commands(), **commands}
        self._events = NoEvents() if events is None else events
        self._tiers = NoTiers() if tiers is None else tiers
        self._grammars = GrammarIntake(GrammarCache(no_backend)) if grammars is None else grammars
        self._clock = StepClock()
        self._idle = True  # nothing to run until another message comes
        self._failures = 0  # failed steps in a row
        self._step_tokens = 0

    def step(self) -> None:
        """Receive, schedule, execute, update, send. Sleeps first when there is nothing to do."""
        messages = self._port.receive(wait=self._idle)
        self._clock.start()
        outputs = [output for message in messages for output in self._handle(message)]
        outputs += self._add_compiled()
        batch = self._scheduler.schedule()
        self._idle = batch is None and not self._wait_for_work()
        self._events.publish()  # now, for the publisher's thread can run while the executor holds no GIL
        if batch is not None:
            outputs += self._run(batch)
        if self._check_integrity:
            self._scheduler.check_integrity()
        if outputs or batch is not None:
            self._port.send(StepOutputs(outputs, self.stats(), self._scheduler.take_started()))
        self._clock.stop()

    # ------------------------------------------------------------------ receive

    def _handle(self, message: ToEngine) -> list[TokenOutput]:
        match message:
            case Request():
                return self._add(message)
            case Abort(request_ids, index):
                return self._grammars.abort(request_ids, index) + self._scheduler.abort(request_ids, index)
            case Command():
                reply = answer(message, self._commands)
                self._port.send(StepOutputs([], self.stats()))  # first: whoever has the reply finds its effect there
                self._port.send(reply)
        return []

    def _add(self, request: Request) -> list[TokenOutput]:
        if request.sampling.structured_output is None:
            return self._queue(request)
        matcher = self._grammars.take(request)
        return [] if matcher is None else self._queue(request, matcher)  # None: it comes with `_add_compiled`

    def _add_compiled(self) -> list[TokenOutput]:
        outputs: list[TokenOutput] = []
        for arrival in self._grammars.arrivals():
            outputs += arrival.outputs
            if arrival.matcher is not None:
                outputs += self._queue(arrival.request, arrival.matcher)
                for index in arrival.aborted:
                    outputs += self._scheduler.abort([arrival.request.request_id], index)
        return outputs

    def _queue(self, request: Request, matcher: Matcher | None = None) -> list[TokenOutput]:
        """The facades refuse before they send, so a refusal here is rare: each choice ends with the reason."""
        try:
            self._scheduler.add(request, matcher)
        except PinnateError as error:
            return [
                TokenOutput(request.request_id, index, [], finish_reason=FinishReason.ERROR, error=str(error))
                for index in range(request.sampling.n)
            ]
        return []

    # ------------------------------------------------------------------ execute, update

    def _run(self, batch: SchedulerOutput) -> list[TokenOutput]:
        started = perf_counter()
        try:
            result = self._executor.execute(batch)
        except Exception as error:
            self._failures += 1
            log.exception("a step failed (%d in a row); its requests end", self._failures)
            return self._scheduler.fail(batch, f"{type(error).__name__}: {error}")
        except BaseException:  # Ctrl-C in an LLM: leave a scheduler that can go on
            self._scheduler.fail(batch, "interrupted")
            raise
        finally:
            seconds = perf_counter() - started
            self._note_execution(batch.num_tokens, seconds)
        self._failures = 0
        self._scheduler.note_seconds(batch, seconds)
        return self._scheduler.update(batch, result)

    def _note_execution(self, num_tokens: int, seconds: float) -> None:
        self._step_tokens = num_tokens
        self._clock.execute_seconds += seconds
        self._tiers.note_step(num_tokens, seconds)

    def _wait_for_work(self) -> bool:
        """Where nothing can run: waits a moment for what makes it possible, if that is under way. Whether it is."""
        return self._tiers.wait_for_load() or self._grammars.wait()

    # ------------------------------------------------------------------ around the loop

    @property
    def scheduler(self) -> Scheduler:
        return self._scheduler

    @property
    def executor(self) -> Executor:
        return self._executor

    @property
    def is_idle(self) -> bool:
        """Whether `step` would wait for a message before it does anything."""
        return self._idle

    def stats(self) -> EngineStats:
        stats = self._scheduler.stats()
        return msgspec.structs.replace(
            stats,
            num_waiting=stats.num_waiting + len(self._grammars),
            kv_committed_bytes=self._executor.kv_committed_bytes,
            execute_seconds=self._clock.execute_seconds,
            step_seconds=self._clock.step_seconds,
            step_tokens=self._step_tokens,
        )

    def close(self) -> None:
        self._tiers.close()
        self._grammars.close()
        self._executor.close()
        self._events.close()

    def _own_commands(self) -> dict[str, CommandHandler]:
        def check_integrity(_: dict[str, Any]) -> dict[str, Any]:
            self._scheduler.check_integrity()
            return {"ok": True}

        return {
            "check_integrity": check_integrity,
            "stats": lambda _: msgspec.to_builtins(self.stats()),
            "flush_cache": lambda _: {"freed_pages": self._scheduler.flush_cache()},
        }

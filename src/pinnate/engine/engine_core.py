"""EngineCore: the loop that is continuous batching.

Knows: the order of one step, what happens when a step fails, where the time goes. Must not know: how requests
are chosen (scheduler), how tokens are computed (executor), or where messages come from and go to (clients).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from time import perf_counter
from types import MappingProxyType
from typing import Protocol

import msgspec

from pinnate.core.batch import SchedulerOutput
from pinnate.core.errors import PinnateError, RequestError
from pinnate.core.messages import Abort, Command, EngineStats, FromEngine, Reply, StepOutputs, ToEngine, TokenOutput
from pinnate.core.request import FinishReason, Request
from pinnate.core.structured import Matcher
from pinnate.engine.cache_commands import CommandHandler
from pinnate.engine.grammar_intake import GrammarIntake
from pinnate.executor.base import Executor
from pinnate.kvcache.tiers.manager import TierManager
from pinnate.scheduler.scheduler import Scheduler

log = logging.getLogger(__name__)

NO_COMMANDS: Mapping[str, CommandHandler] = MappingProxyType({})


class Inbox(Protocol):
    def receive(self, wait: bool) -> list[ToEngine]:
        """All messages that have arrived; with `wait`, sleeps until there is at least one."""
        ...


class Outbox(Protocol):
    def send(self, message: FromEngine) -> None: ...


class EventSink(Protocol):
    def publish(self) -> None:
        """Hands on what changed since the last call. Must be quick: the step waits for it."""
        ...

    def close(self) -> None: ...


class EngineCore:
    """Owns the scheduler and the executor; one thread calls `step`.

    An executor that raises ends the requests of that step and nothing else. An error of the scheduler is a bug of
    ours with unknown consequences: it is not caught, and ends the engine.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        inbox: Inbox,
        outbox: Outbox,
        *,
        check_integrity: bool = False,
        commands: Mapping[str, CommandHandler] = NO_COMMANDS,
        events: EventSink | None = None,
        tiers: TierManager | None = None,
        grammars: GrammarIntake | None = None,
    ) -> None:
        """`commands` are answered beside the core's own. `events` is called once a step. `tiers` is the scheduler's.
        `grammars` compiles structured outputs; without it they are refused."""
        self._scheduler = scheduler
        self._executor = executor
        self._inbox = inbox
        self._outbox = outbox
        self._check_integrity = check_integrity
        self._commands = commands
        self._events = events
        self._tiers = tiers
        self._grammars = grammars
        self._idle = True  # nothing to run until another message comes
        self._failures = 0  # failed steps in a row
        self._execute_seconds = 0.0
        self._step_seconds = 0.0
        self._step_tokens = 0

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

    def step(self) -> None:
        """Receive, schedule, execute, update, send. Sleeps first when there is nothing to do."""
        messages = self._inbox.receive(wait=self._idle)
        started = perf_counter()
        outputs = [output for message in messages for output in self._handle(message)]
        outputs += self._admit_compiled()
        batch = self._scheduler.schedule()
        self._idle = batch is None and not self._wait()
        if self._events is not None:
            self._events.publish()  # now, for the publisher's thread can run while the executor holds no GIL
        if batch is not None:
            outputs += self._run(batch)
        if self._check_integrity:
            self._scheduler.check_integrity()
        self._step_seconds += (ready := perf_counter()) - started
        if outputs or batch is not None:
            self._outbox.send(StepOutputs(outputs, self.stats(), self._scheduler.take_started()))
        self._step_seconds += perf_counter() - ready

    def stats(self) -> EngineStats:
        stats = self._scheduler.stats()
        return msgspec.structs.replace(
            stats,
            num_waiting=stats.num_waiting + (0 if self._grammars is None else len(self._grammars)),
            execute_seconds=self._execute_seconds,
            step_seconds=self._step_seconds,
            step_tokens=self._step_tokens,
        )

    def close(self) -> None:
        if self._tiers is not None:
            self._tiers.close()
        if self._grammars is not None:
            self._grammars.close()
        self._executor.close()
        if self._events is not None:
            self._events.close()

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
            self._execute_seconds += seconds
            self._step_tokens = batch.num_tokens
            if self._tiers is not None:
                self._tiers.note_step(self._step_tokens, seconds)
        self._failures = 0
        return self._scheduler.update(batch, result)

    def _handle(self, message: ToEngine) -> list[TokenOutput]:
        match message:
            case Request():
                return self._add(message)
            case Abort():
                return self._abort(message)
            case Command():
                reply = self._answer(message)
                # Before the reply: whoever has it finds the command's effect in the stats.
                self._outbox.send(StepOutputs([], self.stats()))
                self._outbox.send(reply)
        return []

    def _add(self, request: Request) -> list[TokenOutput]:
        if request.sampling.structured_output is None:
            return self._schedule(request, None)
        if self._grammars is None:
            return _refusals(request, "this engine compiles no structured outputs")
        matcher = self._grammars.take(request)
        return [] if matcher is None else self._schedule(request, matcher)

    def _schedule(self, request: Request, matcher: Matcher | None) -> list[TokenOutput]:
        try:
            self._scheduler.add(request, matcher)
        except PinnateError as error:
            return _refusals(request, str(error))
        return []

    def _admit_compiled(self) -> list[TokenOutput]:
        outputs: list[TokenOutput] = []
        for arrival in () if self._grammars is None or not len(self._grammars) else self._grammars.arrivals():
            outputs += arrival.outputs
            if arrival.matcher is not None:
                outputs += self._schedule(arrival.request, arrival.matcher)
                for index in arrival.aborted:
                    outputs += self._scheduler.abort([arrival.request.request_id], index)
        return outputs

    def _abort(self, message: Abort) -> list[TokenOutput]:
        outputs = [] if self._grammars is None else self._grammars.abort(message.request_ids, message.index)
        return outputs + self._scheduler.abort(message.request_ids, message.index)

    def _wait(self) -> bool:
        """Where nothing can run: waits for what makes it possible, if that is under way. Whether it is."""
        if self._tiers is not None and self._tiers.wait_for_load():
            return True
        return self._grammars is not None and self._grammars.wait()

    def _answer(self, command: Command) -> Reply:
        try:
            match command.name:
                case "check_integrity":
                    self._scheduler.check_integrity()
                    return Reply(command.command_id, {"ok": True})
                case "stats":
                    return Reply(command.command_id, msgspec.to_builtins(self.stats()))
                case "flush_cache":
                    return Reply(command.command_id, {"freed_pages": self._scheduler.flush_cache()})
            handler = self._commands.get(command.name)
            if handler is None:
                return Reply(command.command_id, {}, error=f"unknown command {command.name!r}")
            return Reply(command.command_id, handler(command.arguments))
        except RequestError as error:
            return Reply(command.command_id, {}, str(error), type(error).__name__, error.param, error.code)
        except Exception as error:
            log.exception("command %s failed", command.name)
            return Reply(command.command_id, {}, error=f"{type(error).__name__}: {error}")


def _refusals(request: Request, reason: str) -> list[TokenOutput]:
    """The facades refuse before they send, so a refusal here is rare: each choice ends with the reason."""
    return [
        TokenOutput(request.request_id, index, [], finish_reason=FinishReason.ERROR, error=reason)
        for index in range(request.sampling.n)
    ]

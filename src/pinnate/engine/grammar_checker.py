"""GrammarChecker: structured outputs are checked in a process that can be killed, before anything is sent to the
engine.

Knows: the process, its time limit, verdicts it gave before. Must not know: schemas, how one is compiled, HTTP. Light to
import: llguidance is imported by the process alone. Belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

import msgspec

from pinnate.core.errors import EngineError, QueueFullError
from pinnate.core.structured import StructuredOutput
from pinnate.engine.grammar_worker import LENGTH_BYTES, Verdict, WorkerStart, frame
from pinnate.text.grammars import limits
from pinnate.text.grammars.faults import Fault

log = logging.getLogger(__name__)

LOAD_SECONDS = 30.0  # for the process to be ready; it takes a quarter of a second on an idle core


@dataclass(slots=True)
class GrammarCounts:
    """Since the start. `cache_hits`: checks answered from memory; `failures`: refused outputs, `timeouts` among
    them."""

    checks: int = 0
    cache_hits: int = 0
    failures: int = 0
    timeouts: int = 0
    seconds: float = 0.0  # in the process


class GrammarChecker:
    """`check` before use. One process, started when it is first needed; what it refused or took is remembered."""

    def __init__(self, vocabulary: Callable[[], WorkerStart], seconds: float = limits.COMPILE_SECONDS) -> None:
        """`vocabulary` is called in a thread, once for each process. `seconds`: how long one check may take."""
        self._vocabulary = vocabulary
        self._seconds = seconds
        self._worker: _Worker | None = None
        self._turn = asyncio.Lock()
        self._verdicts: OrderedDict[tuple[str, str], Verdict] = OrderedDict()
        self._bytes = 0
        self._pending: dict[tuple[str, str], _Pending] = {}
        self.counts = GrammarCounts()

    async def check(self, structured: StructuredOutput, *, background: bool = False) -> StructuredOutput:
        """The form in which the engine takes it. Live and background requests each have their own places to wait.

        Raises:
            InvalidRequestError, UnsupportedError: naming the field and the path inside it.
            QueueFullError: too many others wait to be checked.
            EngineError: the checking process cannot be started.
        """
        size = len(structured.text)
        if size > limits.MAX_BYTES:
            self.counts.failures += 1
            raise Fault(f"{size} characters, at most {limits.MAX_BYTES} are allowed").error(structured.param)
        self.counts.checks += 1
        verdict = await self._verdict(structured, background)
        if verdict.checked is None:
            self.counts.failures += 1
            raise Fault(verdict.message, verdict.path, unsupported=verdict.unsupported).error(structured.param)
        return msgspec.structs.replace(verdict.checked, param=structured.param)

    async def close(self) -> None:
        for pending in self._pending.values():
            pending.task.cancel()
        if self._worker is not None:
            await self._worker.kill()
            self._worker = None

    async def _verdict(self, structured: StructuredOutput, background: bool) -> Verdict:
        key = (structured.kind, structured.text)
        known = self._verdicts.get(key)
        if known is not None:
            self._verdicts.move_to_end(key)
            self.counts.cache_hits += 1
            return known
        pending = self._pending.get(key)
        if pending is None:
            waiting = sum(other.background is background for other in self._pending.values())
            if waiting >= limits.MAX_COMPILES_WAITING:
                raise QueueFullError(f"{waiting} structured outputs wait to be compiled; try again later")
            pending = _Pending(asyncio.create_task(self._judge(structured)), background)
            self._pending[key] = pending
            pending.task.add_done_callback(lambda done: self._forget(key, done))
        return await asyncio.shield(pending.task)  # a client that leaves takes nothing from others that sent the same

    def _forget(self, key: tuple[str, str], task: asyncio.Task[Verdict]) -> None:
        del self._pending[key]
        if not task.cancelled():
            task.exception()  # seen, also where everybody who waited has left

    async def _judge(self, structured: StructuredOutput) -> Verdict:
        async with self._turn:
            worker = await self._ready_worker()
            started = perf_counter()
            try:
                verdict = await asyncio.wait_for(worker.ask(structured), self._seconds)
            except TimeoutError:
                self.counts.timeouts += 1
                verdict = Verdict(None, f"it takes longer than {self._seconds:g} s to compile")
            except asyncio.IncompleteReadError:
                verdict = Verdict(None, "it cannot be compiled: its compiler ended, for lack of memory or of stack")
            finally:
                self.counts.seconds += perf_counter() - started
                if not worker.is_idle:
                    self._worker = None
                    await worker.kill()
        self._remember(structured, verdict)
        return verdict

    async def _ready_worker(self) -> _Worker:
        if self._worker is None:
            start = await asyncio.to_thread(self._vocabulary)
            self._worker = await _Worker.start(start)
        return self._worker

    def _remember(self, structured: StructuredOutput, verdict: Verdict) -> None:
        self._verdicts[structured.kind, structured.text] = verdict
        self._bytes += len(structured.text)
        while len(self._verdicts) > limits.CACHED_GRAMMARS or self._bytes > limits.CACHED_GRAMMAR_BYTES:
            (_, text), _ = self._verdicts.popitem(last=False)
            self._bytes -= len(text)


class _Pending(NamedTuple):
    """A check under way. `background`: who asked first."""

    task: asyncio.Task[Verdict]
    background: bool


class _Worker:
    """One checking process. `is_idle`: it has answered all it was asked, so it may be asked again."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.is_idle = False

    @classmethod
    async def start(cls, start: WorkerStart) -> _Worker:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "pinnate.engine.grammar_worker"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in a terminal is not for it
        )
        worker = cls(process)
        try:
            await asyncio.wait_for(worker._exchange(frame(start)), LOAD_SECONDS)
        except BaseException as error:
            await worker.kill()
            if isinstance(error, TimeoutError | asyncio.IncompleteReadError | OSError):
                log.error("the process that checks structured outputs did not start: %r", error)
                raise EngineError("structured outputs cannot be compiled: the checking process did not start") from None
            raise
        return worker

    async def ask(self, structured: StructuredOutput) -> Verdict:
        """
        Raises:
            IncompleteReadError: the process ended.
        """
        return await self._exchange(frame(structured))

    async def _exchange(self, data: bytes) -> Verdict:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.is_idle = False
        with contextlib.suppress(ConnectionError):  # it ended: reading says so
            self._process.stdin.write(data)
            await self._process.stdin.drain()
        size = int.from_bytes(await self._process.stdout.readexactly(LENGTH_BYTES), "big")
        verdict = msgspec.msgpack.decode(await self._process.stdout.readexactly(size), type=Verdict)
        self.is_idle = True
        return verdict

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

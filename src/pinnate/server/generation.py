"""Running a checked request: submit its prompts, merge what comes back, count, notice the client's leaving.

Knows: the engine's streams, usage, times. Must not know: the shape of answers (`replies.py`, `streaming.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.types import Receive

from pinnate.core.messages import RequestTiming
from pinnate.core.sampling import SamplingParams
from pinnate.server.body import FieldWarning
from pinnate.server.protocol.common import Usage
from pinnate.server.request_record import Generation, RequestRecord
from pinnate.server.state import ServerState
from pinnate.server.usage import UsageCounter
from pinnate.text.parsers.events import ChatParser, PlainParser

if TYPE_CHECKING:
    from pinnate.engine.async_engine import AsyncEngine
    from pinnate.engine.output_processor import OutputDelta
    from pinnate.engine.stream import RequestStream


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """`text` is what an echo shows. `params`: where they differ from the job's (never in n). `request_id`: what an
    operator may abort it by."""

    token_ids: list[int]
    text: str = ""
    params: SamplingParams | None = None
    request_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One checked request. Choice `k` of prompt `p` has the index `p * params.n + k`.

    `prompt_logprobs`: show them as a field of their own; an echo shows them with the text. `shown`: what the client
    asked for, where `params` run more candidates than it wants choices (best_of.py). `new_parser` makes the parser of
    one choice of a chat. `include_usage`: the stream's last chunk has the usage; `continuous_usage`: each chunk has it.
    `warnings`: its fields that have no effect. `fingerprint`: names what computes the answer. `context`: what its API
    needs again to show the answer; nobody else looks into it.
    """

    id: str
    model: str
    prompts: list[Prompt]
    params: SamplingParams
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    cache_salt: str = ""
    cache_report: bool = False
    priority: int = 0
    echo: bool = False
    prompt_logprobs: bool = False
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    return_timings: bool = False
    shown: SamplingParams | None = None
    new_parser: Callable[[], ChatParser] = PlainParser
    warnings: tuple[FieldWarning, ...] = ()
    fingerprint: str = ""
    context: object = None
    created: int = field(default_factory=lambda: int(time.time()))
    arrival: float = field(default_factory=time.monotonic)

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.params.n


Output = tuple[int, "OutputDelta"]  # prompt number, what one of its choices got


async def submit(engine: AsyncEngine, job: Job) -> list[RequestStream]:
    """One stream for each prompt, all or none.

    Raises:
        RequestError, EngineError: as `AsyncEngine.submit`; prompts submitted before the one at fault are aborted.
    """
    streams: list[RequestStream] = []
    try:
        for number, prompt in enumerate(job.prompts):
            stream = await engine.submit(
                prompt.token_ids,
                prompt.params or job.params,
                request_id=f"{job.id}-{number}",
                cache_salt=job.cache_salt,
                priority=job.priority,
                cache_report=job.cache_report,
            )
            streams.append(stream)
    except BaseException:
        abort(streams)
        raise
    return streams


def abort(streams: list[RequestStream]) -> None:
    """Ends what still runs; a stream that has ended is left as it is."""
    for stream in streams:
        stream.abort()


async def merge(streams: list[RequestStream], job: Job) -> AsyncGenerator[list[Output]]:
    """What all choices get, in order for each of them; what is ready at the same time comes as one list. It is empty
    where a stream was nudged.

    Raises:
        PinnateError: from any of the streams.
    """
    if len(job.prompts) == 1:
        while (deltas := await streams[0].take_all()) is not None:
            yield [(0, delta) for delta in deltas]
        return
    ready: deque[Output] = deque()
    wake = asyncio.Event()

    async def pump(number: int, stream: RequestStream) -> None:
        try:
            while (deltas := await stream.take_all()) is not None:
                ready.extend((number, delta) for delta in deltas)
                wake.set()
        finally:
            wake.set()

    pumps = [asyncio.create_task(pump(number, stream)) for number, stream in enumerate(streams)]
    try:
        while True:
            await wake.wait()
            wake.clear()
            batch = list(ready)
            ready.clear()
            if batch or not any(task.done() for task in pumps):
                yield batch
            for task in [task for task in pumps if task.done()]:
                task.result()  # raises what the stream raised
                pumps.remove(task)
            if not pumps and not ready:
                return
            if ready:
                wake.set()
    finally:
        for task in pumps:
            task.cancel()


class Tally:
    """Usage and times of one job, kept while its outputs pass by."""

    def __init__(self, job: Job, state: ServerState, record: RequestRecord | None = None) -> None:
        """`record`, that of the HTTP request the job is part of, gets the job's facts when it ends."""
        self._job = job
        self._state = state
        self._record = record
        self._first_token: float | None = None
        self._timings: dict[int, RequestTiming] = {}  # by prompt
        state.metrics.observe_params(job.shown or job.params)
        self._reasons: list[str] = []
        self._counter = UsageCounter(job)
        self._seen: set[int] = set()  # prompts that have had a token
        self._times: dict[tuple[int, int], tuple[float, float]] = {}  # first and latest token of a choice
        self._finished: set[tuple[int, int]] = set()

    @property
    def is_complete(self) -> bool:
        return len(self._finished) == self._job.num_choices

    def add(self, outputs: list[Output]) -> None:
        now = time.monotonic()
        metrics = self._state.metrics
        for number, delta in outputs:
            key = (number, delta.index)
            self._counter.add(number, delta)
            if number not in self._seen:
                self._begin(number, delta, now)
            first, latest = self._times.get(key, (now, now))
            if key in self._times:
                metrics.inter_token_latency.observe(now - latest)
            self._times[key] = (first, now)
            if delta.finish_reason is not None:
                self._finish(key, str(delta.finish_reason), now)

    def _begin(self, number: int, delta: OutputDelta, now: float) -> None:
        """The first output of a prompt."""
        self._seen.add(number)
        self._first_token = self._first_token or now
        metrics, timing = self._state.metrics, delta.timing
        metrics.time_to_first_token.observe(now - self._job.arrival)
        metrics.request_prompt_tokens.observe(len(self._job.prompts[number].token_ids))
        if timing is not None:
            self._timings[number] = timing
            metrics.queue_time.observe(timing.queue_seconds)
            if timing.prefill_seconds is not None:
                metrics.prefill_time.observe(timing.prefill_seconds)

    def note_error(self, code: str | None) -> None:
        """The answer ended with this error after it had begun."""
        if self._record is not None:
            self._record.error_code = code

    def close(self) -> None:
        """At the end, however it came: choices that did not finish count as aborted."""
        now = time.monotonic()
        for number in range(len(self._job.prompts)):
            for index in range(self._job.params.n):
                if (number, index) not in self._finished:
                    self._finish((number, index), "abort", now)
        if self._counter.generated:
            self._state.metrics.max_generation_tokens.observe(max(self._counter.generated.values()))
        if self._record is not None:
            self._record.generations.append(self._facts())

    def usage(self) -> Usage:
        return self._counter.usage()

    def _facts(self) -> Generation:
        job, usage = self._job, self.usage()
        decode = max((latest - first for first, latest in self._times.values()), default=None)
        timing = self._timings.get(0)
        return Generation(
            id=job.id,
            model=job.model,
            params=job.params,
            stream=job.stream,
            num_prompts=len(job.prompts),
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.prompt_tokens_details.cached_tokens,
            output_tokens=usage.completion_tokens,
            finish_reasons=tuple(self._reasons),
            queue_seconds=None if timing is None else timing.queue_seconds,
            prefill_seconds=None if timing is None else timing.prefill_seconds,
            first_token_seconds=None if self._first_token is None else self._first_token - job.arrival,
            decode_seconds=decode,
        )

    def _finish(self, key: tuple[int, int], reason: str, now: float) -> None:
        self._finished.add(key)
        self._reasons.append(reason)
        metrics = self._state.metrics
        metrics.finished[reason] += 1
        generated = self._counter.generated.get(key, 0)
        metrics.request_generation_tokens.observe(generated)
        metrics.e2e_latency.observe(now - self._job.arrival)
        first, latest = self._times.get(key, (now, now))
        timing = self._timings.get(key[0])
        if timing is not None and timing.prefill_seconds is not None:
            metrics.decode_time.observe(latest - first)
            metrics.inference_time.observe(timing.prefill_seconds + latest - first)
        if generated > 1 and latest > first:  # a beam search's choice comes whole
            metrics.time_per_output_token.observe((latest - first) / (generated - 1))


async def attend(state: ServerState, receive: Receive, work: Coroutine[None, None, None]) -> None:
    """Runs `work` until it ends or its client leaves, which cancels it. Raises what `work` raises."""
    task = asyncio.create_task(work)
    leaving = asyncio.create_task(_until_disconnect(receive))
    state.ongoing.add(task)
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
        if not task.cancelled():
            task.result()
    finally:
        state.ongoing.discard(task)
        task.cancel()
        leaving.cancel()


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

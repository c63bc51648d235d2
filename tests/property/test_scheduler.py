"""The scheduler and the KV cache together, against a memory model and lone runs.

Every output is a pure function of its own tokens, so whatever was shared, preempted or chunked, each request
must get exactly what it would get alone.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pinnate.core.batch import Sample, ScheduledSequence, SchedulerOutput, StepResult, TokenLogprobs
from pinnate.core.errors import ContextLengthError, InvalidRequestError
from pinnate.core.messages import TokenOutput
from pinnate.core.request import BACKGROUND_PRIORITY, FinishReason, Request
from pinnate.core.sampling import SamplingParams
from pinnate.kvcache.manager import KVCacheManager
from pinnate.scheduler.scheduler import Scheduler
from tests.property.slot_memory import SlotMemory, extend, prefix_hashes

VOCAB = 7
EOS = 0
MAX_MODEL_LEN = 64
GOOD_ENDS = (FinishReason.STOP, FinishReason.LENGTH)


def draw(prefix: int, seed: int, index: int, position: int, banned: tuple[int, ...]) -> int:
    key = extend(extend(extend(prefix, seed), index), position)
    allowed = [token for token in range(VOCAB) if token not in banned]
    return allowed[(key >> 7) % len(allowed)]


def prompt_scores(request: Request) -> list[TokenLogprobs | None]:
    hashes = prefix_hashes(request.prompt_token_ids, request.cache_salt)
    return [score(hashes[i], token) if i else None for i, token in enumerate(request.prompt_token_ids)]


def score(prefix: int, token: int) -> TokenLogprobs:
    return TokenLogprobs(token, -(prefix % 1009) / 7.0, 1 + prefix % 5)


@dataclass
class Choice:
    """What a client has of one choice, or should have."""

    tokens: list[int] = field(default_factory=list)
    finish: FinishReason | None = None
    stop_token: int | None = None


def lone_run(request: Request, index: int) -> Choice:
    params, prompt = request.sampling, request.prompt_token_ids
    hashes = prefix_hashes(prompt, request.cache_salt)
    got = Choice()
    prefix = hashes[-1]
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
    while len(got.tokens) < request.max_tokens:
        banned = tuple(sorted(stops)) if len(got.tokens) < params.min_tokens else ()
        token = draw(prefix, request.seed, index, len(prompt) + len(got.tokens), banned)
        got.tokens.append(token)
        prefix = extend(prefix, token)
        if token in stops:
            got.finish, got.stop_token = FinishReason.STOP, token
            return got
    got.finish = FinishReason.LENGTH
    return got


class ModelExecutor:
    """Runs steps on a SlotMemory and checks that every sequence reads its own past and writes only its own pages."""

    def __init__(self, scheduler: Scheduler, memory: SlotMemory) -> None:
        self.scheduler = scheduler
        self.memory = memory

    def execute(self, output: SchedulerOutput, budget: int) -> StepResult:
        assert 0 < output.num_tokens <= budget
        self.memory.copy(output.copies)
        running = self.scheduler._queues._running_ids
        written: dict[int, int] = {}
        for part in output.sequences:
            page_size = self.memory.page_size
            for page in set(
                part.page_table[part.start // page_size : (part.start + len(part.token_ids) - 1) // page_size + 1]
            ):
                assert page not in written, "two sequences write into one page"
                written[page] = part.seq_id
        for seq in running.values():
            for page in seq.page_table:
                assert written.get(page, seq.seq_id) == seq.seq_id, "a page is written while another sequence reads it"
        result = StepResult([], [], {})
        for part in output.sequences:
            self._run(part, running[part.seq_id].token_ids, running[part.seq_id].request, result)
        return result

    def _run(self, part: ScheduledSequence, known: array[int], request: Request, result: StepResult) -> None:
        end = part.start + len(part.token_ids)
        assert part.token_ids == known[part.start : end]
        hashes = prefix_hashes(known, request.cache_salt)
        self.memory.check(part.page_table, hashes, part.start)
        for position in range(part.start, end):
            self.memory.write(part.page_table, position, hashes[position + 1])
        assert bool(part.samples) == (end == len(known) and request.max_tokens > 0)
        for sample in part.samples:
            self._sample(sample, known, hashes[-1], result)
        if part.score is not None:
            assert part.score == known[part.start + 1 : part.start + 1 + len(part.score)]
            result.scores[part.seq_id] = [score(hashes[part.start + 1 + i], t) for i, t in enumerate(part.score)]

    def _sample(self, sample: Sample, known: array[int], prefix: int, result: StepResult) -> None:
        assert sample.position == len(known)
        assert sample.token_ids is None or sample.token_ids == known
        token = draw(prefix, sample.seed, sample.index, sample.position, sample.banned)
        result.token_ids.append(token)
        result.logprobs.append(score(prefix, token) if sample.params.logprobs is not None else None)


@dataclass(frozen=True)
class Plan:
    page_size: int
    num_pages: int
    budget: int
    max_num_seqs: int
    policy: str
    caching: bool
    requests: list[tuple[int, Request]]  # with the step of arrival
    aborts: list[tuple[int, int, int | None, bool]]  # step, request, choice, while the step runs
    failures: set[int]  # steps
    flushes: set[int]


documents = st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=30), min_size=1, max_size=3)


@st.composite
def requests(draw_from: st.DrawFn, name: str, texts: list[list[int]]) -> Request:
    text = draw_from(st.sampled_from(texts))
    cut = draw_from(st.integers(0, len(text)))
    prompt = text[:cut] + draw_from(st.lists(st.integers(0, VOCAB - 1), max_size=8))
    max_tokens = draw_from(st.sampled_from([0, 1, 2, 5, 12, 30]))
    params = SamplingParams(
        n=draw_from(st.sampled_from([1, 1, 2, 3])),
        max_tokens=max_tokens,
        min_tokens=min(max_tokens, draw_from(st.sampled_from([0, 0, 3]))),
        ignore_eos=draw_from(st.booleans()),
        stop_token_ids=draw_from(st.sampled_from([(), (), (3,)])),
        seed=draw_from(st.integers(0, 2)),
        presence_penalty=draw_from(st.sampled_from([0.0, 1.0])),
        logprobs=draw_from(st.sampled_from([None, 0])),
        prompt_logprobs=draw_from(st.sampled_from([None, None, None, 0])),
    )
    return Request(
        request_id=name,
        prompt_token_ids=prompt or [1],
        sampling=params,
        eos_token_ids=(EOS,),
        priority=draw_from(st.sampled_from([0, 0, 0, -1, 2, BACKGROUND_PRIORITY, BACKGROUND_PRIORITY])),
        cache_salt=draw_from(st.sampled_from(["", "", "", "x"])),
    )


@st.composite
def plans(draw_from: st.DrawFn) -> Plan:
    page_size = draw_from(st.sampled_from([1, 4, 16]))
    texts = draw_from(documents)
    count = draw_from(st.integers(1, 8))
    arrivals = [draw_from(st.sampled_from([0, 0, 0, 1, 2, 5, 9])) for _ in range(count)]
    tokens = draw_from(st.sampled_from([16, 32, 48, 64, 96, 160]))
    which = st.integers(0, count - 1)
    steps = st.integers(0, 12)
    return Plan(
        page_size=page_size,
        num_pages=tokens // page_size,
        budget=draw_from(st.sampled_from([1, 3, 7, 16, 64, 512])),
        max_num_seqs=draw_from(st.sampled_from([1, 2, 3, 8])),
        policy=draw_from(st.sampled_from(["fcfs", "lpm"])),
        caching=draw_from(st.sampled_from([True, True, True, False])),
        requests=[(step, draw_from(requests(f"r{i}", texts))) for i, step in enumerate(arrivals)],
        aborts=draw_from(st.lists(st.tuples(steps, which, st.sampled_from([None, 0, 1]), st.booleans()), max_size=4)),
        failures=draw_from(st.sets(steps, max_size=2)),
        flushes=draw_from(st.sets(steps, max_size=2)),
    )


class Session:
    """Drives one plan to its end."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        cache = self.make_cache(plan)
        self.scheduler = Scheduler(
            cache,
            policy=plan.policy,
            max_num_seqs=plan.max_num_seqs,
            max_num_batched_tokens=plan.budget,
            max_model_len=MAX_MODEL_LEN,
        )
        self.executor = self.make_executor(plan)
        self.got: dict[tuple[str, int], Choice] = {}
        self.prompt_logprobs: dict[str, list[TokenLogprobs | None]] = {}
        self.accepted: list[Request] = []

    def make_cache(self, plan: Plan) -> KVCacheManager:
        return KVCacheManager(plan.num_pages, plan.page_size, enable_prefix_caching=plan.caching)

    def make_executor(self, plan: Plan) -> ModelExecutor:
        return ModelExecutor(self.scheduler, SlotMemory(plan.num_pages, plan.page_size))

    def num_pages_needed(self, prompt: int, output: int, n: int) -> int:
        shared = prompt // self.plan.page_size
        lone = -(-(prompt + max(output, 1) - 1) // self.plan.page_size)
        return lone + (n - 1) * (lone - shared)

    def run(self) -> None:
        last_arrival = max(step for step, _ in self.plan.requests)
        # Beams that were preempted share no pages, so each may have to be computed anew for each token of its search.
        anew = sum(
            request.sampling.num_sequences * request.max_tokens * (len(request.prompt_token_ids) + request.max_tokens)
            for _, request in self.plan.requests
        )
        most, step = 3000 + anew // self.plan.budget, 0
        while step <= last_arrival or self.scheduler.has_work():
            assert step < most, "the scheduler makes no progress"
            for arrival, request in self.plan.requests:
                if arrival == step:
                    self.add(request)
            self.step(step)
            self.scheduler.check_integrity()
            step += 1

    def add(self, request: Request) -> None:
        prompt, output, n = len(request.prompt_token_ids), request.max_tokens, request.sampling.n
        fits = self.num_pages_needed(prompt, output, n) <= self.plan.num_pages and prompt + output <= MAX_MODEL_LEN
        try:
            self.scheduler.add(request)
        except ContextLengthError:
            assert not fits
        except InvalidRequestError:
            assert n > self.plan.max_num_seqs
        else:
            assert fits
            self.accepted.append(request)
            self.got.update({(request.request_id, i): Choice() for i in range(n)})

    def step(self, step: int) -> None:
        self.abort(step, while_running=False)
        if step in self.plan.flushes:
            self.scheduler.flush_cache()
        had_work = self.scheduler.has_work()
        output = self.scheduler.schedule()
        assert (output is not None) == had_work, "work is left undone, or made up"
        if output is None:
            return
        running = self.scheduler._queues.running
        assert sum(self.scheduler._starter._num_choices(seq) for seq in running) <= self.plan.max_num_seqs
        if step in self.plan.failures:
            self.executor.memory.scribble(output)
            self.abort(step, while_running=True)
            self.take(self.scheduler.fail(output, "boom"))
            return
        result = self.executor.execute(output, self.plan.budget)
        self.abort(step, while_running=True)
        self.take(self.scheduler.update(output, result))

    def abort(self, step: int, *, while_running: bool) -> None:
        for when, which, index, inside in self.plan.aborts:
            if when == step and inside == while_running:
                self.take(self.scheduler.abort([self.plan.requests[which][1].request_id], index))

    def take(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            choice = self.got[output.request_id, output.index]
            assert choice.finish is None, "an output after the end"
            choice.tokens += output.token_ids
            choice.finish, choice.stop_token = output.finish_reason, output.stop_token
            if output.prompt_logprobs is not None:
                assert output.request_id not in self.prompt_logprobs, "the prompt's scores came twice"
                self.prompt_logprobs[output.request_id] = output.prompt_logprobs
            assert (output.error is not None) == (output.finish_reason is FinishReason.ERROR)

    def check_outputs(self) -> None:
        for request in self.accepted:
            if request.sampling.prompt_logprobs is None:
                assert request.request_id not in self.prompt_logprobs
            elif any(self.got[request.request_id, i].finish in GOOD_ENDS for i in range(request.sampling.n)):
                assert self.prompt_logprobs[request.request_id] == prompt_scores(request)
            for index in range(request.sampling.n):
                got, alone = self.got[request.request_id, index], lone_run(request, index)
                if got.finish in GOOD_ENDS:
                    assert got == alone
                else:
                    assert got.finish is not None
                    assert got.tokens == alone.tokens[: len(got.tokens)]

    def check_memory(self) -> None:
        stats = self.scheduler.stats()
        assert stats.num_running == stats.num_waiting == 0
        assert stats.num_free_pages + stats.num_cached_pages == self.plan.num_pages
        assert self.scheduler.flush_cache() == stats.num_cached_pages
        assert self.scheduler.stats().num_free_pages == self.plan.num_pages
        self.scheduler.check_integrity()
        assert not self.scheduler._states


@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(plans())
def test_every_request_gets_what_it_would_get_alone(plan: Plan) -> None:
    session = Session(plan)
    session.run()
    session.check_outputs()
    session.check_memory()

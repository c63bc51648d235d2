"""Beam searches among other requests, against a dense search of each alone and a memory model.

Whatever is forked, shared, preempted, parked, chunked, aborted or found in the prefix cache, each search must find
exactly what it would find alone; the books of the KV memory are proved after each step.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Collection
from dataclasses import replace

from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st

from pinnate.core.batch import Sample, StepResult, TokenLogprobs
from pinnate.core.errors import ContextLengthError, InvalidRequestError
from pinnate.core.messages import TokenOutput
from pinnate.core.request import FinishReason, Request
from pinnate.core.sampling import SamplingParams
from pinnate.scheduler.scheduler import Scheduler
from tests.property import test_scheduler as plain
from tests.property.slot_memory import extend, prefix_hashes
from tests.property.test_scheduler import EOS, GOOD_ENDS, MAX_MODEL_LEN, VOCAB, Choice, ModelExecutor, Plan, Session

STOP_PAIR = (2, 5)  # the "stop string" of these tests: two tokens in a row


def distribution(prefix: int) -> list[tuple[int, float]]:
    """(token, log-probability) of every token, most likely first. Few distinct weights, so that ties are common."""
    weights = [1.0 + (extend(prefix, token) >> 11) % 5 for token in range(VOCAB)]
    total = math.log(sum(weights))
    return sorted(((t, math.log(w) - total) for t, w in enumerate(weights)), key=lambda pair: (-pair[1], pair[0]))


class PairScanner:
    """State 1: the text ends with the first token of STOP_PAIR."""

    def advance(self, state: int, token: int) -> int:
        if state == 1 and token == STOP_PAIR[1]:
            return -1
        return int(token == STOP_PAIR[0])


def lone_search(request: Request) -> list[tuple[float, list[int], FinishReason]]:
    """The complete hypotheses, best first: a search that looks at every continuation of every beam."""
    params, prompt = request.sampling, request.prompt_token_ids
    width = params.num_sequences
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
    beams: list[tuple[float, list[int]]] = [(0.0, [])]
    complete: list[tuple[float, list[int], FinishReason]] = []
    for length in range(1, request.max_tokens + 1):
        ranked = []
        for number, (total, tokens) in enumerate(beams):
            prefix = prefix_hashes([*prompt, *tokens], request.cache_salt)[-1]
            for rank, (token, logprob) in enumerate(distribution(prefix)):
                if token in stops and length <= params.min_tokens:
                    continue
                adjusted = logprob + params.logit_bias.get(token, 0.0)
                ranked.append((-(total + adjusted), number, -adjusted, rank, [*tokens, token]))
        ranked.sort()
        beams = []
        for place, (negative, _, _, _, tokens) in enumerate(ranked):
            after_min = tokens[params.min_tokens :]
            stopped = bool(after_min) and after_min[-1] in stops
            if params.stop:
                stopped = stopped or tuple(after_min[-2:]) == STOP_PAIR
            if stopped or length == request.max_tokens:
                if place < width:
                    reason = FinishReason.STOP if stopped else FinishReason.LENGTH
                    complete.append((-negative / length**params.length_penalty, tokens, reason))
            elif len(beams) < width:
                beams.append((-negative, tokens))
        complete.sort(key=lambda found: -found[0])
        del complete[width:]
        if not beams:
            break
        if len(complete) == width:
            reach = request.max_tokens if params.early_stopping == "never" and params.length_penalty > 0 else length
            improvable = beams[0][0] / reach**params.length_penalty > complete[-1][0]
            if params.early_stopping is True or not improvable:
                break
    return complete


class BeamExecutor(ModelExecutor):
    def _sample(self, sample: Sample, known: array[int], prefix: int, result: StepResult) -> None:
        if sample.num_top is None:
            super()._sample(sample, known, prefix, result)
            return
        assert sample.position == len(known)
        ranked = distribution(prefix)
        rank, logprob = next((i, p) for i, (t, p) in enumerate(ranked, 1) if t == sample.target)
        result.token_ids.append(sample.target)
        result.logprobs.append(TokenLogprobs(sample.target, logprob, rank, ranked[: sample.num_top]))


class BeamScheduler(Scheduler):
    """Counts what happened, so that the tests know that they test something."""

    seen: Counter[str]

    def branch(self, parent, index, *, runs=True):  # type: ignore[no-untyped-def]
        self.seen["forked" if runs else "forked without pages"] += (
            self._states[parent.request.request_id].beams is not None
        )
        return super().branch(parent, index, runs=runs)

    def _preempt(self, seq):  # type: ignore[no-untyped-def]
        beams = self._states[seq.request.request_id].beams
        if beams is not None:
            self.seen["parked" if beams.has_offered(seq) else "preempted"] += 1
        super()._preempt(seq)


def worst_pages(request: Request, page_size: int) -> int:
    prompt = len(request.prompt_token_ids)
    lone = -(-(prompt + max(request.max_tokens, 1) - 1) // page_size)
    return lone + (request.sampling.num_sequences - 1) * (lone - prompt // page_size)


class BeamSession(Session):
    """`squeezes`: (step, which of the running sequences) to preempt, as if others needed the memory."""

    def __init__(self, plan: Plan, squeezes: Collection[tuple[int, int]] = ()) -> None:
        super().__init__(plan)
        self.squeezes = squeezes
        self.scheduler = BeamScheduler(
            self.scheduler._cache,
            policy=plan.policy,
            max_num_seqs=plan.max_num_seqs,
            max_num_batched_tokens=plan.budget,
            max_model_len=MAX_MODEL_LEN,
            find_stops=lambda _params: PairScanner(),
        )
        self.scheduler.seen = self.seen = Counter()
        self.scheduler._admission.new_token_ratio = 0.0  # far too hopeful, so that memory runs out
        self.executor = BeamExecutor(self.scheduler, self.executor.memory)
        self.outputs: dict[tuple[str, int], TokenOutput] = {}

    def add(self, request: Request) -> None:
        width = request.sampling.num_sequences
        length = len(request.prompt_token_ids) + request.max_tokens
        fits = worst_pages(request, self.plan.page_size) <= self.plan.num_pages and length <= MAX_MODEL_LEN
        try:
            self.scheduler.add(request)
        except ContextLengthError:
            assert not fits
        except InvalidRequestError:
            assert width > self.plan.max_num_seqs
        else:
            assert fits
            self.accepted.append(request)
            self.got.update({(request.request_id, i): Choice() for i in range(request.sampling.n)})

    def step(self, step: int) -> None:
        for when, which in self.squeezes:
            if when == step and self.scheduler._queues.running:
                self.scheduler._preempt(self.scheduler._queues.running[which % len(self.scheduler._queues.running)])
                self.scheduler.check_integrity()
        super().step(step)

    def take(self, outputs: list[TokenOutput]) -> None:
        super().take(outputs)
        self.outputs.update({(output.request_id, output.index): output for output in outputs})

    def check_searches(self) -> None:
        for request in self.accepted:
            if not request.sampling.use_beam_search:
                continue
            found = lone_search(request)
            for index in range(request.sampling.n):
                self.check_choice(request, self.outputs[request.request_id, index], found)

    def check_choice(
        self, request: Request, output: TokenOutput, found: list[tuple[float, list[int], FinishReason]]
    ) -> None:
        if output.finish_reason not in GOOD_ENDS:
            assert output.token_ids == []
            return
        if output.index >= len(found):
            assert (output.token_ids, output.finish_reason) == ([], FinishReason.LENGTH)
            return
        score, tokens, reason = found[output.index]
        assert (output.score, output.token_ids, output.finish_reason) == (score, tokens, reason)
        if request.sampling.logprobs is None:
            assert output.logprobs is None
            return
        assert output.logprobs is not None
        hashes = prefix_hashes([*request.prompt_token_ids, *tokens], request.cache_salt)
        for place, entry in enumerate(output.logprobs):
            ranked = distribution(hashes[len(request.prompt_token_ids) + place])
            assert (entry.token_id, entry.logprob) == (tokens[place], dict(ranked)[tokens[place]])
            assert ranked[entry.rank - 1][0] == entry.token_id
            assert entry.top == ranked[: request.sampling.logprobs]

    def check_outputs(self) -> None:
        everything, self.accepted = self.accepted, [r for r in self.accepted if not r.sampling.use_beam_search]
        super().check_outputs()
        self.accepted = everything
        self.check_searches()


@st.composite
def beam_requests(draw_from: st.DrawFn, like: Request) -> Request:
    """A beam search on the prompt of another request."""
    max_tokens = max(1, like.max_tokens)
    width = draw_from(st.integers(1, 5))
    params = SamplingParams(
        n=draw_from(st.integers(1, width)),
        beam_width=width,
        use_beam_search=True,
        max_tokens=max_tokens,
        min_tokens=min(max_tokens, like.sampling.min_tokens),
        ignore_eos=like.sampling.ignore_eos,
        stop_token_ids=like.sampling.stop_token_ids,
        stop=draw_from(st.sampled_from([(), (), ("pair",)])),
        logit_bias=draw_from(st.sampled_from([{}, {}, {4: 1.5}, {4: -1.5, 1: 0.25}, {EOS: 100.0}])),
        length_penalty=draw_from(st.sampled_from([0.0, 1.0, 2.0, -1.0])),
        early_stopping=draw_from(st.sampled_from([False, True, "never"])),
        seed=0,
        logprobs=draw_from(st.sampled_from([None, 0, 2])),
        prompt_logprobs=like.sampling.prompt_logprobs,
    )
    return Request(
        request_id=like.request_id,
        prompt_token_ids=like.prompt_token_ids,
        sampling=params,
        eos_token_ids=like.eos_token_ids,
        priority=like.priority,
        cache_salt=like.cache_salt,
    )


@st.composite
def beam_plans(draw_from: st.DrawFn) -> Plan:
    """Plans of the plain test with at least one request in two made a beam search, mostly in a pool that the largest
    request fills alone."""
    plan = draw_from(plain.plans())
    requests = [
        (step, draw_from(beam_requests(request)) if number % 2 == 0 or draw_from(st.booleans()) else request)
        for number, (step, request) in enumerate(plan.requests)
    ]
    page_size = draw_from(st.sampled_from([1, 2, 4, 16]))
    num_pages = max(worst_pages(request, page_size) for _, request in requests) + draw_from(
        st.sampled_from([0, 0, 1, 40])
    )
    return replace(
        plan,
        requests=requests,
        page_size=page_size,
        num_pages=num_pages,
        max_num_seqs=draw_from(st.sampled_from([2, 5, 8])),
    )


@st.composite
def tight_plans(draw_from: st.DrawFn) -> Plan:
    """Long searches that start together in a pool that the largest of them fills alone: beams are preempted and parked
    while others wait for them."""
    count = draw_from(st.integers(2, 5))
    start = draw_from(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12))
    requests = []
    for number in range(count):
        width = draw_from(st.integers(1, 5))
        beams = number == 0 or draw_from(st.booleans())
        params = SamplingParams(
            n=width,
            use_beam_search=beams,
            max_tokens=draw_from(st.integers(4, 24)),
            ignore_eos=draw_from(st.sampled_from([True, True, False])),
            seed=number,
            logprobs=0,
        )
        prompt = start + draw_from(st.lists(st.integers(0, VOCAB - 1), max_size=6))
        arrival = draw_from(st.sampled_from([0, 0, 1, 4]))
        requests.append(
            (arrival, Request(request_id=f"r{number}", prompt_token_ids=prompt, sampling=params, eos_token_ids=(EOS,)))
        )
    page_size = draw_from(st.sampled_from([1, 2, 4]))
    return Plan(
        page_size=page_size,
        num_pages=max(worst_pages(request, page_size) for _, request in requests) + draw_from(st.integers(0, 2)),
        budget=draw_from(st.sampled_from([1, 2, 3, 16, 64])),
        max_num_seqs=draw_from(st.sampled_from([5, 6, 8, 16])),
        policy=draw_from(st.sampled_from(["fcfs", "lpm"])),
        caching=draw_from(st.booleans()),
        requests=requests,
        aborts=draw_from(
            st.lists(
                st.tuples(st.integers(0, 30), st.integers(0, count - 1), st.sampled_from([None, 0, 1]), st.booleans()),
                max_size=2,
            )
        ),
        failures=draw_from(st.sets(st.integers(5, 60), max_size=1)),
        flushes=draw_from(st.sets(st.integers(0, 40), max_size=2)),
    )


def check(plan: Plan, squeezes: Collection[tuple[int, int]] = ()) -> None:
    session = BeamSession(plan, squeezes)
    session.run()
    for name in session.seen:
        event(name)
    session.check_outputs()
    session.check_memory()


SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


@settings(max_examples=300, deadline=None, suppress_health_check=SLOW)
@given(beam_plans())
def test_every_search_finds_what_it_would_find_alone(plan: Plan) -> None:
    check(plan)


def slow_plan() -> Plan:
    """Five beams that have lost what they shared do not fit together: each computes its prompt again for each token,
    one token a step."""
    start = [0, 0, 5] + [0] * 9
    searched = SamplingParams(n=5, use_beam_search=True, max_tokens=23, ignore_eos=True, seed=0, logprobs=0)
    plain_params = SamplingParams(n=1, max_tokens=4, ignore_eos=True, seed=1, logprobs=0)
    requests = [
        (
            1,
            Request(request_id="r0", prompt_token_ids=[*start, 0, 0, 0, 1, 0], sampling=searched, eos_token_ids=(EOS,)),
        ),
        (1, Request(request_id="r1", prompt_token_ids=start, sampling=plain_params, eos_token_ids=(EOS,))),
        (0, Request(request_id="r2", prompt_token_ids=start, sampling=plain_params, eos_token_ids=(EOS,))),
    ]
    return Plan(
        page_size=1,
        num_pages=127,
        budget=1,
        max_num_seqs=5,
        policy="fcfs",
        caching=False,
        requests=requests,
        aborts=[],
        failures=set(),
        flushes=set(),
    )


@settings(max_examples=150, deadline=None, suppress_health_check=SLOW)
@example(slow_plan(), [(33, 0)])
@given(tight_plans(), st.lists(st.tuples(st.integers(1, 60), st.integers(0, 8)), min_size=1, max_size=40))
def test_when_memory_runs_out_too(plan: Plan, squeezes: list[tuple[int, int]]) -> None:
    check(plan, squeezes)

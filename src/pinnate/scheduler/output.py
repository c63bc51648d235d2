"""The two ends of a step: from sequences to the SchedulerOutput, and from a token to whether its sequence ends.

Knows: sampling positions, scores of the prompt, stop conditions. Must not know: pages, queues, other requests.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from time import perf_counter

import msgspec

from pinnate.core.batch import Sample, ScheduledSequence, SchedulerOutput, StepResult, TokenLogprobs
from pinnate.core.messages import RequestTiming, TokenOutput
from pinnate.core.request import FinishReason, Sequence
from pinnate.scheduler.state import RequestState


class StepDraft:
    """A step while it is put together: what is in it, and the token budget that is left."""

    __slots__ = ("_parts", "budget", "num_preempted", "scheduled")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.num_preempted = 0
        self.scheduled: set[int] = set()  # seq_ids
        self._parts: list[ScheduledSequence] = []

    def add(self, seq: Sequence, state: RequestState, num_tokens: int) -> None:
        """The next `num_tokens` known tokens of `seq`; draws from the logits of the last one if no more are known."""
        start = seq.num_computed_tokens
        end = start + num_tokens
        tokens = seq.token_ids[start:end]
        score: array[int] | None = None
        score_top = 0
        score_ids: tuple[int, ...] = ()
        samples: tuple[Sample, ...] = ()
        if end == len(seq.token_ids):
            samples = _samples(seq, state)
        if state.scores_needed and end > len(state.prompt_scores):  # not again what was scored before a preemption
            score = seq.token_ids[start + 1 : min(end + 1, seq.num_prompt_tokens)]
            score_top = state.request.sampling.prompt_logprobs or 0
            score_ids = state.request.sampling.logprob_token_ids
        pages, windows = seq.page_table, seq.window_tables
        self._parts.append(
            ScheduledSequence(seq.seq_id, start, tokens, pages, samples, score, score_top, windows, score_ids)
        )
        self.scheduled.add(seq.seq_id)
        self.budget -= num_tokens

    @property
    def is_empty(self) -> bool:
        return not self._parts

    def finish(self, copies: tuple[tuple[int, int], ...]) -> SchedulerOutput | None:
        return SchedulerOutput(tuple(self._parts), copies) if self._parts else None


def _samples(seq: Sequence, state: RequestState) -> tuple[Sample, ...]:
    request = seq.request
    params = request.sampling
    num_prompt = len(request.prompt_token_ids)
    position = len(seq.token_ids)
    if params.max_tokens == 0:
        return ()
    if state.beams is not None:
        return state.beams.samples(seq)
    history = seq.token_ids if params.needs_history else None
    banned = tuple(sorted(state.stop_tokens)) if position - num_prompt < params.min_tokens else ()
    if state.bad_words is not None:
        banned = (*banned, *state.bad_words.banned_next(seq.token_ids, num_prompt))
    if params.structured_output is not None and params.ignore_eos:
        banned += request.eos_token_ids  # a language allows EOS where it may end; here it goes on if it can
    indices = state.unforked or (seq.index,)
    samples = [
        Sample(params, request.seed, i, position, history, num_prompt, banned, matcher=seq.matcher) for i in indices
    ]
    reports = [
        Sample(params, request.seed, seq.index, position, target=token, num_top=0) for token in params.logprob_token_ids
    ]
    return (*samples, *reports)


def drawn_tokens(
    part: ScheduledSequence, result: StepResult, first: int
) -> Iterator[tuple[int, int, TokenLogprobs | None]]:
    """Choice, token and its log-probabilities of each draw of `part`, whose samples begin at `first` in `result`."""
    draws = [i for i, sample in enumerate(part.samples, first) if sample.target < 0]
    others = result.logprobs[first + len(draws) : first + len(part.samples)]
    chosen = [(entry.token_id, entry.logprob) for entry in others if entry is not None]
    for i in draws:
        logprob = result.logprobs[i]
        if chosen and logprob is not None:
            logprob = msgspec.structs.replace(logprob, chosen=chosen)
        yield part.samples[i - first].index, result.token_ids[i], logprob


def extend(seq: Sequence, state: RequestState, token: int, max_model_len: int) -> tuple[list[int], FinishReason | None]:
    """Appends a drawn token and those that the sequence's language forces after it; returns them, and the end if it
    came.

    The forced ones have not been computed: they are computed together, as a chunk of a prompt is. Each would be drawn
    all the same (`fill` allows no other), so that is all the difference; where log-probabilities are asked for, or
    words are banned, they are drawn.

    Raises:
        GrammarError: the language cannot be followed.
    """
    matcher = seq.matcher
    if matcher is None:
        seq.token_ids.append(token)
        return [token], check_stop(seq, state, max_model_len)
    may_force = state.request.sampling.logprobs is None and state.bad_words is None
    added, forced = [], [token]
    while forced:
        for following in forced:
            seq.token_ids.append(following)
            added.append(following)
            reason = check_stop(seq, state, max_model_len)
            if reason is FinishReason.STOP:
                return added, reason
            matcher.advance(following)
            if matcher.is_terminated:
                return added, FinishReason.STOP
            if reason is not None:
                return added, reason
        forced = matcher.forced() if may_force else []
    return added, None


def check_stop(seq: Sequence, state: RequestState, max_model_len: int) -> FinishReason | None:
    """Whether the newest token ends the sequence; notes the token that did."""
    token = seq.token_ids[-1]
    num_tokens = len(seq.token_ids)
    num_output = num_tokens - len(seq.request.prompt_token_ids)
    if token in state.stop_tokens and num_output > seq.request.sampling.min_tokens:
        seq.stop_token = token
        return FinishReason.STOP
    if num_output >= seq.request.max_tokens or num_tokens >= max_model_len:
        return FinishReason.LENGTH
    return None


def token_output(
    seq: Sequence, state: RequestState, token_ids: list[int], logprob: TokenLogprobs | None = None
) -> TokenOutput:
    """What the sequence's choice got: new tokens, and its end if it came. The first one carries the prompt's scores."""
    report, state.cache_report = state.cache_report, None
    return TokenOutput(
        seq.request.request_id,
        seq.index,
        token_ids,
        None if logprob is None else [logprob],
        seq.finish_reason,
        seq.stop_token,
        seq.num_cached_tokens,
        take_prompt_logprobs(state),
        cache_report=report,
        timing=None if state.started is None else take_timing(state),
    )


def take_timing(state: RequestState, *, whole: bool = False) -> RequestTiming | None:
    """How long the request waited, and computed until its first token, once. `whole`: all its tokens come now."""
    started, state.started = state.started, None
    if started is None:
        return None
    return RequestTiming(started - state.arrived, None if whole else perf_counter() - started)


def take_prompt_logprobs(state: RequestState) -> list[TokenLogprobs | None] | None:
    """The prompt's scores if they are complete, once."""
    if state.request.sampling.prompt_logprobs is None or state.scores_sent or state.scores_needed:
        return None
    state.scores_sent = True
    return [None, *state.prompt_scores]


def ending_output(
    seq: Sequence, index: int, reason: FinishReason, error: str | None = None, *, is_refusal: bool = False
) -> TokenOutput:
    """The end of a choice that comes without a token."""
    return TokenOutput(
        seq.request.request_id,
        index,
        [],
        finish_reason=reason,
        num_cached_tokens=seq.num_cached_tokens if index == seq.index else 0,
        error=error,
        is_refusal=is_refusal,
    )

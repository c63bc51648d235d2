"""The Scheduler: continuous batching.

There is no batch that starts and ends together. Every step is put together anew from whatever is at hand:

    schedule()  1. every running sequence that has one token left to compute gets it: it decodes;
                2. prompts that have begun get their next chunk;
                3. waiting sequences start, as long as tokens, sequences and pages are left.
    (the executor runs the step)
    update()    each sequence has computed what was scheduled; where its last known token was among it, it gets
                a new one; it may end, and its place is free for the next step.

One token budget bounds a step, so a long prompt is cut into chunks; while others decode the chunks are small, so that
their next tokens come in time.
Decoding and prompt processing are the same thing: a sequence has known tokens, of which the first
`num_computed_tokens` are computed. Pages are taken step by step. When they run out even after eviction, the
last running sequence (lowest priority, latest arrival: it has the least to lose and the first never yields) is
preempted: it gives its pages to the prefix cache and waits at the front to compute what is lost of them again.

Background requests (batches) take what live ones leave: they come last in a step, with few tokens beside live ones, and
give up their places and pages to a live request that finds none.

Its parts: which waiting sequences start (starting.py), whether there is memory for one (admission.py), the order of the
queue (policy.py), how much of a prompt goes beside decoding (pace.py), what a step asks of a sequence and whether a
token ends it (output.py), beams (beams.py).

Knows: who runs, who waits, and why. Must not know: what a page contains, how a token is computed, text.
"""

from __future__ import annotations

from collections.abc import Iterable

from pinnate.core.batch import SchedulerOutput, StepResult, TokenLogprobs
from pinnate.core.errors import GrammarError, InvalidRequestError, QueueFullError
from pinnate.core.messages import EngineStats, TokenOutput
from pinnate.core.request import FinishReason, Request, RequestStatus, Sequence
from pinnate.core.structured import Matcher
from pinnate.kvcache.explain import MatchExplainer
from pinnate.kvcache.manager import KVCacheManager
from pinnate.scheduler.admission import AdmissionControl, Limits
from pinnate.scheduler.allowed_tokens import only_allowed
from pinnate.scheduler.beams import BeamGroup
from pinnate.scheduler.output import (
    StepDraft,
    drawn_tokens,
    ending_output,
    extend,
    take_prompt_logprobs,
    take_timing,
    token_output,
)
from pinnate.scheduler.pace import Pace
from pinnate.scheduler.policy import BACKGROUND_TOKENS_BESIDE_LIVE, POLICIES
from pinnate.scheduler.queues import Queues, split_background
from pinnate.scheduler.starting import Starter
from pinnate.scheduler.state import COUNTERS, RequestState, StopFinder


class Scheduler:
    """Owns all requests and sequences of one engine. Not thread-safe: one loop calls schedule, then update (or fail).

    Between schedule() and update() only add() and abort() may be called.
    """

    def __init__(
        self,
        cache: KVCacheManager,
        *,
        policy: str = "fcfs",
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        max_num_queued_reqs: int = 1024,
        explainer: MatchExplainer | None = None,
        find_stops: StopFinder | None = None,
    ) -> None:
        """`explainer` makes the cache reports that requests ask for; without it they get none."""
        self._cache = cache
        self._find_stops = find_stops
        self._limits = Limits(max_num_seqs, max_num_batched_tokens, max_model_len, max_num_queued_reqs)
        self._admission = AdmissionControl(cache, self._limits)
        self._states: dict[str, RequestState] = {}  # every live request
        self._queues = Queues()
        self._pace = Pace()
        self._step_underway = False
        self._num_requests = 0
        self._num_sequences = 0
        self._totals = dict.fromkeys(COUNTERS, 0)
        self._starter = Starter(
            cache, POLICIES[policy], self._admission, self._queues, self._states, self._totals, explainer, self._preempt
        )

    # ------------------------------------------------------------------ requests come and go

    def add(self, request: Request, matcher: Matcher | None = None) -> None:
        """Queues a request. `matcher` is at the start of its structured output's language, owned from here on.

        Raises:
            ContextLengthError: it can never fit the context or the KV memory.
            QueueFullError: max_num_queued_reqs requests wait already.
            InvalidRequestError: empty prompt, n above max_num_seqs, or an id that is in use.
        """
        if request.request_id in self._states:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use", param="request_id")
        self._admission.refuse_impossible(request)
        waiting = self._queues.num_live_waiting
        if not request.is_background and waiting >= self._limits.max_num_queued_reqs:
            raise QueueFullError(f"{waiting} requests are waiting already; try again later")
        self._num_requests += 1
        state = RequestState.of(request, self._num_requests, self._find_stops)
        self._states[request.request_id] = state
        seq = self._new_sequence(state, 0)
        seq.token_ids.extend(request.prompt_token_ids)
        seq.matcher = only_allowed(matcher, request.sampling.allowed_token_ids)
        if state.beams is not None:
            state.beams.sequences = [seq]
        self._queues.wait(seq)

    def abort(self, request_ids: Iterable[str], index: int | None = None) -> list[TokenOutput]:
        """Ends requests, or one choice of each, wherever they are. Unknown ids and ended choices are ignored."""
        outputs = []
        for request_id in request_ids:
            state = self._states.get(request_id)
            if state is not None:
                outputs += self._end_choices(state, index, FinishReason.ABORT)
        return outputs

    def take_started(self) -> list[str]:
        """Requests whose wait has ended since the last call: they have been scheduled for the first time."""
        return self._starter.take_started()

    def has_work(self) -> bool:
        return bool(self._queues.running or self._queues.waiting)

    # ------------------------------------------------------------------ the next step

    def schedule(self) -> SchedulerOutput | None:
        """Chooses what the next step computes. None: nothing to do."""
        self._cache.tiers.poll()
        step = StepDraft(self._limits.max_num_batched_tokens)
        live, background = split_background(self._queues.running)
        self._advance(step, live)
        if background:
            self._admit(step, live_only=True)
            if not step.is_empty:
                step.budget = min(step.budget, BACKGROUND_TOKENS_BESIDE_LIVE)
            self._advance(step, background)
        if step.is_empty:  # all that run are beams that wait for a sibling: they must not keep its place from it
            for seq in list(self._queues.running):
                self._run_short(seq)
        if step.is_empty or not step.num_preempted:  # whoever was preempted has the first claim on what becomes free
            self._admit(step)
            self._admission.on_smooth_step()
        output = step.finish(self._cache.take_copies())
        self._step_underway = output is not None
        return output

    def _advance(self, step: StepDraft, sequences: list[Sequence]) -> None:
        """Continues running sequences: those that decode, then prompts."""
        decoding: list[Sequence] = []
        in_prompt: list[Sequence] = []
        for seq in sequences:
            one_left = len(seq.token_ids) - seq.num_computed_tokens == 1
            (decoding if one_left else in_prompt).append(seq)
        for seq in decoding:
            self._continue(step, seq)
        if decoding:
            step.budget = min(step.budget, self._pace.prompt_tokens)
        for seq in in_prompt:
            self._continue(step, seq)

    def _continue(self, step: StepDraft, seq: Sequence) -> None:
        """Schedules the next tokens of a running sequence, at the cost of later ones if pages run out."""
        num_tokens = min(step.budget, len(seq.token_ids) - seq.num_computed_tokens)
        if num_tokens == 0 or seq.status is not RequestStatus.RUNNING:
            return
        while not self._cache.allocate(seq, num_tokens):
            victim = next(s for s in reversed(self._queues.running) if s.seq_id not in step.scheduled)
            self._run_short(victim)
            step.num_preempted += 1
            if victim is seq:
                return
        step.add(seq, self._states[seq.request.request_id], num_tokens)

    def _run_short(self, seq: Sequence) -> None:
        """Preempts for lack of pages: less was expected of the running ones than they take."""
        self._preempt(seq)
        if seq.status is RequestStatus.PREEMPTED:
            self._admission.on_preemption()

    def _preempt(self, seq: Sequence) -> None:
        self._queues.stop(seq)
        self._cache.tiers.preempt(seq)
        self._cache.release(seq)
        seq.num_computed_tokens = 0
        seq.num_preemptions += 1
        self._totals["preemptions"] += 1
        beams = self._states[seq.request.request_id].beams
        if beams is not None and beams.has_offered(seq):
            seq.status = RequestStatus.PARKED
        else:
            self.wait_again(seq)

    def _admit(self, step: StepDraft, *, live_only: bool = False) -> None:
        """Starts waiting sequences in the policy's order, up to the first for which there is no room (starting.py)."""
        for seq in self._starter.start(step, live_only=live_only):
            self._continue(step, seq)

    # ------------------------------------------------------------------ its results

    def note_seconds(self, output: SchedulerOutput, seconds: float) -> None:
        """How long the executor took for the step. Sizes of later steps depend on it, nothing that is drawn does."""
        lengths = [len(part.token_ids) for part in output.sequences]
        num_decoding = lengths.count(1)
        self._pace.note(num_decoding, sum(lengths) - num_decoding, seconds)

    def update(self, output: SchedulerOutput, result: StepResult) -> list[TokenOutput]:
        """Takes in the results of the step that schedule() returned; returns what each choice got."""
        self._end_step()
        outputs: list[TokenOutput] = []
        drawn = 0
        for part in output.sequences:
            first, drawn = drawn, drawn + len(part.samples)
            seq = self._queues.find_running(part.seq_id)
            if seq is None:
                continue  # aborted while the step ran
            state = self._states[seq.request.request_id]
            seq.num_computed_tokens = part.start + len(part.token_ids)
            if part.score is not None:
                state.prompt_scores[part.start :] = result.scores[part.seq_id]
            # Chunks enter the tree at once, for others may wait for them; decoded tokens page by page: that is cheaper.
            if len(part.token_ids) > 1 or seq.num_computed_tokens % self._cache.page_size == 0:
                self._cache.commit(seq)
            if not part.samples:
                if seq.num_computed_tokens == len(seq.token_ids):  # max_tokens is 0
                    outputs += self._end_scoring(seq, state)
                continue
            if state.beams is not None:
                if state.beams.offer(seq, result.logprobs[first:drawn]):
                    outputs += self._advance_beams(state, state.beams)
                continue
            choices = self._fork(seq, state) if state.unforked else {seq.index: seq}
            for index, token, logprob in drawn_tokens(part, result, first):
                if index in choices:
                    outputs.append(self._append(choices[index], state, token, logprob))
        return outputs

    def fail(self, output: SchedulerOutput, message: str) -> list[TokenOutput]:
        """The step went wrong: its requests end with an error, the others go on."""
        outputs: list[TokenOutput] = []
        for part in output.sequences:
            seq = self._queues.find_running(part.seq_id)
            if seq is not None:
                state = self._states[seq.request.request_id]
                outputs += self._end_choices(state, None, FinishReason.ERROR, message)
        self._end_step()
        return outputs

    def _append(self, seq: Sequence, state: RequestState, token: int, logprob: TokenLogprobs | None) -> TokenOutput:
        try:
            tokens, reason = extend(seq, state, token, self._limits.max_model_len)
        except GrammarError as error:
            self._end(seq, state, FinishReason.ERROR)
            return ending_output(seq, seq.index, FinishReason.ERROR, str(error), is_refusal=True)
        self._totals["generation_tokens"] += len(tokens)
        self._totals["forced_tokens"] += len(tokens) - 1
        if reason is not None:
            self._end(seq, state, reason)
        return token_output(seq, state, tokens, logprob)

    def _fork(self, leader: Sequence, state: RequestState) -> dict[int, Sequence]:
        """The prompt is computed: from here on each choice has a sequence of its own, all on the same pages."""
        choices = {leader.index: leader} | {index: self.branch(leader, index) for index in state.unforked[1:]}
        state.unforked = []
        return choices

    def _advance_beams(self, state: RequestState, beams: BeamGroup) -> list[TokenOutput]:
        """A step of a beam search, all of whose candidates are known."""
        state.unforked = []
        beams.count_pages(self._totals)
        beams.advance(self)
        if not beams.search.is_done:
            return []
        scores, timing = take_prompt_logprobs(state), take_timing(state, whole=True)
        outputs = beams.results(state.num_cached_tokens, scores, state.cache_report, timing)
        self._totals["generation_tokens"] += sum(len(output.token_ids) for output in outputs)
        for seq in list(state.sequences):
            self._end(seq, state, FinishReason.STOP)
        return outputs

    # ------------------------------------------------------------------ what choices and beams ask for (beams.Brood)

    def branch(self, parent: Sequence, index: int, *, runs: bool = True) -> Sequence:
        """A sequence of the same tokens; on the parent's pages if it runs, else parked."""
        child = self._new_sequence(self._states[parent.request.request_id], index)
        child.token_ids.extend(parent.token_ids)
        child.matcher = None if parent.matcher is None else parent.matcher.clone()
        child.status = RequestStatus.PARKED
        if runs:
            child.num_computed_tokens = parent.num_computed_tokens
            self._cache.fork(parent, child)
            self._queues.start(child)
        return child

    def wait_again(self, seq: Sequence) -> None:
        """Puts a sequence without pages in front of the queue, to compute again what the prefix cache loses of it."""
        seq.status = RequestStatus.PREEMPTED
        self._queues.wait(seq)

    def drop(self, seq: Sequence) -> None:
        """Ends a beam that nothing continues; only its whole pages stay cached."""
        self._end(seq, self._states[seq.request.request_id], FinishReason.STOP, keep=False)

    # ------------------------------------------------------------------ ends

    def _end_scoring(self, seq: Sequence, state: RequestState) -> list[TokenOutput]:
        others = state.unforked[1:]
        self._end(seq, state, FinishReason.LENGTH)
        first = token_output(seq, state, [])
        return [first, *(ending_output(seq, index, FinishReason.LENGTH) for index in others)]

    def _end_choices(
        self, state: RequestState, index: int | None, reason: FinishReason, error: str | None = None
    ) -> list[TokenOutput]:
        """Ends all choices, or the one given. Before the fork one sequence stands for several choices: it ends with the
        last of them."""
        outputs = []
        if state.beams is not None:
            first, ended = state.beams.sequences[0], state.beams.take_choices(index)
            for seq in () if state.beams.choices else list(state.sequences):
                self._end(seq, state, reason)
            return [ending_output(first, i, reason, error) for i in ended]
        for seq in list(state.sequences):
            standing_for = state.unforked or [seq.index]
            ended = [i for i in standing_for if index is None or i == index]
            outputs += [ending_output(seq, i, reason, error) for i in ended]
            if len(ended) == len(standing_for):
                self._end(seq, state, reason)
            elif ended:
                state.unforked = [i for i in standing_for if i not in ended]
                seq.index = state.unforked[0]
        return outputs

    def _end(self, seq: Sequence, state: RequestState, reason: FinishReason, *, keep: bool = True) -> None:
        """Takes place and pages back, wherever the sequence is. `keep`: what it computed stays in the prefix cache."""
        if seq.status is RequestStatus.RUNNING:
            self._queues.stop(seq)
            # While a step is under way its copies may not have run: what is not in the tree yet is forgotten.
            self._cache.release(seq, keep=keep and not self._step_underway)
        elif seq.status is not RequestStatus.PARKED:
            self._queues.leave(seq)
            self._cache.tiers.forget(seq)
        seq.status = RequestStatus.FINISHED
        seq.finish_reason = reason
        state.sequences.remove(seq)
        if not state.sequences:
            del self._states[state.request.request_id]

    def _end_step(self) -> None:
        self._step_underway = False
        self._cache.end_step()
        self._totals["steps"] += 1

    # ------------------------------------------------------------------ books

    def _new_sequence(self, state: RequestState, index: int) -> Sequence:
        self._num_sequences += 1
        seq = Sequence(self._num_sequences, state.request, index, state.number)
        state.sequences.append(seq)
        return seq

    def num_free_seqs(self) -> int:
        return self._starter.num_free_seqs

    def flush_cache(self) -> int:
        """Drops every cached page that no sequence uses, from tiers too; returns how many of the pool."""
        return self._cache.tiers.flush(self._cache.flush)

    def check_integrity(self) -> None:
        """Raises IntegrityError if the KV memory's books do not balance."""
        self._cache.check_integrity()

    def stats(self) -> EngineStats:
        """The gauges and counters that the scheduler and the cache know; the others have their defaults."""
        return EngineStats(
            num_running=len(self._queues.running),
            num_waiting=len(self._queues.waiting),
            num_pages=self._cache.num_pages,
            num_free_pages=self._cache.num_free_pages,
            num_cached_pages=self._cache.num_cached_pages,
            evicted_pages=self._cache.evicted_pages,
            new_token_ratio=self._admission.new_token_ratio,
            **self._totals,
            **self._cache.tiers.stats(),
        )

"""Starter: which waiting sequences start now.

Knows: the waiting queue and its order, places, what admission expects of memory, what the prefix cache has of a prompt.
Must not know: what a step computes of a sequence once it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from time import perf_counter

from pinnate.core.request import Sequence
from pinnate.kvcache.explain import MatchExplainer, complete_report
from pinnate.kvcache.manager import KVCacheManager
from pinnate.kvcache.radix_cache import PrefixMatch
from pinnate.scheduler.admission import AdmissionControl, prefix_is_underway
from pinnate.scheduler.output import StepDraft
from pinnate.scheduler.policy import QUEUE_WINDOW, Policy
from pinnate.scheduler.queues import Queues, split_background
from pinnate.scheduler.state import RequestState


class Starter:
    """A part of the Scheduler, whose queues, states and totals it uses and changes."""

    def __init__(
        self,
        cache: KVCacheManager,
        policy: Policy,
        admission: AdmissionControl,
        queues: Queues,
        states: Mapping[str, RequestState],
        totals: dict[str, int],
        explainer: MatchExplainer | None,
        preempt: Callable[[Sequence], None],
    ) -> None:
        """`preempt` takes a running sequence's place and pages away."""
        self._cache = cache
        self._policy = policy
        self._admission = admission
        self._queues = queues
        self._states = states
        self._totals = totals
        self._explainer = explainer
        self._preempt = preempt
        self._started: list[str] = []

    @property
    def num_free_seqs(self) -> int:
        return self._admission.max_num_seqs - sum(self._num_choices(seq) for seq in self._queues.running)

    def take_started(self) -> list[str]:
        """Requests of which a sequence has started for the first time since the last call."""
        started, self._started = self._started, []
        return started

    def start(self, step: StepDraft, *, live_only: bool) -> Iterator[Sequence]:
        """Waiting sequences that have just begun to run, in the policy's order, up to the first for which there is no
        room. Each is to be scheduled before the next one is asked for.

        One whose prefix a running sequence is just computing, or whose pages come from a tier, waits for that and lets
        others pass. `live_only`: running background sequences, of which none is in the step yet, make room.
        """
        if not self._queues.waiting or not step.budget:
            return
        live, _ = split_background(self._queues.running)
        holders = live if live_only else self._queues.running
        reserved = sum(self._admission.demand(seq, self._num_choices(seq)) for seq in holders)
        free_seqs = self.num_free_seqs
        for seq in list(islice(self._policy(self._queues.waiting, self), QUEUE_WINDOW)):
            state = self._states[seq.request.request_id]
            if not step.budget or (seq.request.is_background if live_only else state.num_choices > free_seqs):
                return
            match = self._match(seq)
            # A live request does not wait for background work, which may stand still for it.
            peers = self._queues.running if seq.request.is_background else live
            if self._is_underway(seq, match, peers):
                continue
            while not self._has_room(seq, match, free_seqs, reserved):
                if not (live_only and self._queues.running and self._queues.running[-1].request.is_background):
                    return
                free_seqs += self._num_choices(self._queues.running[-1])
                self._preempt(self._queues.running[-1])
                match = self._match(seq)  # the tree has changed
            if not self._cache.tiers.fetch(seq, match, state.match_limit(seq)):
                self._begin(seq, state, match)
                yield seq
            free_seqs -= state.num_choices
            reserved += self._admission.demand(seq, state.num_choices)

    def _match(self, seq: Sequence) -> PrefixMatch:
        return self._cache.match(seq, self._states[seq.request.request_id].match_limit(seq))

    def _is_underway(self, seq: Sequence, match: PrefixMatch, peers: list[Sequence]) -> bool:
        limit = self._states[seq.request.request_id].match_limit(seq)
        return self._cache.enable_prefix_caching and prefix_is_underway(
            seq, limit, match, peers, worth=self._cache.page_size
        )

    def _has_room(self, seq: Sequence, match: PrefixMatch, free_seqs: int, reserved: int) -> bool:
        num_choices = self._num_choices(seq)
        if num_choices > free_seqs:
            return False
        # If nothing holds pages, the first one starts: it was refused at the door unless it fits alone.
        is_alone = not self._queues.running and not self._cache.tiers.is_loading
        return is_alone or self._admission.has_room(seq, num_choices, match, reserved)

    def _begin(self, seq: Sequence, state: RequestState, match: PrefixMatch) -> None:
        for earlier in self._queues.leave(seq):
            self._states[earlier.request.request_id].overtaken += 1
        if seq.request.cache_report and not state.admitted and self._explainer is not None:
            state.cache_report = self._explainer.explain(
                seq.token_ids, seq.request.namespace, match, state.match_limit(seq)
            )
        seq.num_computed_tokens = self._cache.adopt(seq, match)
        from_tier = self._cache.tiers.started(seq)
        if not state.admitted:
            state.admitted, state.started = True, perf_counter()
            self._started.append(seq.request.request_id)
            state.cache_report = complete_report(state.cache_report, seq.num_computed_tokens, from_tier)
            seq.num_cached_tokens = state.num_cached_tokens = seq.num_computed_tokens
            self._count_prompt(seq, state)
        self._queues.start(seq)

    def _count_prompt(self, seq: Sequence, state: RequestState) -> None:
        self._totals["prompt_tokens"] += seq.num_prompt_tokens
        if self._cache.enable_prefix_caching and (state.prompt_scores or not state.scores_needed):
            self._totals["prefix_cache_queries"] += seq.num_prompt_tokens
        self._totals["prefix_cache_hits"] += seq.num_cached_tokens

    def _num_choices(self, seq: Sequence) -> int:
        return self._states[seq.request.request_id].num_choices

    # ------------------------------------------------------------------ QueueFacts, for policies

    def cached_tokens(self, seq: Sequence) -> int:
        """How many tokens of a waiting sequence are cached."""
        return self._match(seq).num_tokens

    def times_overtaken(self, seq: Sequence) -> int:
        """How many later sequences started before this waiting one."""
        return self._states[seq.request.request_id].overtaken

"""RequestState: what the scheduler remembers about one request while it lives.

Knows: the request's choices, their sequences, its scored prompt. Must not know: pages, other requests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

from pinnate.core.batch import TokenLogprobs
from pinnate.core.messages import CacheReport
from pinnate.core.request import Request, Sequence
from pinnate.core.sampling import SamplingParams
from pinnate.scheduler.bad_words import BadWords
from pinnate.scheduler.beam_search import StopScanner
from pinnate.scheduler.beams import BeamGroup

StopFinder = Callable[[SamplingParams], StopScanner]

# Fields of EngineStats that the scheduler counts.
COUNTERS = (
    *("steps", "prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits", "preemptions"),
    "forced_tokens",
    *BeamGroup.COUNTERS,
)


@dataclass(slots=True, eq=False)
class RequestState:
    """`number` is the order of arrival. Until the prompt is computed one sequence stands for all choices of
    `unforked` (and has the index of the first); then each choice has its own and `unforked` is empty.
    `prompt_scores[i]` belongs to prompt token i + 1; None where that is before those that are asked for. `beams` is the
    search that decides what the choices get."""

    request: Request
    number: int
    stop_tokens: frozenset[int]
    unforked: list[int]
    sequences: list[Sequence] = field(default_factory=list)
    prompt_scores: list[TokenLogprobs | None] = field(default_factory=list)
    scores_sent: bool = False
    admitted: bool = False
    cache_report: CacheReport | None = None  # until it is sent
    overtaken: int = 0  # how many later requests were admitted first
    num_cached_tokens: int = 0  # of the prompt, at first admission
    arrived: float = field(default_factory=perf_counter)
    started: float | None = None  # first admission, until it is told
    beams: BeamGroup | None = None
    bad_words: BadWords | None = None

    @classmethod
    def of(cls, request: Request, number: int, find_stops: StopFinder | None = None) -> RequestState:
        params = request.sampling
        eos = () if params.ignore_eos else request.eos_token_ids
        state = cls(request, number, frozenset((*eos, *params.stop_token_ids)), list(range(params.num_sequences)))
        if params.prompt_logprobs is not None:
            unscored = min(params.prompt_logprobs_start, len(request.prompt_token_ids)) - 1
            state.prompt_scores = [None] * unscored
        if request.bad_word_ids:
            state.bad_words = BadWords(request.bad_word_ids)
        if params.use_beam_search:
            scanner = find_stops(params) if params.stop and find_stops is not None else None
            state.beams = BeamGroup(request, state.stop_tokens, scanner)
        return state

    @property
    def num_choices(self) -> int:
        """How many sequences each of this request's sequences counts for."""
        return len(self.unforked) or 1

    @property
    def scores_needed(self) -> bool:
        return (
            self.request.sampling.prompt_logprobs is not None
            and len(self.prompt_scores) < len(self.request.prompt_token_ids) - 1
        )

    def match_limit(self, seq: Sequence) -> int:
        """How many tokens may come from the cache: not the last one, whose logits are needed, and none whose
        logits have yet to score the prompt."""
        limit = seq.num_tokens - 1
        return min(limit, len(self.prompt_scores)) if self.scores_needed else limit

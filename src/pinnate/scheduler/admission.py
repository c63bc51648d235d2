"""Admission: what can ever run, and what should start now.

Knows: limits, page counts, how many output tokens to expect. Must not know: the order of the queue, samples.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pinnate.core.errors import ContextLengthError, InvalidRequestError
from pinnate.core.request import Request, Sequence
from pinnate.kvcache.manager import KVCacheManager
from pinnate.kvcache.radix_cache import PrefixMatch

INITIAL_RATIO = 0.5
MIN_RATIO = 0.1
RATIO_DECAY = 0.995  # per step without preemption: from the initial to the minimum in some 300 steps
RATIO_RISE = 0.1  # per preemption
MAX_EXPECTED_TOKENS = 1024  # max_tokens beyond this says little: it often is just the rest of the context


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one engine. Sequences, tokens, tokens, requests."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_num_queued_reqs: int


class AdmissionControl:
    """Decides whether there is memory for one more sequence.

    A sequence is expected to produce `new_token_ratio` of the tokens it may still produce. The ratio falls
    while memory suffices and rises with each preemption (as in SGLang's scheduler), so that the batch grows to
    what the requests at hand really use.
    """

    def __init__(self, cache: KVCacheManager, limits: Limits) -> None:
        self._cache = cache
        self._limits = limits
        self.new_token_ratio = INITIAL_RATIO

    @property
    def max_num_seqs(self) -> int:
        return self._limits.max_num_seqs

    def refuse_impossible(self, request: Request) -> None:
        """Raises ContextLengthError (or InvalidRequestError) if the request could never run, with the numbers."""
        prompt, output, n = len(request.prompt_token_ids), request.max_tokens, request.sampling.num_sequences
        if prompt == 0:
            raise InvalidRequestError("the prompt has no tokens", param="prompt")
        if n > self._limits.max_num_seqs:
            raise InvalidRequestError(f"n is {n}, but at most {self._limits.max_num_seqs} sequences can run", param="n")
        if prompt + output > self._limits.max_model_len:
            raise ContextLengthError(
                f"the prompt has {prompt} tokens and max_tokens is {output}: together {prompt + output}, "
                f"but the context length is {self._limits.max_model_len}",
                param="prompt" if prompt >= self._limits.max_model_len else "max_tokens",
            )
        # The last token of a sequence is never computed. Whole pages of the prompt are shared by the n choices.
        needs = self._cache.needs
        shared = prompt // needs.page_size if n > 1 else 0
        pages = needs.peak(shared * needs.page_size) + n * needs.peak(prompt + max(output, 1) - 1, shared)
        if pages > self._cache.num_request_pages:
            raise ContextLengthError(
                f"the prompt has {prompt} tokens, max_tokens is {output} and n is {n}: they need "
                f"{pages * needs.page_size} tokens of KV memory, but there are "
                f"{self._cache.num_request_pages * needs.page_size}"
                + (" (in pages of one layer group)" if needs.window_groups else ""),
                param="prompt" if needs.peak(prompt) > self._cache.num_request_pages else "max_tokens",
            )

    def demand(self, seq: Sequence, num_choices: int) -> int:
        """Pages that the sequence (standing for `num_choices`) is expected to take beyond its tables."""
        possible = min(seq.request.max_tokens - seq.num_output_tokens, MAX_EXPECTED_TOKENS)
        expected = int(self.new_token_ratio * possible)
        needs, total = self._cache.needs, seq.num_tokens + expected
        in_prompt = seq.num_tokens - seq.num_computed_tokens > 1
        pages = needs.peak(total) if in_prompt else needs.steady(total)
        others = (num_choices - 1) * needs.steady(total, seq.num_tokens // needs.page_size) if num_choices > 1 else 0
        return max(0, pages - self._cache.pages_held(seq)) + others

    def has_room(self, seq: Sequence, num_choices: int, match: PrefixMatch, reserved: int) -> bool:
        """Whether `seq` can start with this match while `reserved` pages are kept for those that run."""
        available = self._cache.num_available_pages - self._cache.num_idle_pages(match) - reserved
        return self.demand(seq, num_choices) - self._cache.pages_matched(match) <= available

    def on_preemption(self) -> None:
        self.new_token_ratio = min(1.0, self.new_token_ratio + RATIO_RISE)

    def on_smooth_step(self) -> None:
        self.new_token_ratio = max(MIN_RATIO, self.new_token_ratio * RATIO_DECAY)


def prefix_is_underway(seq: Sequence, limit: int, match: PrefixMatch, running: Iterable[Sequence], worth: int) -> bool:
    """Whether a running sequence is about to compute at least `worth` more tokens of seq's first `limit` tokens
    than are cached: then waiting for them is cheaper than computing them twice."""
    end = match.num_tokens + worth
    if end > limit:
        return False
    prefix = None
    for other in running:
        if not other.num_computed_tokens < end <= other.num_tokens:
            continue
        if other.request.namespace != seq.request.namespace:
            continue
        prefix = seq.token_ids[:end] if prefix is None else prefix
        if other.token_ids[:end] == prefix:
            return True
    return False

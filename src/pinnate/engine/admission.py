"""Admission: the checks at the door, and the making of a Request.

Knows: the engine's limits (context, vocabulary, KV pool, queue) and what a request may at most need. Must not
know: how the engine runs, or text. Shared by AsyncEngine and LLM, so that both refuse with the same words.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from time import time
from typing import Any

import msgspec

from pinnate.core.errors import ContextLengthError, InvalidRequestError
from pinnate.core.layer_groups import PageNeeds
from pinnate.core.request import Request
from pinnate.core.sampling import SamplingParams

SEED_BITS = 63


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes are in tokens, pages and sequences. `max_num_queued_reqs` counts sequences beyond the running ones,
    `max_num_queued_tokens` the prompts that wait (None: no limit)."""

    max_model_len: int
    vocab_size: int
    num_pages: int
    page_size: int
    max_num_seqs: int
    max_num_queued_reqs: int
    max_num_queued_tokens: int | None = None
    pinnable_pages: int = 0  # of num_pages; no request is promised them
    page_needs: PageNeeds | None = None  # of a model with windowed layers; None: pages for every token

    @classmethod
    def from_info(cls, info: Mapping[str, Any]) -> Limits:
        return msgspec.convert({name: info[name] for name in cls.__struct_fields__ if name in info}, cls)

    @property
    def max_sequences(self) -> int:
        """Sequences in flight, running and waiting together."""
        return self.max_num_seqs + self.max_num_queued_reqs

    def check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        """
        Raises:
            InvalidRequestError: an empty prompt, a token outside the vocabulary, more choices than can run at once.
            ContextLengthError: prompt and output can never fit the context, or the KV pool; with the numbers.
        """
        if not prompt:
            raise InvalidRequestError("the prompt is empty", param="prompt")
        self._check_vocabulary("prompt", prompt)
        self._check_vocabulary("logit_bias", params.logit_bias)
        self._check_vocabulary("stop_token_ids", params.stop_token_ids)
        self._check_vocabulary("logprob_token_ids", params.logprob_token_ids)
        self._check_vocabulary("allowed_token_ids", params.allowed_token_ids or ())
        if params.num_sequences > self.max_num_seqs:
            name = "n" if params.num_sequences == params.n else "beam_width"
            raise InvalidRequestError(
                f"{name} is {params.num_sequences}, at most {self.max_num_seqs} sequences run at once (--max-num-seqs)",
                param=name,
            )
        if params.max_tokens == 0 and params.prompt_logprobs is None:
            raise InvalidRequestError("max_tokens 0 makes sense with prompt_logprobs only", param="max_tokens")
        wanted = 1 if params.max_tokens is None else params.max_tokens
        self._check_context(len(prompt), wanted)
        count = params.num_sequences
        if not self._fits_pool(len(prompt), wanted, count):
            raise ContextLengthError(
                f"{len(prompt)} prompt tokens and {count} x {wanted} output tokens need "
                f"{self._worst_pages(len(prompt), wanted, count)} pages of {self.page_size} tokens; "
                f"the KV pool has {self._request_pages} for one request",
                param="max_tokens" if wanted > 1 else "prompt",
            )

    def default_max_tokens(self, num_prompt_tokens: int, n: int) -> int:
        """The rest of the context, or what the pool holds for n choices if that is less. At least 1 after `check`."""
        low, high = 1, self.max_model_len - num_prompt_tokens
        while low < high:
            middle = (low + high + 1) // 2
            if self._fits_pool(num_prompt_tokens, middle, n):
                low = middle
            else:
                high = middle - 1
        return low

    def _check_context(self, num_prompt_tokens: int, wanted: int) -> None:
        limit = self.max_model_len
        if num_prompt_tokens + min(wanted, 1) > limit:
            raise ContextLengthError(
                f"the context is {limit} tokens, output included; the prompt alone has {num_prompt_tokens}",
                param="prompt",
            )
        if num_prompt_tokens + wanted > limit:
            raise ContextLengthError(
                f"the context is {limit} tokens; {num_prompt_tokens} in the prompt and max_tokens {wanted} are "
                f"{num_prompt_tokens + wanted}",
                param="max_tokens",
            )

    def _check_vocabulary(self, param: str, token_ids: Collection[int]) -> None:
        if not token_ids:
            return
        for token in (min(token_ids), max(token_ids)):
            if not 0 <= token < self.vocab_size:
                raise InvalidRequestError(
                    f"{param}: token id {token} is not in the vocabulary of {self.vocab_size}", param=param
                )

    @property
    def _request_pages(self) -> int:
        return self.num_pages - self.pinnable_pages

    def _fits_pool(self, num_prompt_tokens: int, max_tokens: int, n: int) -> bool:
        return self._worst_pages(num_prompt_tokens, max_tokens, n) <= self._request_pages

    def _worst_pages(self, num_prompt_tokens: int, max_tokens: int, n: int) -> int:
        """Pages at the end of all choices. Whole prompt pages are shared; the last output token keeps no KV."""
        needs = self.page_needs or PageNeeds(page_size=self.page_size)
        shared = num_prompt_tokens // needs.page_size if n > 1 else 0
        own = needs.peak(num_prompt_tokens + max(max_tokens, 1) - 1, shared)
        return needs.peak(shared * needs.page_size) + n * own


class Admission:
    """Makes Requests for one engine. `rng` draws the seed of a request that names none."""

    def __init__(self, limits: Limits, eos_token_ids: Sequence[int], rng: random.Random) -> None:
        self.limits = limits
        self._eos_token_ids = tuple(eos_token_ids)
        self._rng = rng

    def make_request(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        cache_salt: str = "",
        priority: int = 0,
        cache_report: bool = False,
        bad_word_ids: tuple[tuple[int, ...], ...] = (),
    ) -> Request:
        """Checks everything (see Limits.check), then fills in `max_tokens` and `seed`."""
        self.limits.check(prompt, params)
        self._check_allowed(params, bad_word_ids)
        max_tokens, seed = params.max_tokens, params.seed
        if max_tokens is None:
            max_tokens = self.limits.default_max_tokens(len(prompt), params.num_sequences)
        if seed is None:
            seed = self._rng.getrandbits(SEED_BITS)
        return Request(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            sampling=msgspec.structs.replace(
                params, max_tokens=max_tokens, seed=seed, min_tokens=min(params.min_tokens, max_tokens)
            ),
            eos_token_ids=self._eos_token_ids,
            bad_word_ids=bad_word_ids,
            arrival_time=time(),
            priority=priority,
            cache_salt=cache_salt,
            cache_report=cache_report,
        )

    def _check_allowed(self, params: SamplingParams, bad_word_ids: Iterable[tuple[int, ...]]) -> None:
        if params.allowed_token_ids is None:
            return
        banned = {run[0] for run in bad_word_ids if len(run) == 1}
        if params.min_tokens:
            banned.update(params.stop_token_ids, () if params.ignore_eos else self._eos_token_ids)
        if banned.issuperset(params.allowed_token_ids):
            raise InvalidRequestError(
                "allowed_token_ids leaves no token to draw: bad_words or min_tokens bans each",
                param="allowed_token_ids",
            )

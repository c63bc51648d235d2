"""What an engine does with a sequence, without an engine."""

from __future__ import annotations

from collections.abc import Sequence as Tokens

from pinnate.core.request import Request, Sequence
from pinnate.core.sampling import SamplingParams
from pinnate.kvcache.manager import KVCacheManager

PARAMS = SamplingParams(max_tokens=1, seed=0)


def start(cache: KVCacheManager, tokens: Tokens[int], seq_id: int = 1, **fields: object) -> Sequence:
    """A sequence that has adopted what is cached of it."""
    request = Request(request_id="r", prompt_token_ids=list(tokens), sampling=PARAMS, **fields)
    seq = Sequence(seq_id, request, 0)
    seq.token_ids.extend(tokens)
    seq.num_computed_tokens = cache.adopt(seq, cache.match(seq, len(tokens) - 1))
    cache.take_copies()
    cache.end_step()
    return seq


def compute(cache: KVCacheManager, tokens: Tokens[int], **fields: object) -> int:
    """A whole request: all of its tokens are computed and left to the cache. Returns how many were cached before."""
    seq = start(cache, tokens, **fields)
    cached = seq.num_computed_tokens
    assert cache.allocate(seq, len(tokens) - cached)
    cache.take_copies()
    seq.num_computed_tokens = len(tokens)
    cache.end_step()
    cache.release(seq)
    return cached

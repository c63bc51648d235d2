"""A cache report as a client reads it: numbers, the text around the place, a sentence.

Knows: how to say a reason. Must not know: how a reason is found (kvcache/explain.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from pinnate.core.messages import CacheReport, MatchEnd
from pinnate.server.protocol.common import CacheReport as ShownReport

AROUND = 8  # tokens shown on either side

_SENTENCES: Mapping[MatchEnd, str] = MappingProxyType(
    {
        MatchEnd.NEW_TEXT: "token {at} is new text: no cached prompt goes on with it",
        MatchEnd.EVICTED: "at token {at} the cached prefix was evicted: at least {lost} more tokens were cached once",
        MatchEnd.OTHER_SALT: "{lost} more tokens are cached under another cache_salt or adapter, which is not shared",
        MatchEnd.WINDOW_LOST: "more is cached, but a layer with a sliding window has released what it needs of it",
        MatchEnd.LAST_TOKEN: "all that can be: the last token is always computed",
        MatchEnd.SCORED: "prompt tokens whose log-probabilities were asked for are computed",
        MatchEnd.NO_ROOM: "{lost} more tokens are cached inside a page, but there was no free page for a copy of it",
    }
)


class Vocabulary(Protocol):
    """What answers need of the tokenizer."""

    def token_bytes(self, token_id: int) -> bytes: ...

    def is_special(self, token_id: int) -> bool: ...


def text_of(token_ids: Sequence[int], vocabulary: Vocabulary) -> str:
    """Special tokens included; a part of a character reads as the replacement character."""
    return b"".join(vocabulary.token_bytes(token_id) for token_id in token_ids).decode("utf-8", "replace")


def show_report(report: CacheReport, prompt: Sequence[int], vocabulary: Vocabulary) -> ShownReport:
    at = report.num_cached_tokens
    why = _SENTENCES[report.reason].format(at=at, lost=report.num_lost_tokens)
    source = f" ({report.num_tier_tokens} of them on disk)" if report.num_tier_tokens else ""
    return ShownReport(
        num_prompt_tokens=report.num_prompt_tokens,
        num_cached_tokens=at,
        reason=str(report.reason),
        num_lost_tokens=report.num_lost_tokens,
        num_tier_tokens=report.num_tier_tokens,
        before=text_of(prompt[max(0, at - AROUND) : at], vocabulary),
        after=text_of(prompt[at : at + AROUND], vocabulary),
        explanation=f"{at} of {report.num_prompt_tokens} prompt tokens were cached{source}; {why}",
    )

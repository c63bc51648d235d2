"""Why a prefix match ended where it did.

Knows: the prefix tree, a bounded memory of what was evicted from it. Must not know: text, requests' fate. Exists only
where reports are allowed (`--cache-report`); it costs nothing else then.
"""

from __future__ import annotations

from array import array

import msgspec

from pinnate.core.messages import CacheReport, MatchEnd
from pinnate.core.request import Namespace
from pinnate.kvcache.page_hashes import PageHashes, StoredPages, page_hash, root_hash
from pinnate.kvcache.radix_cache import Node, PrefixMatch, RadixCache

EVICTED_HASHES = 65_536  # pages remembered; some 100 bytes each


class EvictedPaths:
    """Hashes of what was evicted, oldest forgotten first. A HashListener.

    Of each cut it keeps the whole pages, and the first lost token alone with what is before it in its page: so the very
    token at which a later match ends is recognised, wherever in a page the cut was.
    """

    def __init__(self, page_size: int, limit: int = EVICTED_HASHES) -> None:
        self._page_size = page_size
        self._limit = limit
        self._hashes: dict[int, None] = {}  # in order of eviction

    def __len__(self) -> int:
        return len(self._hashes)

    def __contains__(self, value: int) -> bool:
        return value in self._hashes

    def stored(self, pages: StoredPages) -> None:
        for value in pages.hashes:
            self._hashes.pop(value, None)

    def removed(self, leaf: Node, position: int, hashes: list[int], boundary: int) -> None:
        start = position - position % self._page_size
        for value in (page_hash(boundary, path_tokens(leaf, start, position + 1)), *hashes):
            self._hashes.pop(value, None)
            self._hashes[value] = None
        while len(self._hashes) > self._limit:
            del self._hashes[next(iter(self._hashes))]


def path_tokens(node: Node, start: int, end: int) -> array[int]:
    """Tokens [start, end) of the path to `node`, which reaches at least to `end`."""
    parts = []
    step: Node | None = node
    while step is not None and step.end > start:
        parts.append(step.tokens[max(0, start - step.start) : end - step.start])
        step = step.parent
    tokens = array("i")
    for part in reversed(parts):
        tokens.extend(part)
    return tokens


class MatchExplainer:
    """`see_others`: whether a report may tell that another namespace has more of the tokens. That is a channel between
    tenants: for operators and trusted clients only."""

    def __init__(self, tree: RadixCache, hashes: PageHashes, evicted: EvictedPaths, page_size: int, see_others: bool):
        self._tree = tree
        self._hashes = hashes
        self._evicted = evicted
        self._page_size = page_size
        self._see_others = see_others

    def explain(
        self, tokens: array[int], namespace: Namespace, match: PrefixMatch, limit: int, window_lost: bool = False
    ) -> CacheReport:
        """`match` is of tokens[:limit], fresh. `window_lost`: a longer prefix is cached, but a layer with a sliding
        window has lost what it would need of it. Time: O(tokens), times the namespaces where others may be seen."""
        cached = match.num_tokens
        report = CacheReport(len(tokens), cached, MatchEnd.NEW_TEXT)
        if cached >= limit:
            whole = limit >= len(tokens) - 1
            return msgspec.structs.replace(report, reason=MatchEnd.LAST_TOKEN if whole else MatchEnd.SCORED)
        if window_lost or match.lost_to_window:
            return msgspec.structs.replace(report, reason=MatchEnd.WINDOW_LOST, num_lost_tokens=match.lost_to_window)
        evicted = self._evicted_tokens(tokens, namespace, match)
        if evicted:
            return msgspec.structs.replace(
                report, reason=MatchEnd.EVICTED, num_lost_tokens=min(evicted, limit - cached)
            )
        elsewhere = self._longest_elsewhere(tokens, namespace, limit) if self._see_others else 0
        if elsewhere > cached:
            return msgspec.structs.replace(report, reason=MatchEnd.OTHER_SALT, num_lost_tokens=elsewhere - cached)
        return report

    def _evicted_tokens(self, tokens: array[int], namespace: Namespace, match: PrefixMatch) -> int:
        """How many tokens behind the match are known to have been cached once; 0 if it ended at new text."""
        size, cached = self._page_size, match.num_tokens
        boundary = len(match.pages) * size
        before = self._hashes.of(match.pages[-1], namespace) if match.pages else root_hash(namespace)
        found = int(page_hash(before, tokens[boundary : cached + 1]) in self._evicted)
        for start in range(boundary, len(tokens) - size + 1, size):
            before = page_hash(before, tokens[start : start + size])
            if before not in self._evicted:
                break
            found = start + size - cached
        return found

    def _longest_elsewhere(self, tokens: array[int], namespace: Namespace, limit: int) -> int:
        others = [other for other in self._tree.namespaces() if other != namespace]
        return max((self._tree.match_prefix(tokens, other, limit).num_tokens for other in others), default=0)


def complete_report(report: CacheReport | None, adopted: int, from_tier: int) -> CacheReport | None:
    """The report once `adopted` tokens have really been taken over: fewer than matched if a copy found no page.
    `from_tier` of them were loaded for this request."""
    if report is None:
        return None
    if adopted != report.num_cached_tokens:
        lost = report.num_cached_tokens - adopted
        report = CacheReport(report.num_prompt_tokens, adopted, MatchEnd.NO_ROOM, lost)
    return msgspec.structs.replace(report, num_tier_tokens=from_tier) if from_tier else report

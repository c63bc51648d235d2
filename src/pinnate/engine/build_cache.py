"""build_cache: the KV memory's bookkeeping and whatever listens to it, wired as the settings ask.

Knows: which listener exists when. Must not know: the model, the executor. What is off is not there: the prefix
tree then has nobody to tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from pinnate.core.config import EngineConfig
from pinnate.core.layer_groups import PageNeeds
from pinnate.engine.build_tiers import LowerTier
from pinnate.engine.cache_commands import CacheCommands
from pinnate.engine.commands import CommandHandler
from pinnate.kvcache.event_log import EventLog, snapshot
from pinnate.kvcache.explain import EvictedPaths, MatchExplainer
from pinnate.kvcache.manager import KVCacheManager
from pinnate.kvcache.page_hashes import HashListener, PageHashes, TreeWatch, Watches
from pinnate.kvcache.tiers.cost import CostModel
from pinnate.kvcache.tiers.manager import TierManager
from pinnate.kvcache.tiers.mover import PageMover
from pinnate.kvcache.tiers.saved_pages import SavedPages

if TYPE_CHECKING:
    from pinnate.engine.kv_event_publisher import KVEventPublisher


class CacheParts(NamedTuple):
    cache: KVCacheManager
    explainer: MatchExplainer | None
    events: KVEventPublisher | None
    commands: Mapping[str, CommandHandler]
    tiers: TierManager | None


def build_cache(
    config: EngineConfig,
    num_pages: int,
    pinnable_pages: int,
    needs: PageNeeds | None = None,
    lower: LowerTier | None = None,
) -> CacheParts:
    """`lower` is the tier below the pool, where there is one.

    Raises:
        ConfigError: an address for KV events cannot be bound.
    """
    size = config.page_size
    evicted = EvictedPaths(size) if config.cache_report != "off" else None
    event_log = EventLog() if config.publishes_events else None
    listeners: list[HashListener] = [listener for listener in (evicted, event_log) if listener is not None]
    hashes = PageHashes(size, listeners) if listeners else None
    cost = CostModel()
    mover = PageMover(lower.io, lower.tier, cost) if lower is not None else None
    pages = SavedPages(size, mover, lambda: cost.goes_on(size, 1)) if mover is not None else None
    watches: list[TreeWatch] = [watch for watch in (hashes, pages) if watch is not None]
    cache = KVCacheManager(
        num_pages,
        size,
        enable_prefix_caching=config.enable_prefix_caching,
        eviction_policy=config.eviction_policy,
        pinnable_pages=pinnable_pages,
        watch=Watches(watches) if len(watches) > 1 else watches[0] if watches else None,
        needs=needs,
    )
    tiers = None
    if lower is not None and mover is not None and pages is not None:
        tiers = TierManager(cache, pages, lower.tier, mover, cost)
    explainer = None
    if hashes is not None and evicted is not None:
        explainer = MatchExplainer(cache.tree, hashes, evicted, size, see_others=config.cache_report == "all")
    events = None
    if hashes is not None and event_log is not None:
        events = _publish(config, cache, hashes, event_log)
    shown = explainer if config.cache_report == "all" else None
    return CacheParts(cache, explainer, events, CacheCommands(cache, shown, events, tiers).handlers(), tiers)


def _publish(config: EngineConfig, cache: KVCacheManager, hashes: PageHashes, event_log: EventLog) -> KVEventPublisher:
    # Imported on demand: sockets and their library are for those who publish.
    from pinnate.engine.kv_event_publisher import KVEventPublisher

    assert config.kv_events is not None
    return KVEventPublisher(
        config.kv_events,
        config.page_size,
        take=lambda: event_log.take(hashes),
        snapshot=lambda: snapshot(cache.tree, hashes, config.page_size),
    )

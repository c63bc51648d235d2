"""build_cache: the KV memory's bookkeeping and whatever listens to it, wired as the settings ask.

Knows: which listener exists when. Must not know: the model, the executor. What is off is not there: the prefix
tree then has nobody to tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from pinnate.core.config import EngineConfig
from pinnate.core.layer_groups import PageNeeds
from pinnate.engine.cache_commands import CacheCommands, CommandHandler
from pinnate.kvcache.event_log import EventLog, snapshot
from pinnate.kvcache.explain import EvictedPaths, MatchExplainer
from pinnate.kvcache.manager import KVCacheManager
from pinnate.kvcache.page_hashes import HashListener, PageHashes

if TYPE_CHECKING:
    from pinnate.engine.kv_event_publisher import KVEventPublisher


class CacheParts(NamedTuple):
    cache: KVCacheManager
    explainer: MatchExplainer | None
    events: KVEventPublisher | None
    commands: Mapping[str, CommandHandler]


def build_cache(
    config: EngineConfig, num_pages: int, pinnable_pages: int, needs: PageNeeds | None = None
) -> CacheParts:
    """
    Raises:
        ConfigError: an address for KV events cannot be bound.
    """
    size = config.page_size
    evicted = EvictedPaths(size) if config.cache_report != "off" else None
    event_log = EventLog() if config.publishes_events else None
    listeners: list[HashListener] = [listener for listener in (evicted, event_log) if listener is not None]
    hashes = PageHashes(size, listeners) if listeners else None
    cache = KVCacheManager(
        num_pages,
        size,
        enable_prefix_caching=config.enable_prefix_caching,
        eviction_policy=config.eviction_policy,
        pinnable_pages=pinnable_pages,
        watch=hashes,
        needs=needs,
    )
    explainer = None
    if hashes is not None and evicted is not None:
        explainer = MatchExplainer(cache.tree, hashes, evicted, size, see_others=config.cache_report == "all")
    events = None
    if hashes is not None and event_log is not None:
        events = _publish(config, cache, hashes, event_log)
    shown = explainer if config.cache_report == "all" else None
    return CacheParts(cache, explainer, events, CacheCommands(cache, shown, events).handlers())


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

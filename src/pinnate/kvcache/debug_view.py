"""The KV memory laid open: page states, the prefix tree (bounded), which prefixes save most.

Knows: how to read the pool and the tree. Changes nothing. Plain data, for GET /debug/cache. A namespace is shown by a
hash: salts are secrets.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import Any

from pinnate.kvcache.explain import path_tokens
from pinnate.kvcache.manager import KVCacheManager
from pinnate.kvcache.page_hashes import namespace_label
from pinnate.kvcache.radix_cache import Node

MAX_NODES = 256
TOP_PREFIXES = 16
SHOWN_TOKENS = 16


def describe_cache(cache: KVCacheManager, max_nodes: int = MAX_NODES) -> dict[str, Any]:
    """Time: O(pages + nodes)."""
    nodes = [node for node in cache.tree.nodes() if node.parent is not None]
    return {
        "page_size": cache.page_size,
        "pages": page_states(cache),
        "cached_tokens": sum(len(node.tokens) for node in nodes),
        "num_nodes": len(nodes),
        "namespaces": [namespace_label(namespace) for namespace in cache.tree.namespaces()][:max_nodes],
        "tree": _tree(cache, max_nodes),
        "top_prefixes": top_prefixes(nodes, TOP_PREFIXES),
    }


def page_states(cache: KVCacheManager) -> dict[str, int]:
    """How many pages are in which state. free + cached + in_use = total; `shared` (by several tables) is part of
    in_use, `in_tree` of cached and in_use; `evicted` counts since the start."""
    pool = cache.pool
    return {
        "total": pool.num_pages,
        "free": pool.num_free,
        "cached": pool.num_evictable,
        "in_use": pool.num_in_use,
        "shared": sum(refs > 1 for refs in pool.seq_refs),
        "in_tree": sum(refs > 0 for refs in pool.tree_refs),
        "pinnable": cache.pinnable_pages,
        "evicted": cache.evicted_pages,
    }


def top_prefixes(nodes: list[Node], count: int) -> list[dict[str, Any]]:
    """Nodes by the tokens that their hits have saved, most first. Each hit is counted at every node on its path, so a
    node counts its own tokens alone. `tokens` are the first of them, `end` is the length of the whole prefix."""
    best = heapq.nlargest(count, (node for node in nodes if node.hits), key=_saved)
    return [
        {
            "namespace": namespace_label(node.namespace),
            "start": node.start,
            "end": node.end,
            "hits": node.hits,
            "tokens_saved": _saved(node),
            "tokens": list(path_tokens(node, node.start, min(node.end, node.start + SHOWN_TOKENS))),
        }
        for node in best
    ]


def _saved(node: Node) -> int:
    return node.hits * len(node.tokens)


def _tree(cache: KVCacheManager, max_nodes: int) -> dict[str, Any]:
    """The nodes nearest to the roots, breadth first; `parent` is an index into the same list, null at a root."""
    queue: deque[tuple[Node, int | None]] = deque()
    for root in cache.tree.roots():
        queue.extend((child, None) for child in root.children.values())
    shown: list[dict[str, Any]] = []
    while queue and len(shown) < max_nodes:
        node, parent = queue.popleft()
        queue.extend((child, len(shown)) for child in node.children.values())
        shown.append(
            {
                "parent": parent,
                "namespace": namespace_label(node.namespace),
                "start": node.start,
                "end": node.end,
                "pages": len(node.pages),
                "locks": node.lock_count,
                "hits": node.hits,
                "last_used": node.last_used,
                "priority": node.priority,
                "tokens": node.tokens[:SHOWN_TOKENS].tolist(),
            }
        )
    return {"nodes": shown, "truncated": bool(queue)}

"""In which order the requests of a batch run: depth first over the tree of their prompts.

Knows: token ids, namespaces of the prefix cache. Must not know: files, the engine.

Sorted by their token ids, prompts come as a depth-first walk of the tree that they form: all that share a prefix follow
each other, and within them all that share a longer one. So a prefix is computed once, used by all that have it while
it is in the cache, and can then be evicted for good; an order that leaves a subtree and comes back to it may have to
compute its prefix again. (Zheng et al., "SGLang", 2024, section 3, prove that this is optimal for one request at a time
where the cache holds the longest one.)
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence

NAMESPACE_BYTES = 8
TOKEN_BYTES = 4
MAX_KEY_TOKENS = 4096  # prompts that agree beyond this keep the order of their lines


def order_key(token_ids: Sequence[int], cache_salt: str = "") -> bytes:
    """Sorted by this, requests run depth first. Requests that cannot share a prefix, for they have different salts, are
    kept apart. Token ids are below 2**32; they compare as bytes, as SQLite compares them."""
    tokens = array("I", token_ids[:MAX_KEY_TOKENS])
    if sys.byteorder == "little":
        tokens.byteswap()
    salt = hashlib.sha256(cache_salt.encode()).digest()[:NAMESPACE_BYTES] if cache_salt else bytes(NAMESPACE_BYTES)
    return salt + tokens.tobytes()

"""The memory plan as a person reads it at start: weights, KV per token, tokens that fit, reserve, and why.

Knows: sizes that were chosen elsewhere (core/autoconfig.py). Pure.
"""

from __future__ import annotations

import msgspec

from pinnate.core.autoconfig import Choice, size_text
from pinnate.core.layer_groups import PageNeeds


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes in bytes and tokens. `available` is what the machine had to give before anything was loaded."""

    weight_bytes: int
    kv_token_bytes: float
    kv_tokens: int
    kv_bytes: int
    pinnable_tokens: int
    available: int
    reason: str  # of the pool's size

    @property
    def reserve(self) -> int:
        """What is left to activations, the page cache and everybody else. Below 0: more is granted than there is."""
        return self.available - self.weight_bytes - self.kv_bytes

    def lines(self) -> list[str]:
        pinnable = f", {self.pinnable_tokens} of them may be pinned" if self.pinnable_tokens else ""
        left = f"{size_text(self.reserve)} left in reserve" if self.reserve >= 0 else "more than there is"
        return [
            f"{size_text(self.weight_bytes)} weights + {size_text(self.kv_bytes)} KV pool of "
            f"{size_text(self.available)} available: {left}",
            f"{size_text(self.kv_token_bytes)} of KV per token: {self.kv_tokens} tokens fit{pinnable}",
            f"why: {self.reason}",
        ]


def plan_memory(
    weight_bytes: int,
    page_bytes: int,
    needs: PageNeeds | int,
    num_pages: Choice[int],
    pinnable_pages: int,
    available: int,
) -> MemoryPlan:
    """`needs`: the page size alone where all layers share a page. KV per token is that of all layers."""
    needs = PageNeeds(page_size=needs) if isinstance(needs, int) else needs
    return MemoryPlan(
        weight_bytes=weight_bytes,
        kv_token_bytes=page_bytes * (1 + needs.window_groups) / needs.page_size,
        kv_tokens=needs.fitting_tokens(num_pages.value),
        kv_bytes=num_pages.value * page_bytes,
        pinnable_tokens=needs.fitting_tokens(pinnable_pages),
        available=available,
        reason=num_pages.reason,
    )

"""Layer groups: which layers of a model share a page, and how many pages a sequence takes.

Knows: windows and sizes of layers, arithmetic on pages. Must not know: graphs, page tables, the bytes of an element.

A page is `page_size` tokens of a few layers. Layers with full attention form group 0. Where others look at a window
only, they form further groups of as many layers, so that all pages have equal bytes and come from one pool
(docs/design/003-hybrid-models.md). Else all layers are group 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import msgspec

T = TypeVar("T")


class LayerSize(NamedTuple):
    """What a layer keeps: `heads` keys and values of `head_dim` for each of the last `window` tokens (0: all)."""

    heads: int
    head_dim: int
    window: int


class PageNeeds(msgspec.Struct, frozen=True, kw_only=True):
    """How many pages a sequence takes of the pool.

    A logical page is one page of group 0 and, while it is in the window, one of each of `window_groups`. A sequence in
    decode has `window_pages` logical pages in its window; a step that computes a part of its prompt adds up to
    `step_pages`.
    """

    page_size: int
    window_groups: int = 0
    window_pages: int = 0
    step_pages: int = 0

    def steady(self, num_tokens: int, shared: int = 0) -> int:
        """Pages for `num_tokens` between steps, `shared` logical pages at the beginning not counted."""
        logical = -(-num_tokens // self.page_size) - shared
        return logical + self.window_groups * min(logical, self.window_pages)

    def peak(self, num_tokens: int, shared: int = 0) -> int:
        """Pages while any part of `num_tokens` is computed: what must be there for the sequence to come through."""
        logical = -(-num_tokens // self.page_size) - shared
        return logical + self.window_groups * min(logical, self.window_pages + self.step_pages)

    def fitting_tokens(self, num_pages: int) -> int:
        """The longest sequence that `num_pages` can hold, in tokens, a multiple of page_size."""
        low, high = 0, num_pages
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.peak(middle * self.page_size) <= num_pages else (low, middle - 1)
        return low * self.page_size


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """places[layer] is (group, slot of the page). `window`: tokens that the windowed groups keep; 0 where there are
    none."""

    places: tuple[tuple[int, int], ...]
    num_groups: int
    window: int
    reason: str

    @property
    def layers_per_page(self) -> int:
        return 1 + max(slot for _, slot in self.places)

    def needs(self, page_size: int, max_num_batched_tokens: int) -> PageNeeds:
        if self.num_groups == 1:
            return PageNeeds(page_size=page_size)
        return PageNeeds(
            page_size=page_size,
            window_groups=self.num_groups - 1,
            window_pages=reach(self.window, page_size) + 1,
            step_pages=-(-max_num_batched_tokens // page_size),
        )


def reach(window: int, page_size: int) -> int:
    """How many logical pages before its own a token's window may touch."""
    return -(-(window - 1) // page_size)


def one_group(num_layers: int, reason: str = "one group of layers") -> LayerGroups:
    return LayerGroups(tuple((0, layer) for layer in range(num_layers)), 1, 0, reason)


def slot_layers(groups: LayerGroups, layers: Sequence[T]) -> list[T]:
    """For each slot of a page, one of the layers that lie there (they are alike)."""
    return [layers[layer] for layer, (group, _) in enumerate(groups.places) if group == 0]


def choose_layer_groups(layers: Sequence[LayerSize]) -> LayerGroups:
    """Groups where they save memory and every page can have the same bytes; else one group, with the reason."""
    full = [i for i, layer in enumerate(layers) if not layer.window]
    windowed = [i for i, layer in enumerate(layers) if layer.window]
    if not windowed:
        return one_group(len(layers), f"{len(layers)} layers in one group: all see the whole context")
    if len({(layer.heads, layer.head_dim) for layer in layers}) > 1:
        return one_group(len(layers), "one group, windows save nothing: layers keep keys of different sizes")
    if not full:
        return one_group(len(layers), "one group, windows save nothing: no layer sees the whole context")
    if len(full) > len(windowed):
        return one_group(len(layers), "one group, windows save nothing: most layers see the whole context")
    size, window = len(full), max(layer.window for layer in layers)
    places = {layer: (0, slot) for slot, layer in enumerate(full)}
    places |= {layer: (1 + i // size, i % size) for i, layer in enumerate(windowed)}
    num_groups = 1 + -(-len(windowed) // size)
    spare = num_groups * size - len(layers)
    reason = (
        f"{num_groups} groups of {size} layers: {len(full)} see the whole context, {len(windowed)} the last {window} "
        "tokens" + (f"; {spare} of {num_groups * size} places in a page are spare" if spare else "")
    )
    return LayerGroups(tuple(places[i] for i in range(len(layers))), num_groups, window, reason)

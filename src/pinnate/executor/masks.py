"""Masks of a step: which tokens each structured sequence may draw, filled while the forward pass runs.

Knows: matchers, bits. Must not know: languages, kernels. A mask takes tens of microseconds to some milliseconds, and
is needed only when the logits are there: a thread fills them meanwhile (matchers work without the GIL, as the native
program does), and the program waits for it before it samples.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from pinnate.core.structured import Matcher

MaskArray = NDArray[np.uint32]

NO_MASKS: MaskArray = np.empty(0, np.uint32)
NO_MASKS.flags.writeable = False


def fill_masks(matchers: Sequence[Matcher], vocab_size: int) -> MaskArray:
    """[M, ceil(vocab_size / 32)], bit i % 32 of word i // 32 set where token i is allowed."""
    masks = _empty(len(matchers), vocab_size)
    _fill(matchers, masks)
    return masks


def _empty(rows: int, vocab_size: int) -> MaskArray:
    return np.empty((rows, (vocab_size + 31) // 32), np.uint32)


def _fill(matchers: Sequence[Matcher], masks: MaskArray) -> None:
    masks[:] = 0
    for row, matcher in zip(masks, matchers, strict=True):
        matcher.fill(row.data)


class MaskFiller:
    """A thread that fills the masks of one step at a time; it starts with the first of them."""

    def __init__(self, vocab_size: int) -> None:
        self._memory = _empty(0, vocab_size)
        self._vocab_size = vocab_size
        self._jobs: SimpleQueue[tuple[Sequence[Matcher], MaskArray] | None] = SimpleQueue()
        self._done: SimpleQueue[BaseException | None] = SimpleQueue()
        self._is_busy = False
        self._thread: threading.Thread | None = None

    def start(self, matchers: Sequence[Matcher]) -> MaskArray:
        """Complete once `wait` has returned, which must be called before the next `start`; that one overwrites them."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="pinnate-masks", daemon=True)
            self._thread.start()
        if len(self._memory) < len(matchers):
            self._memory = _empty(len(matchers), self._vocab_size)
        masks = self._memory[: len(matchers)]
        self._is_busy = True
        self._jobs.put((matchers, masks))
        return masks

    def wait(self) -> None:
        """Returns when the masks are complete; nothing to do where it has returned before.

        Raises:
            Exception: what a matcher raised, against its contract.
        """
        if not self._is_busy:
            return
        error = self._done.get()
        self._is_busy = False
        if error is not None:
            raise error

    def close(self) -> None:
        if self._thread is not None:
            self.wait()
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            error: BaseException | None = None
            try:
                _fill(*job)
            except BaseException as raised:
                error = raised
            del job
            self._done.put(error)
            del error

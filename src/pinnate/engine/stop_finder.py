"""LazyStopFinder: stop strings of beam searches, found inside the engine.

Knows: where the model's tokenizer is. Must not know: requests, the scheduler. All other stop strings are found by the
facades, which have the text anyway; but a beam that reached one must not go on, and which beams go on is decided here.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from pinnate.core.sampling import SamplingParams

if TYPE_CHECKING:
    from pinnate.text.stop_scan import StopScan
    from pinnate.text.tokenizer import Tokenizer


class LazyStopFinder:
    """Imports and loads the tokenizer with the first beam search that has stop strings: few engines ever see one.

    Raises (when called):
        ModelError: the tokenizer cannot be loaded.
    """

    def __init__(self, model: str) -> None:
        self._model = model

    def __call__(self, params: SamplingParams) -> StopScan:
        from pinnate.text.stop_scan import StopScan

        return StopScan(
            params.stop,
            self._tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            kept=params.kept_special_tokens,
        )

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        from pinnate.engine.model_text import load_model_text

        return load_model_text(self._model).tokenizer

"""Pinnate: a serving engine for large language models.

    from pinnate import LLM, SamplingParams

The names are resolved on first use, so that `import pinnate` (and with it every command of the CLI) stays light.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pinnate.core.sampling import SamplingParams
    from pinnate.engine.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from pinnate.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from pinnate.core.sampling import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'pinnate' has no attribute {name!r}")

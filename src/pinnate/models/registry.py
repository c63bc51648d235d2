"""The registry of model families: name -> builder of its graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from pinnate.graph import Graph
from pinnate.models import gemma3, llama
from pinnate.models.config import ModelConfig
from pinnate.weights.source import WeightSource

Builder = Callable[[ModelConfig, WeightSource], Graph]

FAMILIES: Mapping[str, Builder] = MappingProxyType(
    {
        "llama": llama.build,
        "mistral": llama.build,
        "qwen2": llama.build,
        "qwen3": llama.build,
        "gemma3": gemma3.build,
    }
)

"""From a path to a ModelConfig, or to a Graph with its weights.

Knows: GGUF files and Hugging Face folders, and which files of a folder describe the model. Must not know: executors,
NumPy. Nothing in a folder is ever executed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from pinnate.core.errors import ModelError
from pinnate.graph import Graph
from pinnate.models.config import ModelConfig
from pinnate.models.fields import Fields
from pinnate.models.registry import FAMILIES
from pinnate.weights.gguf import GGUFFile
from pinnate.weights.safetensors import SafetensorsFolder, printable
from pinnate.weights.source import WeightSource


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """`warnings` are whole sentences for the log. The graph's tensors keep their files mapped."""

    config: ModelConfig
    graph: Graph
    warnings: tuple[str, ...]


def read_config(path: Path | str) -> ModelConfig:
    """The config of a GGUF file or a Hugging Face folder, without touching weights.

    Raises:
        ModelError: no such path, or the description is malformed or not supported.
    """
    path = Path(path)
    return _folder_config(path) if _is_folder(path) else _gguf_config(GGUFFile(path))


def load_model(path: Path | str) -> LoadedModel:
    """The graph of a GGUF file or a Hugging Face folder; weights are mapped, not read.

    Raises:
        ModelError: as read_config; or a tensor is missing, damaged, or of the wrong shape.
    """
    path = Path(path)
    warnings = []
    if _is_folder(path):
        config = _folder_config(path)
        folder = SafetensorsFolder(path)
        weights = WeightSource.from_safetensors(folder)
        if folder.unindexed:
            warnings.append(
                f"{path}: tensors that the index does not place there are not used: {_list(folder.unindexed)}"
            )
    else:
        file = GGUFFile(path)
        config = _gguf_config(file)
        permuted = (config.num_heads, config.num_kv_heads) if config.family == "llama" else None
        weights = WeightSource.from_gguf(file, family=config.family, permuted_heads=permuted)
    graph = FAMILIES[config.family](config, weights)
    unused = weights.finish()
    if unused:
        warnings.append(f"{path}: unknown tensors are not used: {_list(unused)}")
    return LoadedModel(config, graph, tuple(warnings))


def _list(names: list[str], limit: int = 20) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(printable(name) for name in names[:limit]) + more


def _is_folder(path: Path) -> bool:
    if not path.exists():
        raise ModelError(f"{path}: there is no such file or folder")
    return path.is_dir()


def _gguf_config(file: GGUFFile) -> ModelConfig:
    num_tokens = file.metadata.count("tokenizer.ggml.tokens")
    return ModelConfig.from_gguf(file.metadata, where=str(file.path), num_tokens=num_tokens)


def _folder_config(folder: Path) -> ModelConfig:
    config = folder / "config.json"
    entries = _read_json(config)
    if entries is None:
        raise ModelError(f"{config}: the file is missing")
    return ModelConfig.from_hf(entries, where=str(config), eos_token_ids=_extra_eos(folder))


def _extra_eos(folder: Path) -> tuple[int, ...]:
    """End-of-turn tokens that generation_config.json and the tokenizer add to those of config.json.

    Checkpoints are inconsistent about where they say it; a model that is not stopped at one of them runs on into the
    next turn. So all of them count.
    """
    generation = folder / "generation_config.json"
    ids = Fields(str(generation), _read_json(generation) or {}).ids("eos_token_id")
    return ids + _tokenizer_eos(folder)


def _tokenizer_eos(folder: Path) -> tuple[int, ...]:
    """The id of tokenizer_config.json's `eos_token`, as its own list or tokenizer.json's gives it."""
    settings = _read_json(folder / "tokenizer_config.json") or {}
    token = settings.get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        return ()
    listed = settings.get("added_tokens_decoder")
    known = list(listed.items()) if isinstance(listed, dict) else []
    known += [(t.get("id"), t) for t in _added_tokens(folder / "tokenizer.json")]
    return tuple(
        int(key)
        for key, entry in known
        if isinstance(entry, dict) and entry.get("content") == text and str(key).isascii() and str(key).isdigit()
    )[:1]


class _TokenizerFile(msgspec.Struct):
    added_tokens: list[dict[str, object]] = []


def _added_tokens(path: Path) -> list[dict[str, object]]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_TokenizerFile).added_tokens if path.is_file() else []
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path}: malformed: {error}") from None


def _read_json(path: Path) -> dict[str, object] | None:
    """A JSON object; None where there is no such file."""
    if not path.is_file():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, object])
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror or error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path}: malformed: {error}") from None

"""WeightSource: a model's tensors under canonical (Hugging Face) names, each accounted for.

Knows: GGUF's names and the row permutation of its llama files. Must not know: what a tensor is for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import replace

from pinnate.core.errors import ModelError
from pinnate.graph import Tensor
from pinnate.weights.gguf import GGUFFile
from pinnate.weights.safetensors import SafetensorsFolder

_GGUF_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Architectures with norms after their blocks, where names mean other things.
_GGUF_LAYER_OF = {
    "gemma3": _GGUF_LAYER
    | {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
}
_GGUF_LAYER_NAME = re.compile(r"blk\.(\d{1,6})\.(\w+)\.(weight|bias)")


class WeightSource:
    """Hands out each tensor of a model once, and knows what is left. `where` names the file or folder in errors.

    Built by `from_safetensors` or `from_gguf`.
    """

    def __init__(
        self, where: str, names: Collection[str], load: Callable[[str], Tensor], origin: Callable[[str], str]
    ) -> None:
        """`load` makes the tensor of a canonical name, `origin` says where it lies, for errors."""
        self.where = where
        self._names = names
        self._left = dict.fromkeys(names)
        self._load = load
        self._origin = origin

    @classmethod
    def from_safetensors(cls, folder: SafetensorsFolder) -> WeightSource:
        return cls(str(folder.path), folder.names, folder.tensor, folder.origin)

    @classmethod
    def from_gguf(
        cls, file: GGUFFile, *, family: str = "", permuted_heads: tuple[int, int] | None = None
    ) -> WeightSource:
        """`permuted_heads`: the numbers of query and key heads where the file's architecture stores the rows of q and k
        permuted (llama); None elsewhere."""
        originals = {canonical_name(name, family): name for name in file.tensors}

        def load(name: str) -> Tensor:
            tensor = replace(file.tensors[originals[name]], name=name)
            for part, heads in zip(("q_proj", "k_proj"), permuted_heads or (), strict=False):
                if f".self_attn.{part}." in name:
                    return replace(tensor, row_order=interleaved_rows(tensor.shape[0], heads))
            return tensor

        def origin(name: str) -> str:
            return f"{file.path}: tensor {originals.get(name) or gguf_name(name, family)}"

        return cls(str(file.path), originals, load, origin)

    def has(self, name: str) -> bool:
        return name in self._names

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor `name`. A tensor may be taken again (tied weights).

        Raises:
            ModelError: it is missing or has another shape; names file and tensor.
        """
        if name not in self._names:
            raise ModelError(f"{self._origin(name)} is missing")
        tensor = self._load(name)
        if tensor.shape != shape:
            raise ModelError(f"{self._origin(name)} has the shape {list(tensor.shape)}, the config says {list(shape)}")
        self._left.pop(name, None)
        return tensor

    def discard(self, name: str) -> None:
        """Counts `name` as used, there or not: its absence and its presence are both right."""
        self._left.pop(name, None)

    def finish(self) -> list[str]:
        """The names nobody took. Left out: stored rotary frequencies (`inv_freq`), which follow from the config."""
        return [name for name in self._left if not name.endswith("rotary_emb.inv_freq")]


def canonical_name(name: str, family: str = "") -> str:
    """The Hugging Face name of a GGUF tensor; unknown names stay as they are."""
    layer_names = _GGUF_LAYER_OF.get(family, _GGUF_LAYER)
    match = _GGUF_LAYER_NAME.fullmatch(name)
    if match and match[2] in layer_names:
        return f"model.layers.{match[1]}.{layer_names[match[2]]}.{match[3]}"
    return _GGUF_TOP.get(name, name)


def gguf_name(name: str, family: str = "") -> str:
    """The inverse of `canonical_name`."""
    for ours, theirs in _GGUF_TOP.items():
        if theirs == name:
            return ours
    for ours, theirs in _GGUF_LAYER_OF.get(family, _GGUF_LAYER).items():
        match = re.fullmatch(rf"model\.layers\.(\d+)\.{re.escape(theirs)}\.(weight|bias)", name)
        if match:
            return f"blk.{match[1]}.{ours}.{match[2]}"
    return name


def interleaved_rows(rows: int, heads: int) -> tuple[int, ...] | None:
    """Where row i of a q or k matrix lies in a GGUF file of architecture llama.

    Such files are meant for rotating neighbours (2j, 2j+1) of a head; Hugging Face checkpoints, and this engine, rotate
    halves (j, j + d/2). Hence row h*d + p*d/2 + j is stored at h*d + 2*j + p. None where the rows do not divide (the
    shape check then reports it).
    """
    if rows % (2 * heads):
        return None
    size = rows // heads
    half = size // 2
    return tuple(h * size + 2 * j + p for h in range(heads) for p in range(2) for j in range(half))

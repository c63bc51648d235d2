"""Loading a model's text side: tokenizer and chat template, without its weights.

Knows: where a GGUF file and a Hugging Face folder keep them. Must not know: requests, engines.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from pinnate.text.chat_template import ChatTemplate
from pinnate.text.tokenizer import Tokenizer
from pinnate.weights.gguf import GGUFFile


class ModelText(NamedTuple):
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None


def load_model_text(path: str | Path) -> ModelText:
    """
    Raises:
        ModelError: the model's tokenizer or template is missing, corrupt or of an unsupported kind.
    """
    path = Path(path)
    tokenizer = Tokenizer.from_hf(path) if path.is_dir() else Tokenizer.from_gguf(GGUFFile(path).metadata)
    if tokenizer.chat_template is None:
        return ModelText(tokenizer, None)
    template = ChatTemplate(
        tokenizer.chat_template, bos_token=tokenizer.bos_token or "", eos_token=tokenizer.eos_token or ""
    )
    return ModelText(tokenizer, template)

"""Loads a tokenizer from the files of a Hugging Face folder.

Knows: tokenizer.json, tokenizer_config.json, special_tokens_map.json, generation_config.json, chat_template.jinja. Must
not know: weights or the model's shape.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import processors

from pinnate.core.errors import ModelError
from pinnate.text.vocabulary import ByteRule, Vocabulary

_SENTENCEPIECE_STEPS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


def vocabulary_from_hf(folder: Path) -> Vocabulary:
    """Raises ModelError naming the file at fault."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{path} is missing (a tokenizer.model or vocab.txt alone is not supported)")
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the library raises the bare class
        raise ModelError(f"{path} cannot be read: {_one_line(error)}") from None
    backend.no_truncation()
    backend.no_padding()
    rule, strips = _byte_rule(backend, path)
    config = _read_json(folder / "tokenizer_config.json")
    names = {**_read_json(folder / "special_tokens_map.json"), **{k: v for k, v in config.items() if v is not None}}
    added = backend.get_added_tokens_decoder()
    bos_token, eos_token = _token_text(names.get("bos_token")), _token_text(names.get("eos_token"))
    bos = None if bos_token is None else backend.token_to_id(bos_token)
    _apply_add_bos(backend, config.get("add_bos_token"), bos_token, bos)
    return Vocabulary(
        backend=backend,
        byte_rule=rule,
        size=max(backend.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1),
        added={index: token.content for index, token in added.items()},
        special=frozenset(index for index, token in added.items() if token.special),
        strips_leading_space=strips,
        bos_token=bos_token,
        eos_token=eos_token,
        bos_token_id=bos,
        eos_token_ids=_ends(folder, None if eos_token is None else backend.token_to_id(eos_token)),
        chat_template=_chat_template(folder, config),
    )


def _byte_rule(backend: Backend, path: Path) -> tuple[ByteRule, bool]:
    """How the file's decoder spells bytes, and whether it drops a space at the start of a text."""
    # Only the decoder's own description is parsed: the whole file as JSON again would cost as much as loading it.
    description = None if backend.decoder is None else json.loads(backend.decoder.__getstate__())
    steps = _flatten(description)
    kinds = {step.get("type") for step in steps}
    if kinds == {"ByteLevel"}:
        return ByteRule.BYTE_LEVEL, False
    if kinds and kinds <= _SENTENCEPIECE_STEPS:
        strips = any(step["type"] == "Strip" and step.get("start", 0) > 0 for step in steps) or any(
            step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never" for step in steps
        )
        return ByteRule.SENTENCEPIECE, strips
    raise ModelError(
        f"{path}: decoder {sorted(str(kind) for kind in kinds) or 'none'} is not supported "
        "(supported: ByteLevel, SentencePiece-style)"
    )


def _flatten(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    if decoder.get("type") == "Sequence":
        return [step for inner in decoder.get("decoders", []) for step in _flatten(inner)]
    return [decoder]


def _apply_add_bos(backend: Backend, wanted: object, bos_token: str | None, bos: int | None) -> None:
    """An explicit `add_bos_token` overrules the post-processor of tokenizer.json."""
    if not isinstance(wanted, bool) or bos_token is None or bos is None:
        return
    adds = backend.encode("", add_special_tokens=True).ids[:1] == [bos]
    if wanted and not adds:
        backend.post_processor = processors.TemplateProcessing(
            single=[bos_token, "$A"], special_tokens=[(bos_token, bos)]
        )
    elif adds and not wanted:
        backend.post_processor = processors.TemplateProcessing(single=["$A"], special_tokens=[])


def _ends(folder: Path, eos: int | None) -> tuple[int, ...]:
    """The tokenizer's EOS and those of generation_config.json (an id or a list); config.json where that has none."""
    ids = _as_ids(_read_json(folder / "generation_config.json").get("eos_token_id"))
    ids = ids or _as_ids(_read_json(folder / "config.json").get("eos_token_id"))
    return tuple(dict.fromkeys(ids if eos is None else [eos, *ids]))


def _as_ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [index for index in values if isinstance(index, int) and not isinstance(index, bool) and index >= 0]


def _token_text(value: object) -> str | None:
    """A token is written as its text or as an object that holds it."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja first; else the string, or the one named "default", in tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return _read_text(path)
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, Mapping)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {_one_line(error)}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return value


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {_one_line(error)}") from None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]

"""Builds a tokenizer from the `tokenizer.*` metadata of a GGUF file.

Knows: the keys and their types, pre-tokenizers by name, SentencePiece scores. Must not know: how the file is read.
Key names and token types: the GGUF specification (ggml project, docs/gguf.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from pinnate.core.errors import ModelError
from pinnate.text.vocabulary import SPACE_MARK, ByteRule, Vocabulary

T = TypeVar("T")

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # tokenizer.ggml.token_type; 1 normal, 5 unused, 6 byte

# Splitting rules as the models' own tokenizer files have them; a list of names only holds what is known to be the same.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
_GPT2_LIKE = ("gpt-2", "gpt2", "default")
_SINGLE_DIGITS = ("smollm", "starcoder")
_LLAMA3_LIKE = ("llama-bpe", "llama3", "llama-v3")
_QWEN2_LIKE = ("qwen2",)

# Ends of a turn that files often leave out of their metadata; used where the chat template writes them.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")


def vocabulary_from_gguf(metadata: Mapping[str, Any]) -> Vocabulary:
    """Raises ModelError naming the key at fault."""
    kind = _get(metadata, "tokenizer.ggml.model", str)
    tokens = _array(metadata, "tokenizer.ggml.tokens")
    types = _array(metadata, "tokenizer.ggml.token_type", len(tokens), required=False) or [1] * len(tokens)
    if kind == "gpt2":
        pre = _get(metadata, "tokenizer.ggml.pre", str, "default")
        backend = _byte_level_bpe(metadata, tokens, pre)
        rule, space_prefix, bos_default = ByteRule.BYTE_LEVEL, False, pre in _LLAMA3_LIKE
    elif kind == "llama":
        space_prefix = _get(metadata, "tokenizer.ggml.add_space_prefix", bool, True)
        backend = _sentencepiece_bpe(metadata, tokens, types, space_prefix=space_prefix)
        rule, bos_default = ByteRule.SENTENCEPIECE, True
    else:
        raise ModelError(f"tokenizer.ggml.model {kind!r} is not supported (supported: gpt2, llama)")
    added = _add_tokens(backend, tokens, types)
    special = frozenset(i for i in added if types[i] != _USER_DEFINED)
    bos = _token_id(metadata, "bos", len(tokens))
    eos = _token_id(metadata, "eos", len(tokens))
    template = _get(metadata, "tokenizer.chat_template", str, "") or None
    add_bos = _get(metadata, "tokenizer.ggml.add_bos_token", bool, bos_default)
    add_eos = _get(metadata, "tokenizer.ggml.add_eos_token", bool, False)
    before = [(tokens[bos], bos)] if add_bos and bos is not None else []
    after = [(tokens[eos], eos)] if add_eos and eos is not None else []
    _frame(backend, before, after)
    return Vocabulary(
        backend=backend,
        byte_rule=rule,
        size=len(tokens),
        added=added,
        special=special,
        strips_leading_space=space_prefix,
        bos_token=None if bos is None else tokens[bos],
        eos_token=None if eos is None else tokens[eos],
        bos_token_id=bos,
        eos_token_ids=_ends(metadata, {added[i]: i for i in special}, len(tokens), template),
        chat_template=template,
    )


def _byte_level_bpe(metadata: Mapping[str, Any], tokens: list[str], pre: str) -> Backend:
    merges = [_pair(merge) for merge in _array(metadata, "tokenizer.ggml.merges")]
    backend = Backend(_bpe(tokens, merges, ignore_merges=pre in _LLAMA3_LIKE))
    backend.pre_tokenizer = _pre_tokenizer(pre)
    if pre in _QWEN2_LIKE:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not left or not right or " " in right:
        raise ModelError(f"tokenizer.ggml.merges: {merge!r} is not two tokens and a blank between")
    return left, right


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    if pre in _GPT2_LIKE:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in _SINGLE_DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    if pre in _LLAMA3_LIKE or pre in _QWEN2_LIKE:
        split = Regex(_LLAMA3_SPLIT if pre in _LLAMA3_LIKE else _QWEN2_SPLIT)
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(split, behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    known = ", ".join((*_GPT2_LIKE, *_SINGLE_DIGITS, *_LLAMA3_LIKE, *_QWEN2_LIKE))
    raise ModelError(f"tokenizer.ggml.pre {pre!r} is not supported (supported: {known})")


def _sentencepiece_bpe(
    metadata: Mapping[str, Any], tokens: list[str], types: Sequence[int], *, space_prefix: bool
) -> Backend:
    scores = _array(metadata, "tokenizer.ggml.scores", len(tokens))
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    mergeable = {token: i for i, token in enumerate(tokens) if types[i] not in (_UNKNOWN, _CONTROL)}
    backend = Backend(_bpe(tokens, merges_from_scores(mergeable, scores), unk_token=unknown, byte_fallback=True))
    # As in the tokenizer files of this family: each stretch of text between special tokens gets the prefix.
    mark = normalizers.Replace(" ", SPACE_MARK)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), mark]) if space_prefix else mark
    steps = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if space_prefix else steps)
    return backend


def merges_from_scores(vocab: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merge list that makes BPE choose as SentencePiece does: the pair whose union has the best score first.

    SentencePiece (Kudo and Richardson 2018) keeps no merges: any two neighbours whose union is in the vocabulary may
    merge. Every split of every token is therefore a merge.
    """
    ranked: list[tuple[float, int, tuple[str, str]]] = []
    for token, index in vocab.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocab and right in vocab:
                ranked.append((-scores[index], index, (left, right)))
    ranked.sort(key=lambda entry: entry[:2])
    return [pair for _, _, pair in ranked]


def _bpe(
    tokens: list[str],
    merges: Sequence[tuple[str, str]],
    *,
    unk_token: str | None = None,
    byte_fallback: bool = False,
    ignore_merges: bool = False,
) -> models.BPE:
    vocab = dict(zip(tokens, range(len(tokens)), strict=True))
    try:
        return models.BPE(
            vocab,
            merges,
            unk_token=unk_token,
            fuse_unk=unk_token is not None,
            byte_fallback=byte_fallback,
            ignore_merges=ignore_merges,
        )
    except Exception as error:  # the library raises the bare class: a merge names a token that does not exist
        raise ModelError(f"tokenizer.ggml.merges does not fit tokenizer.ggml.tokens: {error}") from None


def _add_tokens(backend: Backend, tokens: list[str], types: Sequence[int]) -> dict[int, str]:
    """Registers the tokens that text is searched for before BPE; they keep their ids."""
    added = {i: tokens[i] for i, kind in enumerate(types) if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and tokens[i]}
    backend.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for i, text in added.items() if types[i] != _USER_DEFINED]
    )
    backend.add_tokens(
        [AddedToken(text, special=False, normalized=False) for i, text in added.items() if types[i] == _USER_DEFINED]
    )
    return added


def _frame(backend: Backend, before: list[tuple[str, int]], after: list[tuple[str, int]]) -> None:
    """Makes `encode` put these tokens around a text where special tokens are asked for."""
    if before or after:
        template = [*(text for text, _ in before), "$A", *(text for text, _ in after)]
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=[*before, *after])


def _ends(metadata: Mapping[str, Any], special: Mapping[str, int], size: int, template: str | None) -> tuple[int, ...]:
    named = (_token_id(metadata, name, size) for name in ("eos", "eot", "eom"))
    written = (special.get(text) for text in _TURN_ENDS if template is not None and text in template)
    return tuple(dict.fromkeys(i for i in (*named, *written) if i is not None))


def _token_id(metadata: Mapping[str, Any], name: str, size: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    index = _get(metadata, key, int, -1)
    if key in metadata and not 0 <= index < size:
        raise ModelError(f"{key} is {index}, but the vocabulary has {size} tokens")
    return index if key in metadata else None


def _get(metadata: Mapping[str, Any], key: str, kind: type[T], default: T | None = None) -> T:
    value = metadata.get(key, default)
    if value is None:
        raise ModelError(f"{key} is missing")
    if not isinstance(value, kind):
        raise ModelError(f"{key} must be of type {kind.__name__}, got {type(value).__name__}")
    return value


def _array(metadata: Mapping[str, Any], key: str, length: int | None = None, *, required: bool = True) -> list[Any]:
    value = metadata.get(key)
    if value is None and not required:
        return []
    if value is None:
        raise ModelError(f"{key} is missing")
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ModelError(f"{key} must be an array, got {type(value).__name__}")
    if length is not None and len(value) != length:
        raise ModelError(f"{key} has {len(value)} entries for {length} tokens")
    return list(value)

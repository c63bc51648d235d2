import threading
import time

import pytest

from pinnate.core.errors import InvalidRequestError, ModelError
from pinnate.text.gguf_tokenizer import merges_from_scores
from pinnate.text.tokenizer import Tokenizer
from tests.unit.text.helpers import (
    CONTROL,
    byte_level_metadata,
    byte_level_tokenizer,
    default_tokenizer,
    recorded,
    sentencepiece_metadata,
    sentencepiece_tokenizer,
    splits_differently,
)


def test_default_model_facts() -> None:
    tokenizer = default_tokenizer()
    assert tokenizer.vocab_size == 49152
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.bos_token_id == 1
    assert tokenizer.chat_template is not None
    assert [i for i in range(49152) if tokenizer.is_special(i)] == list(range(17))
    assert tokenizer.encode("1, 2, 3,") == [33, 28, 216, 34, 28, 216, 35, 28]  # no BOS
    assert tokenizer.encode("😀") == [10813, 242, 218]
    assert tokenizer.token_bytes(242) + tokenizer.token_bytes(218) == "😀".encode()[-2:]


def test_default_model_ids_equal_the_recorded_ones() -> None:
    tokenizer = default_tokenizer()
    cases = [case for case in recorded("smollm2_ids.json")["cases"] if not splits_differently(case[0])]
    assert len(cases) > 150
    for text, ids in cases:
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("text", ["x  123", "\n\n12", " 1²½", "a\t\t9 8"])
def test_digits_are_taken_alone_before_blanks_are_split(text: str) -> None:
    tokenizer = default_tokenizer()
    parts = "".join(f"|{char}|" if char.isnumeric() else char for char in text).split("|")
    assert tokenizer.encode(text) == [token for part in parts for token in tokenizer.encode(part)]


def test_special_tokens_inside_text_are_parsed() -> None:
    tokenizer = default_tokenizer()
    assert tokenizer.encode("a<|im_end|>b") == [*tokenizer.encode("a"), 2, *tokenizer.encode("b")]
    assert tokenizer.decode([1, 33, 2]) == "1"
    assert tokenizer.decode([1, 33, 2], skip_special_tokens=False) == "<|im_start|>1<|im_end|>"


def test_user_defined_tokens_are_parsed_but_not_hidden() -> None:
    tokenizer = byte_level_tokenizer()
    tool = tokenizer.token_id("<tool>")
    assert tool is not None
    assert tokenizer.encode("x<tool>") == [ord("x"), tool]
    assert not tokenizer.is_special(tool)
    assert tokenizer.decode([tool]) == "<tool>"


def test_ids_that_name_no_token_are_empty() -> None:
    tokenizer = byte_level_tokenizer()
    assert tokenizer.decode([tokenizer.vocab_size, 10**9, -1, ord("x")]) == "x"
    assert tokenizer.token_id("no such token") is None


def test_lone_surrogates_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="surrogate"):
        byte_level_tokenizer().encode("a\ud800b")


def test_encoding_a_long_text_releases_the_gil() -> None:
    tokenizer, ticks, done = default_tokenizer(), 0, threading.Event()
    text = "".join(f"Some words, number {i}. " for i in range(30_000))

    def encode() -> None:
        tokenizer.encode(text)
        done.set()

    thread = threading.Thread(target=encode)
    thread.start()
    while not done.is_set():
        time.sleep(0.001)
        ticks += 1
    thread.join()
    assert ticks > 10  # with the GIL held there would be one or two


def test_bos_is_added_once() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata(add_bos_token=True))
    bos = tokenizer.bos_token_id
    assert tokenizer.encode("x") == [bos, ord("x")]
    assert tokenizer.encode("<|start|>x") == [bos, ord("x")]
    assert tokenizer.encode("<|start|>x", add_special_tokens=False) == [bos, ord("x")]
    assert tokenizer.encode("x", add_special_tokens=False) == [ord("x")]


def test_two_bos_in_a_text_stay_where_none_is_added() -> None:
    tokenizer = byte_level_tokenizer()
    assert tokenizer.encode("<|start|><|start|>") == [tokenizer.bos_token_id] * 2


def test_add_eos_token() -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata(add_eos_token=True))
    assert tokenizer.encode("x") == [ord("x"), tokenizer.eos_token_ids[0]]


def test_ends_of_turn() -> None:
    tokens = byte_level_metadata()["tokenizer.ggml.tokens"]
    start, end, im_end = (tokens.index(text) for text in CONTROL)
    assert Tokenizer.from_gguf(byte_level_metadata()).eos_token_ids == (end,)
    assert Tokenizer.from_gguf(byte_level_metadata(eot_token_id=start)).eos_token_ids == (end, start)
    by_template = byte_level_metadata(chat_template="{{ 'x' + '<|im_end|>' }}")
    assert Tokenizer.from_gguf(by_template).eos_token_ids == (end, im_end)
    assert Tokenizer.from_gguf(byte_level_metadata(eos_token_id=None)).eos_token_ids == ()


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "a 12345", [1, 6]),
        ("smollm", "a 123", [1, 1, 1, 1, 1]),
        ("llama-bpe", "a 12345", [1, 1, 3, 2]),
        ("qwen2", "a 123", [1, 1, 1, 1, 1]),
        ("llama-bpe", "I'LL go\n\n x", [1, 3, 3, 2, 2]),
    ],
)
def test_pre_tokenizers_split_as_the_models_do(pre: str, text: str, pieces: list[int]) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata(pre=pre))
    backend = tokenizer._vocabulary.backend
    assert [len(piece) for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)] == pieces
    assert tokenizer.decode(tokenizer.encode(text)).endswith(text)


def test_qwen2_composes_characters_and_llama3_adds_bos() -> None:
    qwen = Tokenizer.from_gguf(byte_level_metadata(pre="qwen2"))
    assert qwen.decode(qwen.encode("e\u0301")) == "\u00e9"
    llama = Tokenizer.from_gguf(byte_level_metadata(pre="llama-bpe"))
    assert llama.encode("x")[0] == llama.bos_token_id


def test_sentencepiece_ids_and_text_equal_the_recorded_ones() -> None:
    tokenizer = sentencepiece_tokenizer()
    for text, ids, back in recorded("sentencepiece.json")["cases"]:
        assert tokenizer.encode(text, add_special_tokens=False) == ids, text
        assert tokenizer.encode(text) == [1, *ids]
        assert tokenizer.decode(ids) == back


def test_sentencepiece_without_a_space_prefix() -> None:
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata(add_space_prefix=False, add_bos_token=False))
    assert tokenizer.decode(tokenizer.encode("in er")) == "in er"
    assert tokenizer.decode(tokenizer.encode(" in")) == " in"
    assert not tokenizer.strips_leading_space


def test_merges_from_scores_prefer_the_better_union() -> None:
    vocab = {"a": 0, "b": 1, "ab": 2, "aba": 3, "ba": 4}
    assert merges_from_scores(vocab, [0.0, 0.0, -2.0, -3.0, -1.0]) == [("b", "a"), ("a", "b"), ("a", "ba"), ("ab", "a")]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": None}, "tokenizer.ggml.model is missing"),
        ({"model": "t5"}, "'t5' is not supported"),
        ({"model": 3}, "must be of type str"),
        ({"pre": "tekken"}, "tokenizer.ggml.pre 'tekken' is not supported"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": "abc"}, "must be an array"),
        ({"token_type": [1]}, "token_type has 1 entries"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"merges": ["h e", "x"]}, "not two tokens"),
        ({"merges": ["zz zz"]}, "does not fit"),
        ({"eos_token_id": 10**6}, "eos_token_id is 1000000"),
        ({"bos_token_id": "x"}, "must be of type int"),
        ({"add_bos_token": 1}, "must be of type bool"),
    ],
)
def test_malformed_metadata_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        Tokenizer.from_gguf(byte_level_metadata(**changes))
    assert "\n" not in str(caught.value)


def test_sentencepiece_needs_a_score_for_each_token() -> None:
    with pytest.raises(ModelError, match="scores has 2 entries"):
        Tokenizer.from_gguf(sentencepiece_metadata(scores=[0.0, 1.0]))

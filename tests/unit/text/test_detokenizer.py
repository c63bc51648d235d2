from pinnate.text.detokenizer import IncrementalDetokenizer
from tests.unit.text.helpers import byte_level_tokenizer, default_tokenizer, sentencepiece_tokenizer


def byte_ids(data: bytes) -> list[int]:
    return list(data)  # ids 0..255 of the small vocabulary are the bytes


def test_a_character_split_over_tokens_is_held_until_it_is_whole() -> None:
    detokenizer = IncrementalDetokenizer(default_tokenizer())
    assert [detokenizer.push([token]) for token in (24488, 233, 10813, 242, 218)] == [" ", "ď", "", "", "😀"]
    assert detokenizer.finish() == ""


def test_a_truncated_character_becomes_one_replacement_at_the_end() -> None:
    detokenizer = IncrementalDetokenizer(byte_level_tokenizer())
    assert detokenizer.push(byte_ids("a😀".encode()[:-1])) == "a"
    assert detokenizer.finish() == "\ufffd"


def test_an_invalid_byte_is_shown_as_soon_as_it_is_certain() -> None:
    detokenizer = IncrementalDetokenizer(byte_level_tokenizer())
    assert detokenizer.push(byte_ids(b"\xff")) == "\ufffd"
    assert detokenizer.push(byte_ids(b"\xe6")) == ""
    assert detokenizer.push(byte_ids(b"x")) == "\ufffdx"
    assert detokenizer.push(byte_ids(b"\xf0\x9f")) == ""
    assert detokenizer.push(byte_ids(b"\xc3")) == "\ufffd"
    assert detokenizer.push(byte_ids(b"\xa9")) == "é"


def test_special_tokens_are_hidden_or_shown() -> None:
    tokenizer = byte_level_tokenizer()
    ids = tokenizer.encode("a<|end|>b<tool>")
    assert IncrementalDetokenizer(tokenizer).push(ids) == "ab<tool>"
    assert IncrementalDetokenizer(tokenizer, skip_special_tokens=False).push(ids) == "a<|end|>b<tool>"


def test_a_hidden_token_does_not_break_a_character() -> None:
    tokenizer = byte_level_tokenizer()
    first, second = byte_ids("é".encode())
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert detokenizer.push([first]) == ""
    assert detokenizer.push(tokenizer.encode("<|end|>")) == ""
    assert detokenizer.push([second]) == "é"


def test_sentencepiece_drops_one_space_at_the_start_only() -> None:
    tokenizer = sentencepiece_tokenizer()
    ids = tokenizer.encode("in order", add_special_tokens=False)
    for continuation, expected in ((False, "in order"), (True, " in order")):
        detokenizer = IncrementalDetokenizer(tokenizer, continuation=continuation)
        assert "".join(detokenizer.push([token]) for token in ids) == expected


def test_sentencepiece_joins_byte_tokens_to_characters() -> None:
    tokenizer = sentencepiece_tokenizer()
    ids = [tokenizer.token_id(f"<0x{byte:02X}>") for byte in "汉".encode()]
    detokenizer = IncrementalDetokenizer(tokenizer, continuation=True)
    assert [detokenizer.push([token]) for token in ids if token is not None] == ["", "", "汉"]


def test_nothing_pushed_is_nothing_out() -> None:
    detokenizer = IncrementalDetokenizer(byte_level_tokenizer())
    assert detokenizer.push([]) == ""
    assert detokenizer.finish() == ""

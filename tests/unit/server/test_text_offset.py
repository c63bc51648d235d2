"""text_offset: where in the choice's text each token begins, whatever the tokenizer does to a text."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pinnate.server.logprobs import LogprobsWriter, echo_offsets
from pinnate.text.detokenizer import IncrementalDetokenizer
from pinnate.text.tokenizer import Tokenizer
from tests.unit.server.conftest import ByteTokenizer, Client, FakeEngine, make_client, score
from tests.unit.text.helpers import default_tokenizer, sentencepiece_tokenizer


def prompt_offsets(tokenizer: Tokenizer, token_ids: list[int], text: str) -> list[int]:
    return echo_offsets([(tokenizer.token_bytes(token), tokenizer.is_special(token)) for token in token_ids], text)


def output(tokenizer: Tokenizer, token_ids: list[int], *, skip: bool, cuts: list[int]) -> tuple[str, list[int]]:
    """The text of a choice and its offsets, written in the runs that `cuts` end."""
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip, continuation=True)
    writer = LogprobsWriter(tokenizer, skip_special_tokens=skip)
    offsets: list[int] = []
    for start, end in zip([0, *cuts], [*cuts, len(token_ids)], strict=True):
        run = token_ids[start:end]
        offsets += writer.write([score(token) for token in run], run).text_offset
    return detokenizer.push(token_ids) + detokenizer.finish(), offsets


TOKENS = st.lists(st.integers(0, default_tokenizer().vocab_size - 1), min_size=1, max_size=20)
BROKEN = st.lists(st.sampled_from([10813, 242, 218, 143, 233, 1792, 28, 0]), min_size=1, max_size=20)  # parts of 😀, ď


@settings(deadline=None)
@given(TOKENS | BROKEN, st.booleans(), st.data())
def test_tokens_begin_where_their_text_is(token_ids: list[int], skip: bool, data: st.DataObject) -> None:
    tokenizer = default_tokenizer()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(token_ids)), max_size=4)))
    text, offsets = output(tokenizer, token_ids, skip=skip, cuts=cuts)
    assert offsets == sorted(offsets)
    for place, (token, offset) in enumerate(zip(token_ids, offsets, strict=True)):
        before = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip, continuation=True)
        prefix = before.push(token_ids[:place]) + before.finish()
        assert offset == len(prefix)
        shown = not (skip and tokenizer.is_special(token))
        piece = tokenizer.token_bytes(token).decode("utf-8", "replace")
        if shown and "\ufffd" not in piece:
            assert text[offset:].startswith(piece)


@settings(deadline=None)
@given(st.text(max_size=30) | st.lists(st.sampled_from(["<s>", "</s>", "▁", " ", "a", "é", "😀"])).map("".join))
def test_an_echoed_text_of_sentencepiece(text: str) -> None:
    """It puts a token in front and a blank before the first word; neither is in the text."""
    tokenizer = sentencepiece_tokenizer()
    token_ids = tokenizer.encode(text)
    offsets = prompt_offsets(tokenizer, token_ids, text)
    assert offsets == sorted(offsets)
    assert offsets[:2] in ([0], [0, 0]) or text.startswith("<s>")
    assert all(offset <= len(text) for offset in offsets)


def test_a_token_in_front_has_no_characters() -> None:
    tokenizer = sentencepiece_tokenizer()
    text = "the the the"
    token_ids = tokenizer.encode(text)
    assert tokenizer.is_special(token_ids[0])
    pieces = [tokenizer.token_bytes(token).decode() for token in token_ids]
    for piece, offset in list(zip(pieces, prompt_offsets(tokenizer, token_ids, text), strict=True))[1:]:
        assert text[offset:].startswith(piece if offset else piece.lstrip())


def test_ids_are_decoded_with_their_special_tokens() -> None:
    tokenizer = sentencepiece_tokenizer()
    token_ids = tokenizer.encode("the the")
    text = tokenizer.decode(token_ids, skip_special_tokens=False)
    offsets = prompt_offsets(tokenizer, token_ids, text)
    assert (offsets[0], offsets[1]) == (0, len("<s>"))
    assert text[offsets[-1] :].strip() in ("the", "e")


def test_changed_parts_shift_nothing_behind_them() -> None:
    tokens = [(b"<s>", True), (b" fi", False), (b"x", False), (b" it", False), (b",", False), (b" now", False)]
    assert echo_offsets(tokens, "\ufb01x it, now") == [0, 0, 1, 2, 5, 6]
    assert echo_offsets([(b"a", False), (b"<s>", True), (b"b", False)], "a then <s> b") == [0, 1, 11]


def test_a_special_token_that_was_written_is_in_the_text() -> None:
    tokenizer = default_tokenizer()
    text = "a<|im_start|>b"
    assert prompt_offsets(tokenizer, tokenizer.encode(text), text) == [0, 1, 13]


class WithStart(ByteTokenizer):
    """Puts its special token in front of each text, as most models' tokenizers do."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [*([0] if add_special_tokens else []), *text.encode()]

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:  # noqa: ARG002
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")


async def check(client: Client, prompt: object, text: str, expected: list[int]) -> None:
    fields = {"prompt": prompt, "echo": True, "logprobs": 0}
    plain = (await client.complete(**fields)).json["choices"][0]
    assert (plain["text"], plain["logprobs"]["text_offset"]) == (text, expected)
    chunks = [event["choices"][0] for event in (await client.complete(stream=True, **fields)).events()[:-1]]
    streamed = [offset for chunk in chunks if chunk["logprobs"] for offset in chunk["logprobs"]["text_offset"]]
    assert ("".join(chunk["text"] for chunk in chunks), streamed) == (text, expected)


async def test_echo_over_http() -> None:
    from pinnate.core.request import FinishReason
    from pinnate.engine.output_processor import OutputDelta

    def script(number: int, params: object) -> list[OutputDelta]:  # noqa: ARG001
        size = len(client.engine.submitted[-1].prompt)
        scores = [None, *(score(token) for token in client.engine.submitted[-1].prompt[1:])]
        assert len(scores) == size
        return [
            OutputDelta(0, "o", [111], [score(111)], prompt_logprobs=scores),  # type: ignore[arg-type]
            OutputDelta(0, "k", [107], [score(107)], FinishReason.LENGTH),
        ]

    client = make_client(FakeEngine(script=script, tokenizer=WithStart()))
    await check(client, "hé", "héok", [0, 0, 1, 2, 2, 3])
    await check(client, [0, 104, 195, 169], "<eos>héok", [0, 5, 6, 7, 7, 8])
    await check(client, [169, 104], "\ufffdhok", [0, 1, 2, 3])
    await check(client, [104, 195], "h\ufffdok", [0, 1, 2, 3])

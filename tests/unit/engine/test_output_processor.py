"""Text, tokens and log-probabilities that a client sees, and how a choice ends."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tests.fakes import EOS, PAD, ByteTokenizer, make_request

from pinnate.core.batch import TokenLogprobs
from pinnate.core.errors import EngineError
from pinnate.core.messages import TokenOutput
from pinnate.core.request import FinishReason
from pinnate.engine.output_processor import OutputDelta, OutputProcessor


def processor(**sampling: object) -> OutputProcessor:
    return OutputProcessor(make_request("r", [1], eos_token_ids=(EOS,), **sampling), ByteTokenizer())


def output(tokens: bytes | Sequence[int], end: FinishReason | None = None, **fields: object) -> TokenOutput:
    return TokenOutput("r", fields.pop("index", 0), list(tokens), finish_reason=end, **fields)


def run(p: OutputProcessor, *outputs: TokenOutput) -> tuple[OutputDelta, list[bool]]:
    """All deltas merged, and which outputs asked for an abort."""
    merged, aborts = None, []
    for out in outputs:
        delta, stop = p.push(out)
        aborts.append(stop)
        if delta is not None:
            merged = delta if merged is None else merged.merged_with(delta)
    assert merged is not None
    return merged, aborts


def test_eos_is_kept_as_a_token_but_not_as_text() -> None:
    p = processor()
    delta, aborts = run(p, output(b"hi"), output([EOS], FinishReason.STOP, stop_token=EOS))
    assert (delta.text, delta.token_ids) == ("hi", [*b"hi", EOS])
    assert (delta.finish_reason, delta.stop_reason) == (FinishReason.STOP, None)
    assert p.is_finished
    assert aborts == [False, False]


def test_eos_is_no_text_even_if_special_tokens_are() -> None:
    delta, _ = run(
        processor(skip_special_tokens=False), output([PAD]), output([EOS], FinishReason.STOP, stop_token=EOS)
    )
    assert delta.text == "<pad>"


def test_special_tokens_are_skipped() -> None:
    delta, _ = run(processor(), output([97, PAD, 98]))
    assert (delta.text, delta.token_ids) == ("ab", [97, PAD, 98])


def test_ignored_eos_goes_on() -> None:
    p = processor(ignore_eos=True)
    delta, _ = run(p, output([97, EOS, 98], FinishReason.LENGTH))
    assert (delta.text, delta.finish_reason) == ("ab", FinishReason.LENGTH)


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "ab")])
def test_stop_token(include: bool, text: str) -> None:
    p = processor(stop_token_ids=(98,), include_stop_str_in_output=include)
    delta, _ = run(p, output(b"ab", FinishReason.STOP, stop_token=98))
    assert (delta.text, delta.token_ids, delta.stop_reason) == (text, [97, 98], 98)


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "ab##")])
def test_stop_string_across_outputs(include: bool, text: str) -> None:
    p = processor(stop=("##",), include_stop_str_in_output=include)
    delta, aborts = run(p, output(b"ab"), output(b"#"), output(b"#"))
    assert (delta.text, delta.token_ids) == (text, list(b"ab##"))
    assert (delta.finish_reason, delta.stop_reason) == (FinishReason.STOP, "##")
    assert aborts == [False, False, True]
    assert p.is_finished


def test_no_part_of_a_stop_string_leaks() -> None:
    p = processor(stop=("abc",))
    assert p.push(output(b"xab"))[0].text == "x"
    assert p.push(output(b"z"))[0].text == "abz"


def test_tokens_after_a_stop_string_are_dropped_with_their_logprobs() -> None:
    p = processor(stop=("b",), logprobs=0)
    delta, _ = run(p, output(b"abcd", logprobs=[TokenLogprobs(t, -0.5, 1) for t in b"abcd"]))
    assert (delta.text, delta.token_ids) == ("a", list(b"ab"))
    assert [entry.token_id for entry in delta.logprobs] == list(b"ab")


def test_outputs_after_the_end_are_ignored() -> None:
    p = processor(stop=("b",))
    run(p, output(b"ab"))
    assert p.push(output(b"c")) == (None, False)
    assert p.push(output(b"", FinishReason.ABORT)) == (None, False)


def test_held_text_comes_with_the_end() -> None:
    p = processor(stop=("abc",))
    delta, aborts = run(p, output(b"xab"), output(b"", FinishReason.LENGTH))
    assert (delta.text, delta.finish_reason, aborts) == ("xab", FinishReason.LENGTH, [False, False])


def test_a_character_cut_off_by_the_end() -> None:
    p = processor()
    assert p.push(output(b"a\xc3"))[0].text == "a"
    delta, _ = p.push(output(b"", FinishReason.LENGTH))
    assert delta.text == "\ufffd"


def test_stop_string_in_the_very_last_token_beats_length() -> None:
    p = processor(stop=("c",))
    delta, aborts = run(p, output(b"ab"), output(b"c", FinishReason.LENGTH))
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("ab", FinishReason.STOP, "c")
    assert aborts == [False, False]  # the engine has ended it already


def test_stop_strings_wait_for_min_tokens() -> None:
    p = processor(stop=("a",), min_tokens=3)
    delta, _ = run(p, output(b"aaxba"))
    assert (delta.text, delta.stop_reason) == ("aaxb", "a")


def test_choices_are_independent() -> None:
    p = processor(n=2, stop=("#",))
    _, first = run(p, output(b"a#", index=1))
    assert first == [True]
    assert not p.is_finished
    delta, _ = run(p, output(b"bc", FinishReason.LENGTH, index=0))
    assert delta.text == "bc"
    assert p.is_finished


def test_failed_request() -> None:
    with pytest.raises(EngineError, match="out of luck"):
        processor().push(output(b"", FinishReason.ERROR, error="out of luck"))


def test_merge() -> None:
    first = OutputDelta(1, "a", [1], [TokenLogprobs(1, -1.0, 1)], num_cached_tokens=7, prompt_logprobs=[None])
    last = OutputDelta(1, "b", [2, 3], [TokenLogprobs(2, -1.0, 1)], FinishReason.STOP, "x")
    merged = first.merged_with(last)
    assert (merged.text, merged.token_ids, merged.num_cached_tokens) == ("ab", [1, 2, 3], 7)
    assert [entry.token_id for entry in merged.logprobs] == [1, 2]
    assert (merged.finish_reason, merged.stop_reason, merged.prompt_logprobs) == (FinishReason.STOP, "x", [None])

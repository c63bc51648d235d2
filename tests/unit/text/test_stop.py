import pytest

from pinnate.text.stop import StopMatcher


def feed(matcher: StopMatcher, *pieces: str) -> tuple[list[str], str | None]:
    """(what each piece let out, the stop string that ended it); finishes the matcher if none did."""
    out: list[str] = []
    for piece in pieces:
        text, matched = matcher.push(piece)
        out.append(text)
        if matched is not None:
            return out, matched
    out.append(matcher.finish())
    return out, None


def test_the_beginning_of_a_stop_string_is_held_back() -> None:
    pieces = [" ", "8", ",", " ", "9", ",", " ", "1", "0", ","]
    assert feed(StopMatcher(["10"]), *pieces) == ([" ", "8", ",", " ", "9", ",", " ", "", ""], "10")


def test_held_text_comes_out_when_it_turns_out_to_be_harmless() -> None:
    assert feed(StopMatcher(["10"]), "1", "1", "2", "1") == (["", "1", "12", "", "1"], None)


def test_a_stop_string_inside_or_over_several_pieces() -> None:
    assert feed(StopMatcher(["EF"]), "DEFGH") == (["D"], "EF")
    assert feed(StopMatcher(["DEFGHIJ"]), "DEF", "GH", "I", "J", "K") == (["", "", "", ""], "DEFGHIJ")


def test_the_one_complete_first_wins() -> None:
    out, matched = feed(StopMatcher(["9, 10", "9, 1"]), " ", "8", ",", " ", "9", ",", " ", "1", "0")
    assert ("".join(out), matched) == (" 8, ", "9, 1")
    assert feed(StopMatcher(["bcde", "cd"]), "abcdef") == (["ab"], "cd")


def test_of_those_complete_together_the_longest_wins() -> None:
    for stop in (["d", "bcd", "cd"], ["bcd", "cd", "d"]):
        assert feed(StopMatcher(stop), "ab", "cd") == (["a", ""], "bcd")


def test_include_keeps_the_stop_string_and_holds_nothing() -> None:
    assert feed(StopMatcher(["10"], include=True), "9, 1", "0, 11") == (["9, 1", "0"], "10")
    assert feed(StopMatcher(["10"], include=True), "1", "1") == (["1", "1", ""], None)


def test_self_overlapping_stop_strings() -> None:
    assert feed(StopMatcher(["aab"]), "a", "a", "a", "b") == (["", "", "a", ""], "aab")
    assert feed(StopMatcher(["abab"]), "ab", "aab", "ab") == (["", "aba"[:3], ""], "abab")


def test_after_a_match_everything_is_swallowed() -> None:
    matcher = StopMatcher(["x"])
    assert matcher.push("axb") == ("a", "x")
    assert matcher.push("more") == ("", "x")
    assert matcher.finish() == ""


def test_no_stop_strings_let_everything_through() -> None:
    assert feed(StopMatcher([]), "a", "", "b") == (["a", "", "b", ""], None)


def test_duplicates_and_non_ascii() -> None:
    assert feed(StopMatcher(["ď😀", "ď😀"]), " ď", "😀") == ([" ", ""], "ď😀")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])

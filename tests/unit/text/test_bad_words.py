"""Words in tokens, with and without a blank before them."""

from __future__ import annotations

from pinnate.text.bad_words import bad_word_ids
from tests.unit.text.helpers import default_tokenizer


def test_both_spellings_of_a_word() -> None:
    tokenizer = default_tokenizer()
    for given in ("and", " and"):
        runs = bad_word_ids(tokenizer, [given])
        assert [tokenizer.decode(run) for run in runs] == ["and", " and"]
        assert (284,) in runs


def test_blanks_are_taken_as_they_are() -> None:
    assert bad_word_ids(default_tokenizer(), [" "]) == ((216,),)


def test_each_run_is_there_once() -> None:
    assert len(bad_word_ids(default_tokenizer(), ["and", " and", "and"])) == 2
    assert bad_word_ids(default_tokenizer(), []) == ()

"""bad_word_ids: words that must not be written, as runs of tokens.

Knows: that a word inside a text begins with a blank, which is a token of its own or part of the first one. Must not
know: how a run is kept from coming.
"""

from __future__ import annotations

from collections.abc import Iterable

from pinnate.text.tokenizer import Tokenizer


def bad_word_ids(tokenizer: Tokenizer, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word, with and without a blank before it, each run once. A word of blanks is taken as it is.

    A word that is spelled by other tokens than the tokenizer would choose is not found, as in vLLM.
    """
    runs: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip()
        for text in (bare, " " + bare) if bare else (word,):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if ids:
                runs[ids] = None
    return tuple(runs)

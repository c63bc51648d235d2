"""Log-probabilities as the API shows them: the chat form, the older completions form, vLLM's prompt_logprobs.

Knows: tokens' bytes, the three shapes. Must not know: where the numbers come from. They are of the raw
distribution, before temperature, penalties and truncation, at every setting.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from pinnate.core.batch import TokenLogprobs
from pinnate.server.cache_report import Vocabulary
from pinnate.server.protocol.chat import ChatLogprobs, ChatTokenLogprob, TopLogprob
from pinnate.server.protocol.common import PromptLogprob, PromptLogprobs
from pinnate.server.protocol.completions import CompletionLogprobs

TokenBytes = Callable[[int], bytes]

RESYNC_BYTES = 32  # how far behind a changed part of a prompt the next token is looked for
LEAST = -9999.0  # what is shown for a probability of 0, and where a number is none: JSON has no infinity


def finite(logprob: float) -> float:
    return logprob if logprob >= LEAST else LEAST  # so written that NaN becomes LEAST


def _entries(scored: TokenLogprobs) -> list[tuple[int, float]]:
    """The most likely tokens, best first, and the scored one after them if it is not among them."""
    if any(token_id == scored.token_id for token_id, _ in scored.top):
        return scored.top
    return [*scored.top, (scored.token_id, scored.logprob)]


def chat_logprobs(scored: Sequence[TokenLogprobs], token_bytes: TokenBytes, *, as_ids: bool = False) -> ChatLogprobs:
    """`top_logprobs` of a token is empty where none were asked for. `as_ids` names tokens `token_id:N`."""
    content = []
    for entry in scored:
        own = token_bytes(entry.token_id)
        top = []
        for token_id, logprob in _entries(entry) if entry.top else ():
            raw = token_bytes(token_id)
            top.append(TopLogprob(_chat_name(token_id, raw, as_ids), finite(logprob), list(raw)))
        name = _chat_name(entry.token_id, own, as_ids)
        content.append(ChatTokenLogprob(name, finite(entry.logprob), list(own), top))
    return ChatLogprobs(content)


def _chat_name(token_id: int, raw: bytes, as_ids: bool) -> str:
    return f"token_id:{token_id}" if as_ids else raw.decode("utf-8", "replace")


def token_string(raw: bytes) -> str:
    """A token as a JSON string; a part of a character as `bytes:\\xNN`, so that two parts never look alike."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class LogprobsWriter:
    """Writes the older form for one choice, piece by piece; owns the running text offset.

    A token's offset is the number of characters of the choice's text that begin before its first byte; a broken one
    is as many as it is in the text, U+FFFD each. Special tokens that are skipped add nothing to the text. `as_ids`
    names tokens `token_id:N`.
    """

    def __init__(self, vocabulary: Vocabulary, *, skip_special_tokens: bool, as_ids: bool = False) -> None:
        self._token_bytes = vocabulary.token_bytes
        self._is_special = vocabulary.is_special
        self._skips = skip_special_tokens
        self._as_ids = as_ids
        self._characters = _Characters(0)

    def write(self, scored: Sequence[TokenLogprobs | None], token_ids: Sequence[int]) -> CompletionLogprobs:
        """`scored[i]` belongs to `token_ids[i]`."""
        out = CompletionLogprobs([], [], [], [])
        for token_id, entry in zip(token_ids, scored, strict=True):
            self._add(out, token_id, entry, self._characters.count)
            if not (self._skips and self._is_special(token_id)):
                self._characters.add(self._token_bytes(token_id))
        return out

    def write_echo(
        self, scored: Sequence[TokenLogprobs | None], token_ids: Sequence[int], text: str
    ) -> CompletionLogprobs:
        """A prompt that is shown before the choice as `text`. Its first token, which nothing precedes, has None."""
        out = CompletionLogprobs([], [], [], [])
        tokens = [(self._token_bytes(token_id), self._is_special(token_id)) for token_id in token_ids]
        offsets = echo_offsets(tokens, text)
        for token_id, entry, offset in zip(token_ids, scored, offsets, strict=True):
            self._add(out, token_id, entry, offset)
        self._characters = _Characters(len(text))
        return out

    def _add(self, out: CompletionLogprobs, token_id: int, entry: TokenLogprobs | None, offset: int) -> None:
        out.tokens.append(self._name(token_id))
        out.text_offset.append(offset)
        out.token_logprobs.append(None if entry is None else finite(entry.logprob))
        out.top_logprobs.append(None if entry is None else self._top(entry))

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """By name. Of tokens that look alike the likeliest is shown, but the scored one always."""
        shown: dict[str, float] = {}
        for token_id, logprob in _entries(entry):
            shown.setdefault(self._name(token_id), finite(logprob))
        return shown | {self._name(entry.token_id): finite(entry.logprob)}

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else token_string(self._token_bytes(token_id))


def joined(first: CompletionLogprobs | None, second: CompletionLogprobs) -> CompletionLogprobs:
    if first is None:
        return second
    lists = {name: getattr(first, name) + getattr(second, name) for name in CompletionLogprobs.__struct_fields__}
    return CompletionLogprobs(**lists)


class _Characters:
    """Counts the characters that bytes begin, after `count` others."""

    def __init__(self, count: int) -> None:
        self._complete = count
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, raw: bytes) -> None:
        self._complete += len(self._decoder.decode(raw))

    @property
    def count(self) -> int:
        return self._complete + bool(self._decoder.getstate()[0])  # bytes still waiting are the beginning of one


def echo_offsets(tokens: Sequence[tuple[bytes, bool]], text: str) -> list[int]:
    """Where in `text`, a prompt as the client wrote it or as it was decoded, each of its tokens begins. A token is its
    bytes, and whether it is special.

    What the tokenizer has put around the text (a token that begins each prompt) has no characters of its own, and what
    it has changed (a blank before the first word, another form of a character) shifts nothing behind it for good.
    """
    data = text.encode("utf-8", "surrogatepass")
    whole = b"".join(raw for raw, _ in tokens)
    if whole.decode("utf-8", "replace") == text:
        data = whole  # of broken characters, the bytes themselves
    characters, offsets, place = _Characters(0), [], 0
    for raw, is_special in tokens:
        begin, end = _find(data, raw, place, reach=0 if is_special else RESYNC_BYTES)
        characters.add(data[place:begin])
        offsets.append(characters.count)
        characters.add(data[begin:end])
        place = end
    return offsets


def _find(data: bytes, raw: bytes, place: int, *, reach: int) -> tuple[int, int]:
    """Begin and end of a token in `data`, from `place` on. Both are `place` where it cannot be found."""
    if data.startswith(raw, place):
        return place, place + len(raw)
    bare = raw.removeprefix(b" ")
    if bare and len(bare) < len(raw) and data.startswith(bare, place):
        return place, place + len(bare)
    begin = data.find(raw, place, place + len(raw) + reach) if reach and bare.strip() else -1
    return (place, place) if begin < 0 else (begin, begin + len(raw))


def prompt_logprobs(scored: Sequence[TokenLogprobs | None], token_bytes: TokenBytes) -> PromptLogprobs:
    """For each prompt token: id -> its log-probability, for the token itself and the most likely ones; null first."""
    out: PromptLogprobs = []
    for entry in scored:
        if entry is None:
            out.append(None)
            continue
        ranks = {token_id: place for place, (token_id, _) in enumerate(entry.top, start=1)}
        ranks[entry.token_id] = entry.rank
        out.append(
            {
                str(token_id): PromptLogprob(
                    finite(logprob), ranks[token_id], token_bytes(token_id).decode("utf-8", "replace")
                )
                for token_id, logprob in _entries(entry)
            }
        )
    return out

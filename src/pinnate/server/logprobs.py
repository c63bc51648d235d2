"""Log-probabilities as the API shows them: the chat form, the older completions form, vLLM's prompt_logprobs.

Knows: tokens' bytes, the three shapes. Must not know: where the numbers come from. They are of the raw
distribution, before temperature, penalties and truncation, at every setting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pinnate.core.batch import TokenLogprobs
from pinnate.server.protocol.chat import ChatLogprobs, ChatTokenLogprob, TopLogprob
from pinnate.server.protocol.common import PromptLogprob, PromptLogprobs
from pinnate.server.protocol.completions import CompletionLogprobs

TokenBytes = Callable[[int], bytes]

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

    A token's offset is the number of characters that begin before its first byte. `is_hidden` tells which tokens add
    nothing to the text (special tokens that are skipped). `as_ids` names tokens `token_id:N`.
    """

    def __init__(self, token_bytes: TokenBytes, is_hidden: Callable[[int], bool], *, as_ids: bool = False) -> None:
        self._token_bytes = token_bytes
        self._as_ids = as_ids
        self._is_hidden = is_hidden
        self._offset = 0

    def write(
        self, scored: Sequence[TokenLogprobs | None], token_ids: Sequence[int], *, num_prompt_tokens: int = 0
    ) -> CompletionLogprobs:
        """`scored[i]` belongs to `token_ids[i]`; None for the first token of a prompt, which nothing precedes.

        The first `num_prompt_tokens` are an echo, which shows special tokens too.
        """
        out = CompletionLogprobs([], [], [], [])
        for place, (token_id, entry) in enumerate(zip(token_ids, scored, strict=True)):
            raw = self._token_bytes(token_id)
            out.tokens.append(self._name(token_id))
            out.text_offset.append(self._offset)
            out.token_logprobs.append(None if entry is None else finite(entry.logprob))
            out.top_logprobs.append(None if entry is None else self._top(entry))
            if place < num_prompt_tokens or not self._is_hidden(token_id):
                self._offset += sum((byte & 0xC0) != 0x80 for byte in raw)  # bytes that begin a character
        return out

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        return {self._name(token_id): finite(logprob) for token_id, logprob in _entries(entry)}

    def _name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._as_ids else token_string(self._token_bytes(token_id))


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

"""Tokenizing a request's text without letting its size hurt anyone.

Knows: the context's length, the vocabulary's longest token. Must not know: where the text came from.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from pinnate.core.errors import ContextLengthError
from pinnate.server.params import Truncation
from pinnate.server.state import ServerState

if TYPE_CHECKING:
    from pinnate.engine.async_engine import AsyncEngine

LONG_CHARACTERS_PER_TOKEN = 16  # a text with more than this for each token of the context is looked at first


async def tokenize(
    state: ServerState,
    engine: AsyncEngine,
    text: str,
    *,
    add_special_tokens: bool,
    param: str,
    keep: Truncation | None = None,
) -> list[int]:
    """The text's token ids, or those of them that `keep` keeps.

    Tokenizing costs about a second per megabyte, so a text is refused unread if it could not fit the context even if
    each of its tokens were the longest one of the vocabulary.

    Raises:
        ContextLengthError: longer than the context; the message has both numbers.
    """
    limit = engine.max_model_len
    if len(text) > LONG_CHARACTERS_PER_TOKEN * limit:
        if state.longest_token is None:
            state.longest_token = await asyncio.to_thread(_longest_token, engine)
        at_least = -(-len(text) // state.longest_token)
        if at_least > limit:
            raise ContextLengthError(
                f"the context is {limit} tokens; a prompt of {len(text)} characters has at least {at_least}",
                param=param,
            )
    token_ids = await engine.tokenize(text, add_special_tokens)
    if keep is not None:
        token_ids = keep.cut(token_ids)
    if len(token_ids) > limit:
        raise ContextLengthError(f"the context is {limit} tokens; the prompt has {len(token_ids)}", param=param)
    return token_ids


def _longest_token(engine: AsyncEngine) -> int:
    """Bytes of the vocabulary's longest token, which no token's characters exceed. At least 1."""
    tokenizer = engine.tokenizer
    return max(1, *(len(tokenizer.token_bytes(token)) for token in range(engine.vocab_size)))

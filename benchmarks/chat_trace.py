"""A seeded trace of conversations with lengths like ShareGPT's, and the users who hold them.

Knows: lengths, what each turn sends. Must not know: engines, memory.

Lengths are log-normal, with the means of ShareGPT's inputs and outputs in the PagedAttention paper (Kwon et al., SOSP
2023, figure 11: 161.31 and 337.99 tokens). The paper gives no spread: SIGMA is our choice, inputs the more skewed (half
of them under 75 tokens). The usual bounds apply: at least 4 tokens, an input of at most 1,024, 2,048 in all; lengths
outside them are drawn again. After each turn a conversation goes on with probability 2/3 (three turns in the mean, our
choice) and sends its whole history, until the next turn would not fit. Tokens are random.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from pinnate.core.messages import TokenOutput
from pinnate.core.request import Request
from pinnate.core.sampling import SamplingParams

MEAN_INPUT, MEAN_OUTPUT = 161.31, 337.99
SIGMA_INPUT, SIGMA_OUTPUT = 1.25, 1.0
MIN_LENGTH, MAX_INPUT, MAX_TOTAL = 4, 1024, 2048
GOES_ON = 2 / 3
VOCABULARY = range(100, 40_000)  # plain tokens of the default model

Lengths = tuple[int, int]  # tokens that a turn adds, tokens of its answer


def draw_lengths(rng: random.Random) -> Lengths:
    while True:
        asked, wanted = _log_normal(rng, MEAN_INPUT, SIGMA_INPUT), _log_normal(rng, MEAN_OUTPUT, SIGMA_OUTPUT)
        if MIN_LENGTH <= asked <= MAX_INPUT and wanted >= MIN_LENGTH and asked + wanted <= MAX_TOTAL:
            return asked, wanted


def draw_conversation(rng: random.Random, *, goes_on: float = GOES_ON) -> list[Lengths]:
    turns = [draw_lengths(rng)]
    while rng.random() < goes_on:
        turn = draw_lengths(rng)
        if sum(map(sum, turns)) + sum(turn) > MAX_TOTAL:
            break
        turns.append(turn)
    return turns


def draw_trace(seed: int, conversations: int, *, goes_on: float = GOES_ON) -> list[list[Lengths]]:
    rng = random.Random(seed)
    return [draw_conversation(rng, goes_on=goes_on) for _ in range(conversations)]


def forced(output: int) -> SamplingParams:
    """Greedy, of exactly that length."""
    return SamplingParams(temperature=0.0, max_tokens=output, min_tokens=output, ignore_eos=True, seed=0)


def _log_normal(rng: random.Random, mean: float, sigma: float) -> int:
    return round(rng.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma))


@dataclass
class _Chat:
    turns: Iterator[Lengths]
    rng: random.Random  # of its own, so that its tokens do not depend on when it runs
    history: list[int] = field(default_factory=list)


class Users:
    """`users` conversations at a time: a turn is sent when the answer before it is complete, and the next conversation
    of the trace begins when one ends."""

    def __init__(self, trace: list[list[Lengths]], users: int, seed: int = 0) -> None:
        self._users = users
        self._left = [_Chat(iter(turns), random.Random(f"{seed} {i}")) for i, turns in enumerate(trace)][::-1]
        self._open: dict[str, _Chat] = {}
        self._sent = 0
        self.requests: list[Lengths] = []  # prompt and output of each that was sent

    @property
    def is_done(self) -> bool:
        return not self._open and not self._left

    def first(self) -> list[Request]:
        sent = (self._send(self._left.pop()) for _ in range(min(self._users, len(self._left))))
        return [request for request in sent if request is not None]

    def hear(self, output: TokenOutput) -> Request | None:
        """Takes in what a request got; returns what is sent now, if anything."""
        if output.error is not None:
            raise RuntimeError(f"request {output.request_id}: {output.error}")
        chat = self._open[output.request_id]
        chat.history.extend(output.token_ids)
        if output.finish_reason is None:
            return None
        del self._open[output.request_id]
        return self._send(chat)

    def _send(self, chat: _Chat) -> Request | None:
        turn = next(chat.turns, None)
        if turn is None:
            if not self._left:
                return None
            return self._send(self._left.pop())
        asked, wanted = turn
        chat.history.extend(chat.rng.choices(VOCABULARY, k=asked))
        self._sent += 1
        request = Request(
            request_id=str(self._sent), prompt_token_ids=list(chat.history), sampling=forced(wanted), eos_token_ids=(2,)
        )
        self._open[request.request_id] = chat
        self.requests.append((len(chat.history), wanted))
        return request

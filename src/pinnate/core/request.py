"""Request and Sequence: a user request inside the engine, and one run of tokens being decoded.

Knows: identity, tokens, progress, ends. Must not know: pages' meaning (kvcache), order (scheduler), text.
A Request crosses the process boundary once, as it is; there is no second shape of it.
"""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass, field

import msgspec

from pinnate.core.sampling import SamplingParams
from pinnate.core.structured import Matcher

# Added to the priority of background work, which makes it less urgent than any live request, whose priority fits in 32
# bits. Background work runs in what live requests leave, and gives its place up to them.
BACKGROUND_PRIORITY = 2**32


def is_background(priority: int) -> bool:
    return priority >= BACKGROUND_PRIORITY // 2


Namespace = tuple[str, str]  # adapter, cache_salt: requests share cached prefixes within one alone


class RequestStatus(enum.StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    PARKED = "parked"  # a beam without pages, whose candidates are known: nothing to compute until its search goes on
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    """`stop`: EOS, a stop token or a stop string. `length`: max_tokens or the context. `abort`: client or operator.
    `error`: this request failed inside the engine."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Request(msgspec.Struct, frozen=True, kw_only=True, tag="add"):
    """One admitted request, immutable. Also the wire message that adds it.

    `sampling.max_tokens` and `sampling.seed` are filled in by the facade that makes the Request (never None here).
    `eos_token_ids` are those of the model; `sampling.ignore_eos` turns them off. `bad_word_ids` are
    `sampling.bad_words` in tokens, for the engine has no tokenizer.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    arrival_time: float = 0.0
    priority: int = 0
    cache_salt: str = ""
    adapter: str = ""  # weights on top of the model's: their keys and values are others
    cache_report: bool = False  # tell what the prefix cache did for it, and why not more

    @property
    def namespace(self) -> Namespace:
        return self.adapter, self.cache_salt

    @property
    def is_background(self) -> bool:
        return is_background(self.priority)

    @property
    def max_tokens(self) -> int:
        assert self.sampling.max_tokens is not None
        return self.sampling.max_tokens

    @property
    def seed(self) -> int:
        assert self.sampling.seed is not None
        return self.sampling.seed


@dataclass(slots=True, eq=False)
class Sequence:
    """One logical run of tokens: prompt, then output. Owned and mutated by the scheduler alone.

    `page_table` (logical -> physical page) and, for models with windowed layer groups, `window_tables` are owned by
    KVCacheManager; others read them. Invariants:
    num_computed_tokens <= len(token_ids); positions below num_computed_tokens have their KV in the pages.
    """

    seq_id: int  # unique in this engine's life
    request: Request
    index: int  # which of the request's n choices
    arrival: int = 0  # number of its request in order of arrival
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    page_table: array[int] = field(default_factory=lambda: array("i"))
    window_tables: tuple[array[int], ...] = ()  # null page where a page fell out of the window
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at first admission
    num_preemptions: int = 0
    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    matcher: Matcher | None = None  # of a structured output: where its tokens are in the language

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

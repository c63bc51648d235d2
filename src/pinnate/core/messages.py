"""Messages across the process boundary (msgpack): one down per request, one up per step.

Downwards: Request (core/request.py), Abort, Command. Upwards: StepOutputs, Reply, EngineReady, EngineFailed.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from pinnate.core.batch import TokenLogprobs
from pinnate.core.request import FinishReason, Request


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Ends requests, or one choice of one request where `index` is given. Unknown ids are ignored."""

    request_ids: list[str]
    index: int | None = None


class Command(msgspec.Struct, frozen=True, tag="command"):
    """An operator's call: `flush_cache`, `check_integrity`, `stats`, or one of engine/cache_commands.py.
    Answered by a Reply with the same id."""

    command_id: int
    name: str
    arguments: dict[str, Any] = {}


class MatchEnd(enum.StrEnum):
    """Why a prefix match went no further."""

    NEW_TEXT = "new_text"  # nobody has sent this token after what is before it, or it is long forgotten
    EVICTED = "evicted"  # it was cached once
    OTHER_SALT = "other_salt"  # it is cached under another salt or adapter
    WINDOW_LOST = "window_lost"  # a layer with a sliding window needs what was released
    LAST_TOKEN = "last_token"  # all but the last token, which is always computed
    SCORED = "scored"  # prompt tokens whose logprobs were asked for are computed
    NO_ROOM = "no_room"  # there was no page for a copy of the one in which the match ended


class CacheReport(msgspec.Struct, frozen=True, array_like=True):
    """What the prefix cache did for one prompt. `num_cached_tokens` is also the position at which the match ended;
    `num_lost_tokens` of those behind it were cached once (evicted), or are elsewhere (other_salt); at least so many."""

    num_prompt_tokens: int
    num_cached_tokens: int
    reason: MatchEnd
    num_lost_tokens: int = 0
    num_tier_tokens: int = 0  # of the cached ones, how many were loaded from a tier below the KV pool


class RequestTiming(msgspec.Struct, frozen=True, array_like=True):
    """Seconds, by the engine's clock: from a request's arrival there to its first step, and from then to its first
    token. The second is None of a beam search, whose tokens come all together."""

    queue_seconds: float
    prefill_seconds: float | None = None


class TokenOutput(msgspec.Struct, frozen=True, array_like=True):
    """What one choice of one request got in this step."""

    request_id: str
    index: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_token: int | None = None  # the EOS or stop token that ended it (it is in token_ids)
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # whole prompt, with the first output of index 0
    error: str | None = None  # with FinishReason.ERROR
    cache_report: CacheReport | None = None  # with the first output of a request that asks for it
    score: float | None = None  # of a beam search's hypothesis
    timing: RequestTiming | None = None  # with the first output of a request
    is_refusal: bool = False  # the error is what the request asked for, which cannot be followed (GrammarError)


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Gauges and lifetime counters of the engine, taken after a step."""

    num_running: int = 0
    num_waiting: int = 0
    num_pages: int = 0  # usable pages of the pool
    num_free_pages: int = 0
    num_cached_pages: int = 0  # held by the prefix tree alone, evictable
    kv_committed_bytes: int = 0  # of the pool's memory, what the system has given or will give in idle time
    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_cache_queries: int = 0  # prompt tokens looked up
    prefix_cache_hits: int = 0  # prompt tokens found
    preemptions: int = 0
    evicted_pages: int = 0
    beam_page_steps: int = 0  # pages held by beams, added up over the steps of every beam search
    beam_lone_page_steps: int = 0  # the same, had no beam shared a page
    tier_pages: int = 0  # KV pages kept below the pool (--kv-disk), of this model
    tier_bytes: int = 0  # what the tier takes, other models' pages included
    tier_hit_tokens: int = 0  # prompt tokens that were loaded from there; part of prefix_cache_hits
    tier_loaded_pages: int = 0
    tier_stored_pages: int = 0
    tier_rejected_pages: int = 0  # unreadable or not to be trusted
    swaps: int = 0  # preempted sequences whose pages went to the tier
    forced_tokens: int = 0  # of structured outputs, appended without being drawn; part of generation_tokens
    steps: int = 0
    step_tokens: int = 0  # computed in the latest step
    execute_seconds: float = 0.0  # inside the executor
    step_seconds: float = 0.0  # whole steps, execution included
    new_token_ratio: float = 0.0


class StepOutputs(msgspec.Struct, frozen=True, tag="step"):
    """`started`: requests whose wait in the queue is over, since they were in a step for the first time."""

    outputs: list[TokenOutput]
    stats: EngineStats
    started: list[str] = []


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    """`kind` is the class name of a RequestError, where the call was refused and the caller can mend it."""

    command_id: int
    result: dict[str, Any]
    error: str | None = None
    kind: str | None = None
    param: str | None = None
    code: str | None = None


class EngineReady(msgspec.Struct, frozen=True, tag="ready"):
    """Sent once, when the engine can take requests. `info` is shown at start-up and by `doctor`."""

    info: dict[str, Any]


class EngineFailed(msgspec.Struct, frozen=True, tag="failed"):
    """Sent instead of EngineReady: one readable line; `kind` is the class name of the error."""

    kind: str
    message: str


ToEngine = Request | Abort | Command
FromEngine = StepOutputs | Reply | EngineReady | EngineFailed

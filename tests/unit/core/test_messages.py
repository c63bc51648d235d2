"""Messages survive the wire, and errors carry what a client needs."""

from __future__ import annotations

import msgspec
import pytest

from pinnate.core.batch import TokenLogprobs
from pinnate.core.errors import (
    ContextLengthError,
    EngineDeadError,
    EngineError,
    InvalidRequestError,
    PinnateError,
    QueueFullError,
    RequestError,
)
from pinnate.core.messages import (
    Abort,
    Command,
    EngineFailed,
    EngineReady,
    EngineStats,
    FromEngine,
    Reply,
    RequestTiming,
    StepOutputs,
    ToEngine,
    TokenOutput,
)
from pinnate.core.request import FinishReason, Request, RequestStatus, Sequence
from pinnate.core.sampling import SamplingParams

REQUEST = Request(
    request_id="r",
    prompt_token_ids=[1, 2, 3],
    sampling=SamplingParams(max_tokens=5, seed=-(2**63), stop=("x",)),
    eos_token_ids=(2,),
    cache_salt="s",
)
OUTPUT = TokenOutput(
    "r",
    1,
    [4, 5],
    logprobs=[TokenLogprobs(4, -0.5, 1, [(4, -0.5), (9, -1.5)]), TokenLogprobs(5, -0.1, 2)],
    finish_reason=FinishReason.STOP,
    stop_token=5,
    num_cached_tokens=2,
    prompt_logprobs=[None, TokenLogprobs(2, -3.0, 7)],
    timing=RequestTiming(0.5, None),
)


@pytest.mark.parametrize("message", [REQUEST, Abort(["a", "b"], 3), Abort(["a"]), Command(7, "flush_cache")])
def test_down(message: object) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=ToEngine) == message


@pytest.mark.parametrize(
    "message",
    [
        StepOutputs([OUTPUT, TokenOutput("q", 0, [])], EngineStats(num_running=3, new_token_ratio=0.25)),
        Reply(7, {"freed_pages": 3}),
        Reply(8, {}, error="no"),
        EngineReady({"model": "m", "reasons": {"dtype": "because"}}),
        EngineFailed("ModelError", "file: missing"),
    ],
)
def test_up(message: object) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=FromEngine) == message


def test_sequence_counts() -> None:
    sequence = Sequence(1, REQUEST, 0)
    sequence.token_ids.extend([1, 2, 3, 9])
    assert (sequence.num_tokens, sequence.num_prompt_tokens, sequence.num_output_tokens) == (4, 3, 1)
    assert not sequence.is_finished
    sequence.status = RequestStatus.FINISHED
    assert sequence.is_finished


def test_request_errors_carry_field_and_code() -> None:
    error = InvalidRequestError("n must be at least 1, got 0", param="n")
    assert (str(error), error.param, error.code) == ("n must be at least 1, got 0", "n", "invalid_request")
    assert ContextLengthError("x").code == "context_length_exceeded"
    assert QueueFullError("x", code="other").code == "other"
    assert QueueFullError("x").code == "queue_full"


def test_one_tree() -> None:
    assert issubclass(RequestError, PinnateError)
    assert issubclass(EngineDeadError, EngineError)
    assert not issubclass(EngineError, RequestError)

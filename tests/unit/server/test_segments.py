"""Segments, and the two APIs built on them: however a text is cut, a stream adds up to the plain answer."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from pinnate.core.request import FinishReason
from pinnate.core.sampling import SamplingParams
from pinnate.engine.output_processor import OutputDelta
from pinnate.server.anthropic.writer import MessageWriter
from pinnate.server.anthropic.writer import message as whole_message
from pinnate.server.generation import Job, Prompt
from pinnate.server.protocol.common import PromptTokensDetails, Usage
from pinnate.server.protocol.responses import Reasoning, Response
from pinnate.server.replies import Gathered
from pinnate.server.responses.assembler import Assembler
from pinnate.server.responses.writer import ResponseWriter, finished
from pinnate.server.segments import Begin, End, More, Segments
from pinnate.text.parsers.events import ChatParser
from pinnate.text.parsers.reasoning import ReasoningParser
from pinnate.text.parsers.registry import choose_tool_format
from tests.unit.server.anthropic.helpers import events as message_events
from tests.unit.server.anthropic.helpers import joined
from tests.unit.server.conftest import Answer, ByteTokenizer, score
from tests.unit.server.responses.helpers import parse_events, without_ids

PIECES = st.sampled_from(
    ["<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "f", "arguments": {"a": "ď\\n"}}', "<", "tool",
     "\n", '{"name": "f", "arguments": ', " ", "Hello", "é", "😀", "{", "}", '"', "</", "x\n\n"]
)  # fmt: skip
TEXTS = st.lists(PIECES, max_size=12).map("".join)
CUTS = st.lists(st.integers(0, 200), max_size=30)
USAGE = Usage(5, 7, 12, PromptTokensDetails(2))


HERMES, _ = choose_tool_format(None, "hermes")


def new_parser() -> ChatParser:
    return ReasoningParser(HERMES.new_parser(["f"]), ("<think>", "</think>"), is_open=False, shown=True)


def job() -> Job:
    prompts = [Prompt(token_ids=[1, 2, 3, 4, 5])]
    return Job(id="x", model="m", prompts=prompts, params=SamplingParams(max_tokens=7), new_parser=new_parser)


def deltas(text: str, cuts: list[int], reason: FinishReason) -> list[OutputDelta]:
    """The text in pieces of any size, also none; each character is a token."""
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = ["", *(text[a:b] for a, b in itertools.pairwise(places))]
    made = [
        OutputDelta(0, piece, list(range(len(piece))), logprobs=[score(65) for _ in piece], num_cached_tokens=2)
        for piece in pieces
    ]
    return [*made, OutputDelta(0, "", [0], logprobs=[score(0)], finish_reason=reason)]


def segments_of(text: str, cuts: list[int]) -> list[tuple[str, str, str]]:
    machine = Segments(new_parser())
    steps = [step for delta in deltas(text, cuts, FinishReason.STOP) for step in machine.push(delta.text)]
    found: list[list[Any]] = []
    is_open = False
    for step in [*steps, *machine.finish()]:
        if isinstance(step, Begin):
            assert not is_open
            is_open = True
            found.append([step.kind, step.name, ""])
        elif isinstance(step, More):
            assert is_open
            assert step.text
            found[-1][2] += step.text
        else:
            assert isinstance(step, End)
            assert is_open
            is_open = False
    assert not is_open
    return [(kind, name, body) for kind, name, body in found]


@settings(max_examples=150, deadline=None)
@given(TEXTS, CUTS)
def test_segments_do_not_depend_on_the_cuts(text: str, cuts: list[int]) -> None:
    found = segments_of(text, cuts)
    assert found == segments_of(text, [])
    if len(found) > 1:  # white space alone is no segment of its own
        assert all(body.strip() for kind, _, body in found if kind == "text")
    assert all(a[0] != b[0] or a[0] == "call" for a, b in itertools.pairwise(found))


def base() -> Response:
    return Response(
        id="resp_x", created_at=1, status="queued", background=False, instructions=None, max_output_tokens=None,
        max_tool_calls=None, model="m", parallel_tool_calls=True, previous_response_id=None, prompt_cache_key=None,
        reasoning=Reasoning(None, None), safety_identifier=None, store=True, temperature=1.0, text={},
        tool_choice="auto", tools=[], top_logprobs=0, top_p=1.0, truncation="disabled", user=None, metadata={},
    )  # fmt: skip


def assembler() -> Assembler:
    return Assembler(base(), new_parser(), ByteTokenizer(), logprobs=True)


def gathered(outputs: list[OutputDelta]) -> Gathered:
    made = Gathered(job())
    for delta in outputs:
        made.add([(0, delta)])
    return made


def stream(writer: Any, outputs: list[OutputDelta], write: Callable[[Any], bytes]) -> bytes:
    return b"".join([*(write([(0, delta)]) for delta in outputs), writer.end(USAGE)])


@settings(max_examples=40, deadline=None)
@given(TEXTS, CUTS, st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]))
def test_a_streamed_response_is_the_plain_one(text: str, cuts: list[int], reason: FinishReason) -> None:
    outputs = deltas(text, cuts, reason)
    writer = ResponseWriter(assembler())
    seen = parse_events(stream(writer, outputs, writer.write))
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    last = without_ids(seen[-1].response.model_dump(mode="json", by_alias=True, exclude_unset=True))
    whole = without_ids(json.loads(msgspec.json.encode(finished(assembler(), gathered(outputs), USAGE))))
    assert last == whole
    uncut = without_ids(
        json.loads(msgspec.json.encode(finished(assembler(), gathered(deltas(text, [], reason)), USAGE)))
    )
    assert _texts(uncut) == _texts(whole)
    streamed = [
        [event.delta for event in seen if event.type.endswith(".delta") and event.output_index == index]
        for index in range(len(last["output"]))
    ]
    assert ["".join(pieces) for pieces in streamed] == _texts(whole)


def _texts(shown: dict[str, Any]) -> list[str]:
    return [
        item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"] for item in shown["output"]
    ]


@settings(max_examples=40, deadline=None)
@given(TEXTS, CUTS, st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]))
def test_a_streamed_message_is_the_plain_one(text: str, cuts: list[int], reason: FinishReason) -> None:
    outputs = deltas(text, cuts, reason)
    writer = MessageWriter(job(), ByteTokenizer())
    body = stream(writer, outputs, writer.write)
    seen = message_events(Answer(200, {"content-type": "text/event-stream"}, body, []))
    plain = json.loads(msgspec.json.encode(whole_message(job(), gathered(outputs), USAGE, ByteTokenizer())))
    uncut = json.loads(
        msgspec.json.encode(whole_message(job(), gathered(deltas(text, [], reason)), USAGE, ByteTokenizer()))
    )
    assert _anonymous(uncut)["content"] == _anonymous(plain)["content"]
    assert _anonymous(joined(seen)) == _anonymous(plain)


def _anonymous(shown: dict[str, Any]) -> dict[str, Any]:
    return {**shown, "content": [{**block, "id": ""} for block in shown["content"]]}

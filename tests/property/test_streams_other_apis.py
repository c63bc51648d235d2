"""As test_streams.py, for the other APIs: streams of /v1/responses, /v1/messages and /generate add up to their plain
answers, with tools, reasoning, stop strings and log-probabilities, whatever runs the tokens come in."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import api_streams
import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pinnate.core.batch import TokenLogprobs
from pinnate.core.request import FinishReason, Request
from pinnate.server.anthropic.writer import MessageWriter, message
from pinnate.server.generate_replies import GenerateWriter, Shown, generated
from pinnate.server.generation import Job, Output
from pinnate.server.protocol.responses import Response
from pinnate.server.replies import Gathered
from pinnate.server.responses.assembler import Assembler
from pinnate.server.responses.writer import ResponseWriter, finished
from pinnate.server.streaming import ChunkWriter
from pinnate.text.parsers.events import PlainParser
from tests.property.test_streams import EOS, USAGE, deltas, jobs, outputs
from tests.property.test_text_streaming import CUTS, in_steps
from tests.unit.server.responses.test_store import make
from tests.unit.text.helpers import default_tokenizer

Batches = list[list[Output]]
CASE = given(jobs(), st.data(), CUTS, CUTS, st.lists(st.integers(1, 5), min_size=1, max_size=4), st.booleans())


def events_of(writer: ChunkWriter, batches: Batches) -> list[Any]:
    data = (b"".join(writer.write(batch) for batch in batches) + writer.end(USAGE)).decode()
    found = [block.partition("data: ")[2] for block in data.split("\n\n") if block]
    return [json.loads(one) for one in found if one != "[DONE]"]


def runs(
    job: Job, data: st.DataObject, cuts: tuple[list[int], list[int]], batches: list[int], stops: bool
) -> tuple[Gathered, Batches]:
    """The same tokens twice: gathered for the plain answer, and in other runs for the stream."""
    reason = FinishReason.STOP if stops else FinishReason.LENGTH
    choices = [data.draw(outputs()) + ([EOS] if stops else []) for _ in range(job.params.n)]
    request = Request(request_id="r", prompt_token_ids=[7, 8, 9], sampling=job.params, eos_token_ids=(EOS,))
    gathered = Gathered(job)
    gathered.add([(0, delta) for delta in deltas(request, choices, cuts[1], reason)])
    parts: list[Output] = [(0, delta) for delta in deltas(request, choices, cuts[0], reason)]
    steps = in_steps(list(range(len(parts))), batches)
    return gathered, [[parts[number] for number in step] for step in steps]


def shown(value: Any) -> Any:
    return json.loads(msgspec.json.encode(value))


def alone(job: Job) -> Job:
    """With one choice, which is all that these APIs have. Between text and markup in one run of tokens it is open which
    log-probabilities are the text's, so there are none where there may be markup."""
    logprobs = job.params.logprobs if job.new_parser is PlainParser else None
    return dataclasses.replace(job, params=replace(job.params, n=1, logprobs=logprobs))


@settings(deadline=None, max_examples=60)
@CASE
def test_responses(
    job: Job, data: st.DataObject, cuts: list[int], others: list[int], batches: list[int], stops: bool
) -> None:
    job = alone(job)
    gathered, stream = runs(job, data, (cuts, others), batches, stops)

    def assembler() -> Assembler:
        base: Response = make(0).response
        wanted = job.params.logprobs is not None
        return Assembler(base, job.new_parser(), default_tokenizer(), logprobs=wanted)

    plain = shown(finished(assembler(), gathered, USAGE))
    events = events_of(ResponseWriter(assembler()), stream)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert api_streams.joined_response(events) == api_streams.seen_response(plain)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == events[-1]["response"]["output"]
    assert events[-1]["type"] == f"response.{plain['status']}"


@settings(deadline=None, max_examples=60)
@CASE
def test_messages(
    job: Job, data: st.DataObject, cuts: list[int], others: list[int], batches: list[int], stops: bool
) -> None:
    job = alone(job)
    gathered, stream = runs(job, data, (cuts, others), batches, stops)
    tokenizer = default_tokenizer()
    plain = shown(message(job, gathered, USAGE, tokenizer))
    events = events_of(MessageWriter(job, tokenizer), stream)
    whole, joined = api_streams.seen_message(plain), api_streams.joined_message(events)
    for one, other in zip(whole["blocks"], joined["blocks"], strict=True):
        if other["text"] is None:  # a call that was cut: what it shows is what its text begins with
            one["text"] = None
    assert joined == whole
    kinds = [event["type"] for event in events]
    assert (kinds[0], kinds[-1], kinds.count("message_delta")) == ("message_start", "message_stop", 1)
    numbers = [event["index"] for event in events if event["type"] == "content_block_start"]
    assert numbers == list(range(len(whole["blocks"])))


@settings(deadline=None, max_examples=60)
@CASE
def test_generate(
    job: Job, data: st.DataObject, cuts: list[int], others: list[int], batches: list[int], stops: bool
) -> None:
    """Each event has all there is so far: it goes on from the one before, and the last one is the plain answer."""
    prompt = dataclasses.replace(job.prompts[0], params=job.params, request_id="r")
    job = dataclasses.replace(job, prompts=[prompt])
    gathered, stream = runs(job, data, (cuts, others), batches, stops)
    scores: list[TokenLogprobs | None] = [None, TokenLogprobs(8, -1.0, 1), TokenLogprobs(9, -2.0, 2)]
    start = data.draw(st.sampled_from([None, -1, 0, 2])) if job.params.logprobs is not None else None
    if start is not None and start >= 0:
        gathered.prompt_scores[0] = scores
        number, first = stream[0][0]
        stream[0][0] = (number, dataclasses.replace(first, prompt_logprobs=scores))
    seen = Shown(members=[start], text=data.draw(st.booleans()), is_list=job.params.n > 1)
    tokenizer = default_tokenizer()
    plain = shown(generated(job, gathered, tokenizer, seen))
    choices = plain if isinstance(plain, list) else [plain]
    events = events_of(GenerateWriter(job, tokenizer, seen), stream)
    for index, expected in enumerate(choices):
        own = [event for event in events if event.get("index", 0) == index]
        for before, after in itertools.pairwise(own):
            assert after["text"].startswith(before["text"])
            assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
            assert before["meta_info"]["finish_reason"] is None
        last = own[-1]
        assert last.pop("index", index) == index
        for each in (last, expected):
            each["meta_info"].pop("e2e_latency")
        assert last == expected

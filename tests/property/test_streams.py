"""From tokens to server-sent events: whatever runs the tokens come in, a stream adds up to the plain answer.

The whole path runs: OutputProcessor (detokenising, stop strings), parser, chunk writer, SSE on one side; the gathered
reply on the other side, of the same tokens in other runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
import openai_streams
from hypothesis import given, settings
from hypothesis import strategies as st

from pinnate.core.batch import TokenLogprobs
from pinnate.core.messages import TokenOutput
from pinnate.core.request import FinishReason, Request
from pinnate.core.sampling import SamplingParams
from pinnate.engine.output_processor import OutputDelta, OutputProcessor
from pinnate.server.generation import Job, Output, Prompt
from pinnate.server.protocol.common import PromptTokensDetails, Usage
from pinnate.server.replies import Gathered, chat_completion, completion
from pinnate.server.streaming import ChatChunkWriter, ChunkWriter, CompletionChunkWriter
from pinnate.text.parsers.reasoning import ReasoningParser
from pinnate.text.parsers.registry import TOOL_FORMATS
from tests.property.test_text_streaming import CUTS, in_steps
from tests.unit.text.helpers import default_tokenizer

EOS = 2
TEXTS = (
    "Plain words, 1, 2, 3 and an end.",
    "Ďábel 数字 😀👩‍👩‍👧 é\u0301 \u2028 tab\t",
    'Sure. <tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x\\n😀"}}\n</tool_call>',
    '<tool_call>{"name": "add", "arguments": {}}</tool_call><tool_call>{"name": "add", "arguments": {"a": [1]}}',
    '{"name": "Ann", "size": -1.5e3, "sky": null}',
    "<think>one\ntwo</think>\n\nthree",
    "<tool_call> that is none </tool_",
)
STOPS = ("an", "e ", "1", "字", '"}', "</t", "tw")
USAGE = Usage(3, 5, 8, PromptTokensDetails(0))


@st.composite
def outputs(draw: st.DrawFn) -> list[int]:
    """Tokens of texts as the model would write them, and any others between."""
    tokenizer = default_tokenizer()
    ids: list[int] = []
    for _ in range(draw(st.integers(1, 3))):
        text = draw(st.sampled_from(TEXTS))
        ids += tokenizer.encode(text, add_special_tokens=False)[: draw(st.integers(1, 60))]
        ids += draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=3))
    return [token for token in ids if token != EOS]


def scored(token: int) -> TokenLogprobs:
    return TokenLogprobs(token, -(token % 7) / 8, 1, [(token, -(token % 7) / 8), (token ^ 1, -3.0)])


def deltas(request: Request, choices: list[list[int]], cuts: list[int], reason: FinishReason) -> list[OutputDelta]:
    """What a client of the engine gets of `choices`, in runs that follow `cuts`, the choices in turn."""
    processor = OutputProcessor(request, default_tokenizer())
    runs = [in_steps(ids, cuts) for ids in choices]
    found = []
    for turn in range(max(map(len, runs))):
        for index, steps in enumerate(runs):
            if turn >= len(steps):
                continue
            ends = turn == len(steps) - 1
            step = steps[turn]
            output = TokenOutput(
                request.request_id,
                index,
                step,
                None if request.sampling.logprobs is None else [scored(token) for token in step],
                reason if ends else None,
                EOS if ends and reason is FinishReason.STOP else None,
            )
            delta, _ = processor.push(output)
            if delta is not None:
                found.append(delta)
    assert processor.is_finished
    return found


def streamed(writer: ChunkWriter, batches: list[list[Output]]) -> list[dict[str, Any]]:
    data = b"".join(writer.write(batch) for batch in batches) + writer.end(USAGE)
    events = data.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: ") for event in events[:-1])
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    params = SamplingParams(
        n=draw(st.integers(1, 2)),
        stop=tuple(
            draw(st.lists(st.sampled_from(["an", "e ", "1", "字", '"}', "</t", "tw"]), max_size=2, unique=True))
        ),
        include_stop_str_in_output=draw(st.booleans()),
        skip_special_tokens=draw(st.booleans()),
        logprobs=draw(st.sampled_from([None, 1])),
        max_tokens=500,
        seed=1,
    )
    tools, prompt = TOOL_FORMATS["hermes"], Prompt(token_ids=[7, 8, 9], text="<p>")
    parsers: list[Callable[[], Any]] = [
        Job(id="", model="", prompts=[], params=params).new_parser,
        lambda: tools.new_parser(["add"]),
        lambda: ReasoningParser(tools.new_parser(["add"]), is_open=False),
        lambda: ReasoningParser(tools.new_parser(["add"]), is_open=True),
    ]
    return Job(
        id="x",
        model="m",
        prompts=[prompt],
        params=params,
        include_usage=True,
        return_token_ids=True,
        new_parser=draw(st.sampled_from(parsers)),
    )


@settings(deadline=None, max_examples=100)
@given(jobs(), st.data(), CUTS, CUTS, st.lists(st.integers(1, 5), min_size=1, max_size=4), st.booleans())
def test_streams_equal_plain_answers(
    job: Job, data: st.DataObject, cuts: list[int], others: list[int], batches: list[int], stops: bool
) -> None:
    reason = FinishReason.STOP if stops else FinishReason.LENGTH
    choices = [data.draw(outputs()) + ([EOS] if stops else []) for _ in range(job.params.n)]
    request = Request(request_id="r", prompt_token_ids=[7, 8, 9], sampling=job.params, eos_token_ids=(EOS,))
    gathered = Gathered(job)
    gathered.add([(0, delta) for delta in deltas(request, choices, others, reason)])
    parts: list[Output] = [(0, delta) for delta in deltas(request, choices, cuts, reason)]
    steps = in_steps(list(range(len(parts))), batches)

    def batched() -> list[list[Output]]:
        return [[parts[number] for number in step] for step in steps]

    tokenizer = default_tokenizer()
    chat = msgspec.to_builtins(chat_completion(job, gathered, USAGE, tokenizer))
    chunks = streamed(ChatChunkWriter(job, tokenizer), batched())
    assert openai_streams.joined_chat(chunks) == openai_streams.seen_chat(json.loads(json.dumps(chat)))
    text = msgspec.to_builtins(completion(job, gathered, USAGE, tokenizer))
    chunks = streamed(CompletionChunkWriter(job, tokenizer), batched())
    assert openai_streams.joined_completion(chunks) == openai_streams.seen_completion(json.loads(json.dumps(text)))

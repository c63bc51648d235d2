"""The shape of an answer: names, types and what may be null, of one real answer for each route and way of asking.

    python -m tests.contract.shapes BASE_URL        writes tests/contract/shapes.json anew

A shape has the structure of the JSON with types in place of values; a list has the shapes of its items, each once.
Streams have the shapes of their events, each once, in order of first appearance. Run it when a field was added on
purpose, and read the difference."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).with_name("shapes.json")
HI = [{"role": "user", "content": "hi"}]
COUNT = "1, 2, 3, 4, 5, 6, 7,"
SCHEMA = {"type": "object", "properties": {"size": {"enum": [1]}}, "required": ["size"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "note", "parameters": SCHEMA}}
CHAT = {"messages": HI, "temperature": 0, "max_tokens": 4}
TOOLS = {**CHAT, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "note"}}, "max_tokens": 60}
TEXT = {"prompt": COUNT, "temperature": 0, "max_tokens": 3}
RESPONSE = {"input": "hi", "temperature": 0, "max_output_tokens": 16, "store": False}
NOTE = {"type": "function", "name": "note", "parameters": SCHEMA, "strict": True}
MESSAGE = {"messages": HI, "temperature": 0, "max_tokens": 4}
GENERATE = {"text": COUNT, "sampling_params": {"temperature": 0, "max_new_tokens": 3}}
STREAM = {"stream": True}
MAPS = ("top_logprobs", "prompt_logprobs")  # in completions: by token
USAGE = {**STREAM, "stream_options": {"include_usage": True}}


@dataclass(frozen=True)
class Call:
    path: str
    body: dict[str, Any] | None = None
    headers: tuple[tuple[str, str], ...] = ()


CALLS = {
    "chat": Call("/v1/chat/completions", CHAT),
    "chat logprobs": Call("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2, "n": 2}),
    "chat tools": Call("/v1/chat/completions", TOOLS),
    "chat with our fields": Call(
        "/v1/chat/completions",
        {**CHAT, "return_token_ids": True, "return_timings": True, "prompt_logprobs": 1, "no_such_field": 1},
    ),
    "chat stream": Call("/v1/chat/completions", {**CHAT, **USAGE}),
    "chat stream logprobs": Call("/v1/chat/completions", {**CHAT, **STREAM, "logprobs": True, "top_logprobs": 1}),
    "chat stream tools": Call("/v1/chat/completions", {**TOOLS, **STREAM}),
    "completion": Call("/v1/completions", TEXT),
    "completion echo logprobs": Call("/v1/completions", {**TEXT, "echo": True, "logprobs": 2}),
    "completion with our fields": Call(
        "/v1/completions", {**TEXT, "return_token_ids": True, "return_timings": True, "prompt_logprobs": 1}
    ),
    "completion stream": Call("/v1/completions", {**TEXT, **USAGE}),
    "completion stream logprobs": Call("/v1/completions", {**TEXT, **STREAM, "echo": True, "logprobs": 1}),
    "response": Call("/v1/responses", RESPONSE),
    "response tools": Call("/v1/responses", {**RESPONSE, "tools": [NOTE], "tool_choice": "required"}),
    "response stream": Call("/v1/responses", {**RESPONSE, **STREAM}),
    "response stream tools": Call("/v1/responses", {**RESPONSE, **STREAM, "tools": [NOTE], "tool_choice": "required"}),
    "message": Call("/v1/messages", MESSAGE),
    "message stream": Call("/v1/messages", {**MESSAGE, **STREAM}),
    "message tokens": Call("/v1/messages/count_tokens", {"messages": HI}),
    "generate": Call("/generate", GENERATE),
    "generate logprobs": Call("/generate", {**GENERATE, "return_logprob": True, "top_logprobs_num": 1}),
    "generate batch": Call("/generate", {**GENERATE, "text": [COUNT, COUNT]}),
    "generate stream": Call("/generate", {**GENERATE, **STREAM}),
    "score": Call("/v1/score", {"query": "hi", "items": [" a", " b"], "label_token_ids": [28, 216]}),
    "models": Call("/v1/models"),
    "models for anthropic": Call("/v1/models", headers=(("anthropic-version", "2023-06-01"),)),
    "model": Call("/v1/models/SmolLM2-135M-Instruct"),
    "tokenize": Call("/tokenize", {"prompt": "hi", "return_token_strs": True}),
    "detokenize": Call("/detokenize", {"tokens": [28, 216]}),
    "tokenizer": Call("/tokenizer_info"),
    "version": Call("/version"),
    "load": Call("/load"),
    "model info": Call("/model_info"),
    "bad request": Call("/v1/chat/completions", {**CHAT, "temperature": -1}),
    "no such model": Call("/v1/completions", {**TEXT, "model": "none"}),
    "no such route": Call("/v1/none"),
    "bad message": Call("/v1/messages", {**MESSAGE, "temperature": -1}),
    "bad generate": Call("/generate", {"text": ""}),
}


def ask(url: str, call: Call) -> Any:
    """The JSON of the answer; of a stream the list of its events. Errors are answers too."""
    data = None if call.body is None else json.dumps(call.body).encode()
    headers = {"Content-Type": "application/json", **dict(call.headers)}
    try:
        with urllib.request.urlopen(urllib.request.Request(url + call.path, data, headers), timeout=60) as answer:
            raw, kind = answer.read().decode(), answer.headers["content-type"]
    except urllib.error.HTTPError as error:
        return json.loads(error.read())
    if not kind.startswith("text/event-stream"):
        return json.loads(raw)
    lines = [line.removeprefix("data: ") for line in raw.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def shape(value: Any, name: str = "") -> Any:
    """`name`: of the member that has the value, for some of them are maps."""
    if isinstance(value, dict):
        if name in MAPS and "token" not in value:
            return {"*": shape(list(value.values()))}
        return {name: shape(member, name) for name, member in sorted(value.items())}
    if isinstance(value, list):
        found: list[Any] = []
        for item in value:
            if (one := shape(item, name)) not in found:
                found.append(one)
        return found
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    return "string" if isinstance(value, str) else "number"


if __name__ == "__main__":
    shapes = {name: shape(ask(sys.argv[1], call)) for name, call in CALLS.items()}
    RECORDED.write_text(json.dumps(shapes, indent=1, ensure_ascii=False) + "\n")

"""Chats and completions for api_streams.py: bodies of the six kinds, and what is compared of an answer and of a stream.

Two choices each. What is compared: text, tool calls without their ids, token ids, every log-probability with its bytes,
ends, and the usage but for what was cached."""

from __future__ import annotations

from typing import Any

STOPS = ["e ", "an", "1"]
BIAS = {"178": 6, "229": 6, "210": 6}  # bytes of longer characters
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"type": "integer"}},
    "required": ["name", "size"],
    "additionalProperties": False,
}


def _common(kind: str) -> dict[str, Any]:
    body: dict[str, Any] = {"n": 2, "max_tokens": 24, "return_token_ids": True}
    if kind == "stop":
        body["stop"] = STOPS
    elif kind == "utf8":
        body["logit_bias"] = BIAS
    elif kind == "json":
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    return body


def chat_body(kind: str, prompt: str) -> dict[str, Any]:
    body = _common(kind) | {"messages": [{"role": "user", "content": prompt}]}
    if kind == "logprobs":
        body |= {"logprobs": True, "top_logprobs": 2}
    elif kind == "tools":
        tool = {"type": "function", "function": {"name": "note", "parameters": SCHEMA}}
        body |= {"tools": [tool], "tool_choice": "required", "max_tokens": 60}
    return body


def completion_body(kind: str, prompt: str) -> dict[str, Any]:
    body = _common(kind) | {"prompt": [prompt, f"{prompt} Begin:"]}
    if kind == "logprobs":
        body |= {"logprobs": 2, "echo": True}
    return body


def seen_chat(answer: dict[str, Any]) -> Any:
    choices = []
    for choice in answer["choices"]:
        message = choice["message"]
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
        choices.append(
            {
                "text": message["content"] or "",
                "calls": calls,
                "logprobs": (choice["logprobs"] or {}).get("content") or [],
                "token_ids": choice["token_ids"],
                "end": (choice["finish_reason"], choice["stop_reason"]),
            }
        )
    return choices, _tokens(answer["usage"])


def joined_chat(chunks: list[dict[str, Any]]) -> Any:
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks[:-1]:
        for choice in chunk["choices"]:
            seen = choices.setdefault(
                choice["index"], {"text": "", "calls": [], "logprobs": [], "token_ids": [], "end": None}
            )
            assert seen["end"] is None, "a chunk after the end of its choice"
            delta = choice["delta"]
            seen["text"] += delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                if "id" in call:
                    assert call["index"] == len(seen["calls"])
                    seen["calls"].append((call["function"]["name"], ""))
                name, arguments = seen["calls"][call["index"]]
                seen["calls"][call["index"]] = (name, arguments + call["function"].get("arguments", ""))
            seen["logprobs"] += (choice["logprobs"] or {}).get("content") or []
            seen["token_ids"] += choice.get("token_ids") or []
            if choice["finish_reason"] is not None:
                seen["end"] = (choice["finish_reason"], choice.get("stop_reason"))
    return [choices[index] for index in sorted(choices)], _tokens(chunks[-1]["usage"])


def seen_completion(answer: dict[str, Any]) -> Any:
    choices = [
        {
            "text": choice["text"],
            "logprobs": choice["logprobs"],
            "token_ids": choice["token_ids"],
            "prompt_token_ids": choice["prompt_token_ids"],
            "end": (choice["finish_reason"], choice["stop_reason"]),
        }
        for choice in answer["choices"]
    ]
    return choices, _tokens(answer["usage"])


def joined_completion(chunks: list[dict[str, Any]]) -> Any:
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks[:-1]:
        for choice in chunk["choices"]:
            seen = choices.setdefault(
                choice["index"],
                {"text": "", "logprobs": None, "token_ids": [], "prompt_token_ids": [], "end": None},
            )
            assert seen["end"] is None, "a chunk after the end of its choice"
            seen["text"] += choice["text"]
            seen["token_ids"] += choice.get("token_ids") or []
            seen["prompt_token_ids"] += choice.get("prompt_token_ids") or []
            if choice["logprobs"] is not None:
                before = seen["logprobs"] or dict.fromkeys(choice["logprobs"], ())
                seen["logprobs"] = {name: [*before[name], *values] for name, values in choice["logprobs"].items()}
            if choice["finish_reason"] is not None:
                seen["end"] = (choice["finish_reason"], choice.get("stop_reason"))
    return [choices[index] for index in sorted(choices)], _tokens(chunks[-1]["usage"])


def _tokens(usage: dict[str, Any]) -> tuple[int, int]:
    return usage["prompt_tokens"], usage["completion_tokens"]

"""Streams of chats, completions, /v1/responses and /v1/messages add up to the plain answers, over HTTP, byte for byte.

    pinnate serve --port 8000 [--executor simulated]
    python benchmarks/api_streams.py --base-url http://127.0.0.1:8000 --out benchmarks/results/api_streams.json

Each prompt is asked in six ways (plain, stop strings, much UTF-8, log-probabilities, tools, JSON), of each API, plain
and streamed, many at once; greedy or with a seed. Compared are the items or blocks with everything in them, ids left
out, how it ended, and the usage but for what was cached; and the text with that of a chat. Anthropic's API has neither
log-probabilities nor biases, so it is asked in four ways; completions know no tools. Chats and completions have two
choices (openai_streams.py).
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import time
from pathlib import Path
from typing import Any

import aiohttp
from openai_streams import (
    BIAS,
    SCHEMA,
    STOPS,
    chat_body,
    completion_body,
    joined_chat,
    joined_completion,
    seen_chat,
    seen_completion,
)

TOPICS = (
    "the sea",
    "Ďábel a čert",
    "数字 1, 2, 3",
    "😀 and 😢",
    "a list of cities",
    "{braces}",
    "an old <tag>",
    "rain",
)
KINDS = ("plain", "stop", "utf8", "logprobs", "tools", "json")
MESSAGE_KINDS = ("plain", "stop", "tools", "json")


def response_body(kind: str, prompt: str) -> dict[str, Any]:
    body: dict[str, Any] = {"input": prompt, "max_output_tokens": 24, "store": False}
    if kind == "stop":
        body["stop"] = STOPS
    elif kind == "utf8":
        body["logit_bias"] = BIAS
    elif kind == "logprobs":
        body |= {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    elif kind == "tools":
        tool = {"type": "function", "name": "note", "parameters": SCHEMA, "strict": True}
        body |= {"tools": [tool], "tool_choice": "required", "max_output_tokens": 60}
    elif kind == "json":
        body |= {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}}
    return body


def message_body(kind: str, prompt: str) -> dict[str, Any]:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 24}
    if kind == "stop":
        body["stop_sequences"] = STOPS
    elif kind == "tools":
        body |= {"tools": [{"name": "note", "input_schema": SCHEMA}], "tool_choice": {"type": "any"}, "max_tokens": 60}
    elif kind == "json":
        body |= {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}
    return body


async def events_of(answer: aiohttp.ClientResponse) -> list[dict[str, Any]]:
    blocks = (await answer.text()).split("\n\n")
    data = [block.partition("data: ")[2] for block in blocks if block.startswith(("event: ", "data: "))]
    return [json.loads(one) for one in data if one != "[DONE]"]


def joined_response(events: list[dict[str, Any]]) -> dict[str, Any]:
    """From the deltas; the last event then says the same as its items."""
    items: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"]
        if kind == "response.output_item.added":
            items.append({"type": event["item"]["type"], "name": event["item"].get("name"), "text": "", "logprobs": []})
        elif kind.endswith(".delta"):
            items[event["output_index"]]["text"] += event["delta"]
            items[event["output_index"]]["logprobs"] += [entry["logprob"] for entry in event.get("logprobs", ())]
    last = events[-1]["response"]
    assert items == seen_response(last)["items"], "the last event differs from its deltas"
    return seen_response(last)


def seen_response(response: dict[str, Any]) -> dict[str, Any]:
    items = []
    for item in response["output"]:
        part = {} if item["type"] == "function_call" else item["content"][0]
        logprobs = [entry["logprob"] for entry in part.get("logprobs", ())]
        text = item["arguments"] if item["type"] == "function_call" else part["text"]
        items.append({"type": item["type"], "name": item.get("name"), "text": text, "logprobs": logprobs})
    usage = response["usage"]
    return {"items": items, "status": response["status"], "usage": (usage["input_tokens"], usage["output_tokens"])}


def joined_message(events: list[dict[str, Any]]) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            block = event["content_block"]
            blocks.append({"type": block["type"], "name": block.get("name"), "text": ""})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            for name in ("text", "thinking", "partial_json"):
                blocks[event["index"]]["text"] += delta.get(name, "")
    end = next(event for event in events if event["type"] == "message_delta")
    return {"blocks": [_with_input(block) for block in blocks], "end": end["delta"], "tokens": _tokens(end["usage"])}


def _with_input(block: dict[str, Any]) -> dict[str, Any]:
    """A call that was cut is compared by what its text begins with: as long as it parses."""
    if block["type"] != "tool_use":
        return block
    try:
        return {**block, "text": json.loads(block["text"] or "{}")}
    except ValueError:
        return {**block, "text": None}


def seen_message(message: dict[str, Any]) -> dict[str, Any]:
    blocks = [
        {
            "type": block["type"],
            "name": block.get("name"),
            "text": next(block[name] for name in ("input", "text", "thinking") if name in block),
        }
        for block in message["content"]
    ]
    end = {"stop_reason": message["stop_reason"], "stop_sequence": message["stop_sequence"]}
    return {"blocks": blocks, "end": end, "tokens": _tokens(message["usage"])}


def _tokens(usage: dict[str, Any]) -> tuple[int, int]:
    return usage["input_tokens"] + usage["cache_read_input_tokens"], usage["output_tokens"]


class Comparer:
    def __init__(self, session: aiohttp.ClientSession, base_url: str) -> None:
        self._session = session
        self._url = base_url
        self.compared: collections.Counter[str] = collections.Counter()
        self.faults: list[dict[str, Any]] = []

    async def compare(self, kind: str, number: int) -> None:
        prompt = f"Write about {TOPICS[number % len(TOPICS)]}, part {number}."
        sampling = {"temperature": 0} if number % 2 else {"temperature": 1, "seed": number}
        response = await self._both("/v1/responses", response_body(kind, prompt) | sampling)
        self._check(kind, "responses", number, seen_response(response[0]), joined_response(response[1]))
        usage = {"stream_options": {"include_usage": True}}
        chats = await self._both("/v1/chat/completions", chat_body(kind, prompt) | sampling, usage)
        self._check(kind, "chat", number, seen_chat(chats[0]), joined_chat(chats[1]))
        if kind != "tools":
            done = await self._both("/v1/completions", completion_body(kind, prompt) | sampling, usage)
            self._check(kind, "completions", number, seen_completion(done[0]), joined_completion(done[1]))
        if kind in MESSAGE_KINDS:
            await self._compare_messages(kind, number, prompt)
        if kind == "plain":
            body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 24}
            chat = await self._post("/v1/chat/completions", body | sampling)
            text = chat["choices"][0]["message"]["content"]
            self._check(kind, "chat and responses", number, text, seen_response(response[0])["items"][0]["text"])

    async def _compare_messages(self, kind: str, number: int, prompt: str) -> None:
        message = await self._both("/v1/messages", message_body(kind, prompt) | {"temperature": 0})
        whole, parts = seen_message(message[0]), joined_message(message[1])
        if message[0]["stop_reason"] == "max_tokens":
            for one, other in zip(whole["blocks"], parts["blocks"], strict=True):
                one["text"] = None if other["text"] is None else one["text"]
        self._check(kind, "messages", number, whole, parts)

    async def _both(
        self, path: str, body: dict[str, Any], streamed: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The plain answer, and the events of the same request as a stream; `streamed`: members of that one alone."""
        plain = await self._post(path, body)
        body = body | {"stream": True} | (streamed or {})
        async with self._session.post(self._url + path, json=body) as answer:
            answer.raise_for_status()
            return plain, await events_of(answer)

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        async with self._session.post(self._url + path, json=body) as answer:
            assert answer.status == 200, await answer.text()
            return dict(await answer.json())

    def _check(self, kind: str, api: str, number: int, plain: Any, streamed: Any) -> None:
        self.compared[f"{api} {kind}"] += 1
        if plain != streamed:
            self.faults.append({"api": api, "kind": kind, "number": number, "plain": plain, "streamed": streamed})


async def run(base_url: str, prompts: int, clients: int) -> Comparer:
    gate = asyncio.Semaphore(clients)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
        comparer = Comparer(session, base_url)

        async def one(kind: str, number: int) -> None:
            async with gate:
                await comparer.compare(kind, number)

        await asyncio.gather(*(one(kind, number) for number in range(prompts) for kind in KINDS))
    return comparer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    began = time.monotonic()
    comparer = asyncio.run(run(arguments.base_url, arguments.prompts, arguments.clients))
    result = {
        "what": "plain and streamed answers compared, by API and kind",
        "prompts": arguments.prompts,
        "seconds": round(time.monotonic() - began, 1),
        "compared": dict(sorted(comparer.compared.items())),
        "differences": len(comparer.faults),
    }
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    for fault in comparer.faults[:5]:
        print(json.dumps(fault, ensure_ascii=False))
    raise SystemExit(bool(comparer.faults))


if __name__ == "__main__":
    main()

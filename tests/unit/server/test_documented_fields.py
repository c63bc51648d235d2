"""What the documents say of fields is what the server takes: docs/api-fields.md against the structs, both ways; the
names in the other pages against the source."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from pinnate.server.operations import operations
from pinnate.server.protocol import anthropic, batches, chat, common, completions, generate, operator, responses, score

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGE = (DOCS / "api-fields.md").read_text()
API_PAGES = sorted(path.name for path in [DOCS / "http-api.md", *DOCS.glob("api-*.md")])

SECTIONS: dict[str, tuple[type[msgspec.Struct], ...]] = {
    "POST /v1/chat/completions, POST /v1/completions": (chat.ChatRequest, completions.CompletionRequest),
    "stream_options": (common.ChunkOptions,),
    "messages[i]": (chat.ChatMessage,),
    "messages[i].content[j]": (chat.TextPart,),
    "messages[i].tool_calls[j]": (chat.GivenToolCall,),
    "POST /v1/responses": (responses.ResponsesRequest,),
    "POST /v1/messages": (anthropic.MessagesRequest,),
    "POST /generate": (generate.GenerateRequest,),
    "sampling_params": (generate.GenerateSampling,),
    "POST /abort_request": (generate.AbortRequest,),
    "POST /v1/score": (score.ScoreRequest,),
    "POST /tokenize": (operator.TokenizeRequest,),
    "POST /detokenize": (operator.DetokenizeRequest,),
    "POST /pin_prefix, POST /debug/match": (operator.PrefixRequest,),
    "POST /unpin_prefix": (operator.UnpinRequest,),
    "POST /v1/batches": (batches.BatchCreate,),
}
SAME = {"POST /v1/responses/input_tokens": "POST /v1/responses", "PUT /generate": "POST /generate"}
SAME |= {"POST /score": "POST /v1/score", "POST /generative_scoring": "POST /v1/score"}
ROUTES = ("chat", "completions")


@cache
def sections() -> dict[str, str]:
    parts = re.split(r"^## (.*)$", PAGE, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def rows(section: str) -> list[tuple[str, str, str]]:
    """(field, default, what is said of it), one for each field."""
    found = re.findall(r"^\| (`.*?`) \| (.*?) \| (.*?)\|$", sections()[section], flags=re.MULTILINE)
    return [(name, default, said) for names, default, said in found for name in re.findall(r"`(\w+)`", names)]


def shown(field: Any) -> str:
    """A default as the page writes it."""
    if field.required:
        return "required"
    if field.default is not msgspec.NODEFAULT:
        return json.dumps(field.default)
    made = field.default_factory()
    return "{}" if isinstance(made, dict) else json.dumps(made)


def test_every_body_has_its_section() -> None:
    assert list(sections()) == list(SECTIONS)
    documented = {route: kinds for heading, kinds in SECTIONS.items() for route in heading.split(", ")}
    for route, operation in operations().items():
        if operation.request is not None and route != "POST /v1/messages/count_tokens":
            assert operation.request in documented[SAME.get(route, route)]


@pytest.mark.parametrize("section", [name for name in SECTIONS if "completions" not in name])
def test_fields_and_defaults(section: str) -> None:
    (kind,) = SECTIONS[section]
    expected = {field.encode_name: shown(field) for field in msgspec.structs.fields(kind)}
    listed = [(name, default) for name, default, _ in rows(section)]
    assert dict(listed) == expected
    assert len(listed) == len(expected)


@pytest.mark.parametrize("route", ROUTES)
def test_fields_of_chat_and_completions(route: str) -> None:
    (other,) = set(ROUTES) - {route}
    kind = chat.ChatRequest if route == "chat" else completions.CompletionRequest
    table = rows("POST /v1/chat/completions, POST /v1/completions")
    listed = {name: default for name, default, said in table if not re.match(rf"{other}\b(?!.*\b{route}:)", said)}
    assert listed == {field.encode_name: shown(field) for field in msgspec.structs.fields(kind)}


def test_count_tokens_takes_the_first_rows() -> None:
    counted = [field.encode_name for field in msgspec.structs.fields(anthropic.CountTokensRequest)]
    assert sorted(name for name, _, _ in rows("POST /v1/messages")[: len(counted)]) == sorted(counted)


def test_what_is_refused_by_name() -> None:
    text = sections()["POST /v1/chat/completions, POST /v1/completions"].partition("Refused by name")[2]
    text = text.partition("):")[2]
    common_part, of_completions, of_chat = re.split(r"\bcompletions:|\bchat:", text)
    both = set(re.findall(r"`(\w+)`", re.sub(r"\(.*?\)", "", common_part)))
    assert both | set(re.findall(r"`(\w+)`", of_completions)) == set(completions.UNSUPPORTED_COMPLETION)
    known = set(chat.ChatRequest.__struct_fields__)
    assert both | set(re.findall(r"`(\w+)`", of_chat)) == set(chat.UNSUPPORTED_CHAT) - known
    message = sections()["messages[i]"].partition("Refused by name:")[2].partition(";")[0]
    assert set(re.findall(r"`(\w+)`", message)) == set(chat.UNSUPPORTED_MESSAGE)


@cache
def names_of_the_source() -> frozenset[str]:
    text = "\n".join(path.read_text() for path in (ROOT / "src" / "pinnate").rglob("*.py"))
    return frozenset(re.findall(r"[a-z0-9]+(?:_[a-z0-9]+)+", text))


ELSEWHERE = {"base_url", "web_search", "file_search"}  # of clients, and of what other servers have


@pytest.mark.parametrize("page", API_PAGES)
def test_names_in_the_pages_exist(page: str) -> None:
    quoted = " ".join(re.findall(r"`([^`\n]+)`", (DOCS / page).read_text()))
    names = set(re.findall(r"(?<![-/.:\w])[a-z][a-z0-9]*(?:_[a-z0-9]+)+(?![\w.(*])", quoted))
    assert names - names_of_the_source() - ELSEWHERE == set()


def test_nested_types_are_those_of_the_operations() -> None:
    refined = operations()["POST /v1/chat/completions"].refined
    assert get_args(refined["messages"]) == (chat.ChatMessage,)
    assert refined["stream_options"] is common.ChunkOptions

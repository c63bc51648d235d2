"""The OpenAPI document: valid, whole, and true to the structs."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator
from starlette.responses import Response
from starlette.routing import Route

from pinnate.server.app import create_app
from pinnate.server.openapi import Operation, make_document
from pinnate.server.operations import operations
from pinnate.server.settings import ServerSettings
from pinnate.server.state import ServerState
from tests.unit.server.conftest import Client


def routes() -> list[Route]:
    app = create_app(ServerState("model", ServerSettings()))
    return [route for route in app.routes if isinstance(route, Route)]


def document(open_paths: frozenset[str] | None = None) -> dict[str, Any]:
    return make_document(routes(), operations(), open_paths)


def test_every_route_is_described_and_nothing_else() -> None:
    declared = {f"{method} {route.path}" for route in routes() for method in (route.methods or set()) - {"HEAD"}}
    assert declared - set(operations()) == set(), "describe it in server/operations.py"
    assert set(operations()) - declared == set(), "no such route"
    assert len(create_app(ServerState("model", ServerSettings())).routes) == len(routes())
    listed = {f"{method.upper()} {path}" for path, item in document()["paths"].items() for method in item}
    assert listed == {re.sub(r":\w+", "", name) for name in declared}


def test_it_is_valid_openapi_and_json() -> None:
    made = json.loads(json.dumps(document(frozenset({"/health"}))))
    OpenAPIV31SpecValidator(made).validate()
    identifiers = [operation["operationId"] for item in made["paths"].values() for operation in item.values()]
    assert len(set(identifiers)) == len(identifiers)
    assert made["paths"]["/health"]["get"].get("security") is None
    assert made["paths"]["/v1/models"]["get"]["security"] == [{"key": []}]


def test_what_a_request_takes_and_gets() -> None:
    made = document()
    chat = made["paths"]["/v1/chat/completions"]["post"]
    body = chat["requestBody"]["content"]["application/json"]["schema"]["$ref"].rsplit("/", 1)[1]
    schema = made["components"]["schemas"][body]
    assert schema["required"] == ["messages"]
    assert schema["properties"]["messages"]["items"]["$ref"].endswith("ChatMessage")  # refined
    answers = chat["responses"]["200"]["content"]
    assert answers["application/json"]["schema"]["$ref"].endswith("ChatCompletion")
    assert answers["text/event-stream"]["x-event-schema"]["$ref"].endswith("ChatChunk")
    assert {"400", "401", "404", "413", "415", "500", "503"} <= set(chat["responses"])
    model = made["paths"]["/v1/models/{model}"]["get"]
    assert [(each["name"], each["in"]) for each in model["parameters"]] == [("model", "path"), ("beta", "query")]


class Thing(msgspec.Struct):
    size: int


async def _answer(request: Any) -> Response:  # noqa: ARG001
    return Response()


@pytest.mark.parametrize("path", ["/v1/messages", "/upload"])
def test_forms_queries_and_forms_of_errors(path: str) -> None:
    operation = Operation("Stores it", answer=Thing, form={"file": bytes, "purpose": str}, query={"limit": int | None})
    made = make_document([Route(path, _answer, methods=["POST"])], {f"POST {path}": operation}, None)
    OpenAPIV31SpecValidator(made).validate()
    post = made["paths"][path]["post"]
    assert post["requestBody"]["content"]["multipart/form-data"]["schema"]["required"] == ["file", "purpose"]
    assert post["parameters"][0]["name"] == "limit"
    error = post["responses"]["400"]["content"]["application/json"]["schema"]["$ref"]
    assert error.endswith("AnthropicErrorBody" if path == "/v1/messages" else "/ErrorBody")


async def test_it_is_made_once(client: Client) -> None:
    first, second = await client.call("GET", "/openapi.json"), await client.call("GET", "/openapi.json")
    assert first.status == 200
    assert first.body == second.body
    assert first.json["paths"]["/openapi.json"]

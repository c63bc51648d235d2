"""GET /openapi.json: an OpenAPI 3.1 document of all routes, made from their descriptions and msgspec's structs.

Knows: OpenAPI, JSON Schema. Must not know: what a route does; that is described in `operations.py`. The document is
made at the first request for it, and the descriptions are imported then: it costs a start nothing.

What a struct says is what clients may rely on: names, types, defaults. A field of a request may also be null, which is
the same as leaving it out; one that no struct knows gets a warning in the answer, or a 400 with --strict.
Format: https://spec.openapis.org/oas/v3.1.0
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import pinnate
from pinnate.server.errors import AnthropicErrorBody, ErrorBody, speaks_anthropic

JSON = "application/json"
SSE = "text/event-stream"
TEXT = "text/plain"

_ERRORS: Mapping[int, str] = {
    400: "The request is at fault; `param` names the field",
    401: "No valid key",
    403: "The admin key is needed",
    404: "No such model, object or route",
    413: "The body is too large",
    415: "The body is not of this type",
    429: "Too many requests; see Retry-After",
    500: "A fault of the server",
    503: "Not now; see Retry-After",
    504: "Not in time",
    529: "Overloaded",
}
_WITH_BODY = (400, 401, 403, 404, 413, 415, 429, 500, 503, 504)
_WITHOUT_BODY = (400, 401, 403, 404, 500, 503)


@dataclass(frozen=True, slots=True)
class Operation:
    """What a route takes and gives.

    `request`: struct of a JSON body. `refined`: members of it by name, with a closer type than the struct's own (a list
    of objects that is checked one by one). `answer`: struct or type of the JSON answer; None is an object without a
    fixed shape, or text where `media_type` is not JSON. `chunk`: type of the data of each server-sent event, where a
    request can ask for a stream. `query`: parameters of the query by name. `form`: members of a multipart body by name;
    `bytes` is a file.
    """

    summary: str
    request: Any = None
    answer: Any = None
    chunk: Any = None
    media_type: str = JSON
    refined: Mapping[str, Any] = field(default_factory=dict)
    query: Mapping[str, Any] = field(default_factory=dict)
    form: Mapping[str, Any] = field(default_factory=dict)
    body_required: bool = True


class Document:
    """The handler of /openapi.json. `routes` is read at the first request, when all are there."""

    def __init__(self, routes: Sequence[Route], *, open_paths: frozenset[str], has_key: bool) -> None:
        self._routes = routes
        self._open_paths = open_paths if has_key else None
        self._body: bytes | None = None

    async def get(self, request: Request) -> Response:  # noqa: ARG002
        if self._body is None:
            from pinnate.server.operations import operations  # the types of all routes: only for who asks

            document = make_document(self._routes, operations(), self._open_paths)
            self._body = msgspec.json.encode(document)
        return Response(self._body, media_type=JSON)


def make_document(
    routes: Sequence[Route], operations: Mapping[str, Operation], open_paths: frozenset[str] | None
) -> dict[str, Any]:
    """The document of all routes. `operations` are found by method and path, or else are of no fixed shape; the paths
    in `open_paths` need no key, None: no path does."""
    described = [
        (method, route, operations.get(f"{method} {route.path}") or Operation(""))
        for route in routes
        for method in sorted((route.methods or set()) - {"HEAD"})
    ]
    types: list[Any] = [ErrorBody, AnthropicErrorBody]
    for _, _, operation in described:
        types += _types(operation)
    schemas, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    table = _Schemas(types, list(schemas), components)
    paths: dict[str, dict[str, Any]] = {}
    for method, route, operation in described:
        path, parameters = _path(route.path)
        item = _operation(operation, method, route.path, parameters, table)
        if open_paths is not None and route.path not in open_paths:
            item["security"] = [{"key": []}]
        paths.setdefault(path, {})[method.lower()] = item
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "Pinnate", "version": pinnate.__version__, "description": "Serving of language models."},
        "paths": paths,
        "components": {"schemas": {**table.components, **table.made}},
    }
    if open_paths is not None:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return document


class _Schemas:
    """Schemas of types by the type; schemas that refine a struct become components of their own (`made`)."""

    def __init__(self, types: list[Any], schemas: list[dict[str, Any]], components: dict[str, Any]) -> None:
        self._known = [(known, schema) for known, schema in zip(types, schemas, strict=True)]
        self.components = components
        self.made: dict[str, Any] = {}

    def of(self, wanted: Any) -> dict[str, Any]:
        return next(schema for known, schema in self._known if known is wanted or known == wanted)

    def refined(self, operation: Operation) -> dict[str, Any]:
        schema = self.of(operation.request)
        if not operation.refined:
            return schema
        name = schema["$ref"].rsplit("/", 1)[1]
        whole = dict(self.components[name])
        closer = {member: self.of(kind) for member, kind in operation.refined.items()}
        whole["properties"] = {
            member: closer.get(member, known) for member, known in whole.get("properties", {}).items()
        }
        self.made[name] = whole
        return schema


def _types(operation: Operation) -> Iterator[Any]:
    for kind in (operation.request, operation.answer, operation.chunk):
        if kind is not None:
            yield kind
    for members in (operation.refined, operation.query):
        yield from members.values()
    yield from (kind for kind in operation.form.values() if kind is not bytes)


def _path(path: str) -> tuple[str, list[dict[str, Any]]]:
    """`/models/{model:path}` as OpenAPI writes it, and its parameters."""
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)(?::\w+)?}", path)
    ]
    return re.sub(r"{(\w+):\w+}", r"{\1}", path), parameters


def _operation(
    operation: Operation, method: str, path: str, parameters: list[dict[str, Any]], schemas: _Schemas
) -> dict[str, Any]:
    queries = [
        {"name": name, "in": "query", "required": False, "schema": schemas.of(kind)}
        for name, kind in operation.query.items()
    ]
    described: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": _identifier(method, path),
        "responses": _responses(path, operation, schemas),
    }
    if parameters or queries:
        described["parameters"] = [*parameters, *queries]
    content = _request_content(operation, schemas)
    if content:
        described["requestBody"] = {"required": operation.body_required, "content": content}
    return described


def _request_content(operation: Operation, schemas: _Schemas) -> dict[str, Any]:
    if operation.request is not None:
        return {JSON: {"schema": schemas.refined(operation)}}
    if operation.form:
        members = {
            name: {"type": "string", "format": "binary"} if kind is bytes else schemas.of(kind)
            for name, kind in operation.form.items()
        }
        required = [name for name, kind in operation.form.items() if kind in (bytes, str)]
        return {"multipart/form-data": {"schema": {"type": "object", "properties": members, "required": required}}}
    return {}


def _responses(path: str, operation: Operation, schemas: _Schemas) -> dict[str, Any]:
    if operation.answer is not None:
        shape = schemas.of(operation.answer)
    else:
        shape = {"type": "object"} if operation.media_type == JSON else {"type": "string"}
    content: dict[str, Any] = {operation.media_type: {"schema": shape}}
    if operation.chunk is not None:
        # OpenAPI 3.1 cannot describe a stream. This is the schema of the data of each event, in a key of ours.
        content[SSE] = {"x-event-schema": schemas.of(operation.chunk)}
    responses: dict[str, Any] = {"200": {"description": "Done", "content": content}}
    statuses = _WITH_BODY if operation.request is not None or operation.form else _WITHOUT_BODY
    error = {JSON: {"schema": schemas.of(AnthropicErrorBody if speaks_anthropic(path) else ErrorBody)}}
    for status in (*statuses, 529) if speaks_anthropic(path) else statuses:
        responses[str(status)] = {"description": _ERRORS[status], "content": error}
    return responses


def _identifier(method: str, path: str) -> str:
    words = re.sub(r":\w+|[{}]", "", path).replace("/", "_").strip("_")
    return f"{method.lower()}_{words}"

"""Requests made from the server's own OpenAPI document by schemathesis: no 5xx, and every answer as documented.

    pinnate serve --port 8000 --max-model-len 64
    python benchmarks/fuzz_api.py --base-url http://127.0.0.1:8000 --cases 5000 --out benchmarks/results/fuzz_api.json

A third of the cases of each route fit its schema and are tame (few tokens, numbers in their ranges, the served model),
so that they are served; a third fit the schema, with any values; a third break it. A 503 counts as a fault here: nobody
shuts the server down. The context must be small: a case without `max_tokens` runs to its end.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [content_type_conformance, response_schema_conformance, status_code_conformance]
TIMEOUT = 30.0
TAME_PREFIX = "Tame"

# Members of tame requests, by name; the served model is added.
TAME: dict[str, dict[str, Any]] = {
    "n": {"type": "integer", "minimum": 1, "maximum": 2},
    "best_of": {"type": "integer", "minimum": 2, "maximum": 3},
    "max_tokens": {"type": "integer", "minimum": 1, "maximum": 6},
    "max_completion_tokens": {"type": "integer", "minimum": 1, "maximum": 6},
    "max_output_tokens": {"type": "integer", "minimum": 1, "maximum": 6},
    "min_tokens": {"type": "integer", "minimum": 0, "maximum": 2},
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"type": "integer", "minimum": -1, "maximum": 50},
    "min_p": {"type": "number", "minimum": 0, "maximum": 1},
    "presence_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "frequency_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "repetition_penalty": {"type": "number", "minimum": 0.5, "maximum": 2},
    "seed": {"type": "integer", "minimum": 0, "maximum": 1000},
    "stop": {"type": "array", "maxItems": 2, "items": {"type": "string", "minLength": 1, "maxLength": 3}},
    "stop_token_ids": {"type": "array", "maxItems": 2, "items": {"type": "integer", "minimum": 0, "maximum": 1000}},
    "logit_bias": {"type": "object", "maxProperties": 1, "properties": {"216": {"type": "number", "minimum": -9}}},
    "prompt": {"type": "string", "minLength": 1, "maxLength": 12},
    "text": {"type": "string", "minLength": 1, "maxLength": 12},
    "input": {"type": "string", "minLength": 1, "maxLength": 12},
    "content": {"type": "string", "minLength": 1, "maxLength": 12},
    "role": {"enum": ["user", "assistant", "system"]},
    "priority": {"type": "integer", "minimum": -5, "maximum": 5},
    "top_logprobs": {"type": "integer", "minimum": 0, "maximum": 5},
    "prompt_logprobs": {"type": "integer", "minimum": 0, "maximum": 5},
    "use_beam_search": {"const": False},
    "length_penalty": {"const": 1},
    "stream_options": {"type": "object", "maxProperties": 0},
    "stream": {"type": "boolean"},
    "add_generation_prompt": {"const": True},
    "continue_final_message": {"const": False},
    "chat_template_kwargs": {"const": {}},
    "tokens": {"type": "array", "maxItems": 8, "items": {"type": "integer", "minimum": 0, "maximum": 40000}},
}  # fmt: skip
# Known and constraining each other: left out of most tame requests so that these are served at all.
HEAVY = (
    "response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "structural_tag", "json_schema", "regex", "ebnf", "guided_decoding_backend", "tool_choice", "tools", "cache_report",
    "cache_salt",
)  # fmt: skip


@dataclass
class Report:
    """`statuses` by route; `faults`: what no answer may be, with the request that got it."""

    statuses: dict[str, collections.Counter[int]] = field(default_factory=dict)
    faults: list[dict[str, Any]] = field(default_factory=list)

    @property
    def cases(self) -> int:
        return sum(sum(counter.values()) for counter in self.statuses.values())


def tame(document: dict[str, Any], model: str) -> dict[str, Any]:
    """The document with the members of request bodies narrowed to values that get an answer."""
    narrowed = copy.deepcopy(document)
    schemas = narrowed["components"]["schemas"]
    for name, schema in json.loads(_to_tame(schemas)).items():
        _narrow(schema, model)
        schemas[TAME_PREFIX + name] = schema
    for item in narrowed["paths"].values():
        for operation in item.values():
            if "requestBody" in operation:
                operation["requestBody"] = json.loads(_to_tame(operation["requestBody"]))
    return narrowed


def _to_tame(part: Any) -> str:
    return json.dumps(part).replace("#/components/schemas/", "#/components/schemas/" + TAME_PREFIX)


def _narrow(schema: dict[str, Any], model: str) -> None:
    members = schema.get("properties")
    if not members:
        return
    for member in HEAVY:
        members.pop(member, None)
    for member in members:
        members[member] = {"const": model} if member == "model" else TAME.get(member, members[member])
    schema["additionalProperties"] = False
    if "prompt" in members:  # of two ways to say it
        members.pop("messages", None)
    for member in ("messages", "input", "prompt", "content"):
        if member in members:
            schema["required"] = sorted({*schema.get("required", ()), member})
    if "messages" in members and "items" in members["messages"]:
        members["messages"] |= {"minItems": 1, "maxItems": 3}


def fuzz(base_url: str, cases: int, *, start: int = 0, on_route: Callable[[str], None] = lambda _: None) -> Report:
    """About `cases` requests, spread evenly over the routes. Deterministic in `start` but for the server's answers."""
    with requests.Session() as session:
        document = session.get(f"{base_url}/openapi.json", timeout=TIMEOUT).json()
        model = session.get(f"{base_url}/v1/models", timeout=TIMEOUT).json()["data"][0]["id"]
        report = Report()
        plans = [
            (tame(document, model), GenerationMode.POSITIVE),
            (document, GenerationMode.POSITIVE),
            (document, GenerationMode.NEGATIVE),
        ]
        operations = [(mode, result.ok()) for made, mode in plans for result in _operations(made)]
        weights = [_weight(operation) for _, operation in operations]
        for (mode, operation), weight in zip(operations, weights, strict=True):
            on_route(operation.label)
            count = max(1, cases * weight // sum(weights))
            _run(operation, mode, count, start, lambda case: _send(case, base_url, session, report))
        while report.cases < cases:  # plans that could not be met are made up for
            start += 1
            _run(*reversed(operations[0]), cases - report.cases, start, lambda c: _send(c, base_url, session, report))
        return report


def _weight(operation: Any) -> int:
    """Bodies have more to vary than names in a path, and these more than nothing."""
    return 10 if operation.body else 3 if operation.query or operation.path_parameters else 1


def _operations(document: dict[str, Any]) -> list[Any]:
    schema = schemathesis.openapi.from_dict(document)
    return list(schema.get_all_operations())


def _run(operation: Any, mode: GenerationMode, count: int, start: int, send: Callable[[Any], None]) -> None:
    @seed(start)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def each(case: Any) -> None:
        send(case)

    with contextlib.suppress(Unsatisfiable):  # nothing breaks a path parameter: any text fits
        each()


def _send(case: Any, base_url: str, session: requests.Session, report: Report) -> None:
    label = case.operation.label
    try:
        response = case.call(base_url=base_url, session=session, timeout=TIMEOUT)
    except requests.RequestException as error:
        report.statuses.setdefault(label, collections.Counter())[0] += 1
        report.faults.append(_fault(case, 0, f"{type(error).__name__}: {error}"))
        return
    report.statuses.setdefault(label, collections.Counter())[response.status_code] += 1
    if response.status_code >= 500:
        report.faults.append(_fault(case, response.status_code, response.text[:300]))
        return
    try:
        case.validate_response(response, checks=CHECKS)
    except FailureGroup as group:
        for failure in group.exceptions:
            report.faults.append(_fault(case, response.status_code, str(failure)[:600]))


def _fault(case: Any, status: int, what: str) -> dict[str, Any]:
    return {"route": case.operation.label, "status": status, "what": what, "request": case.as_curl_command()[:1500]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--cases", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    began = time.monotonic()
    report = fuzz(arguments.base_url, arguments.cases, start=arguments.seed, on_route=lambda label: print(label))
    result = {
        "what": "requests generated by schemathesis from /openapi.json: a third tame, a third valid, a third broken",
        "schemathesis": schemathesis.__version__,
        "cases": report.cases,
        "seconds": round(time.monotonic() - began, 1),
        "statuses": dict(sorted(sum((c for c in report.statuses.values()), collections.Counter()).items())),
        "by_route": {label: dict(sorted(counter.items())) for label, counter in sorted(report.statuses.items())},
        "faults": report.faults,
    }
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "faults"}, indent=1))
    for fault in report.faults[:20]:
        print(fault)
    raise SystemExit(bool(report.faults))


if __name__ == "__main__":
    main()

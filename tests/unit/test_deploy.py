"""What is deployed beside the server names what the server has."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tests.unit.server.conftest import FakeEngine, make_client

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"(?:pinnate|process)[:_]\w+")


def exported() -> dict[str, set[str]]:
    """Names of all series after a request and a refusal, and the labels of each."""

    async def live() -> str:
        client = make_client(FakeEngine())
        await client.complete()
        await client.complete(temperature=-1)
        return (await client.call("GET", "/metrics")).body.decode()

    families = text_string_to_metric_families(asyncio.run(live()))
    return {s.name: set(s.labels) for family in families for s in family.samples}


def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((ROOT / "deploy/grafana/pinnate.json").read_text())
    return loaded


def test_every_metric_of_the_dashboard_is_exported() -> None:
    panels = dashboard()["panels"]
    assert len(panels) >= 12
    names = exported()
    for panel in panels:
        for target in panel["targets"]:
            asked = NAME.findall(target["expr"])
            assert asked, panel["title"]
            assert set(asked) <= set(names), panel["title"]
            shown = {"instance", "job"}.union(*(names[name] for name in asked))  # the first two are Prometheus's own
            for by in re.findall(r"by ?\(([^)]*)\)", target["expr"]):
                assert {label.strip() for label in by.split(",")} <= shown, panel["title"]
            for selector in re.findall(r"\{([^}]*)\}", target["expr"]):
                assert set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector)) <= shown, panel["title"]


def test_the_dashboard_is_consistent() -> None:
    found = dashboard()
    assert len({panel["id"] for panel in found["panels"]}) == len(found["panels"])
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in found["panels"]}
    assert len(places) == len(found["panels"])
    variables = {variable["name"] for variable in found["templating"]["list"]}
    used = set(re.findall(r"\$\{?([a-z]\w*)", json.dumps(found["panels"])))
    assert used == variables
    for panel in found["panels"]:
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs)
        for target in panel["targets"]:
            assert target["expr"].count("(") == target["expr"].count(")")


def test_docs_name_what_is_exported() -> None:
    text = (ROOT / "docs/observability.md").read_text().split("--metrics-compat")[0]
    asked = {name for name in re.findall(r"`(\w+?)(?:\{[\w,]+\})?`", text) if not name.startswith("_")}
    names = {name.removeprefix("pinnate:") for name in exported()}
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in names} | set(names)
    assert asked - families <= {"other"}
    assert len(asked) > 25

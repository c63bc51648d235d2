"""The documents name what there is: links, files, classes, flags, commands, figures."""

from __future__ import annotations

import json
import re
import shlex
import statistics
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from pinnate.cli import main as cli
from pinnate.server.app import create_app
from pinnate.server.limits import ServerLimits
from pinnate.server.settings import ServerSettings
from pinnate.server.state import ServerState

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src/pinnate"
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "benchmarks/README.md"]
DOCS += sorted((ROOT / "docs").rglob("*.md"))
COMMANDS = {**cli.COMMANDS, **{f"bench {name}": command for name, command in cli.BENCH.items()}}

LINK = re.compile(r"\[[^\]\[]*\]\(([^)\s]+)\)")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9]+(?:-[a-z0-9]+)*")
FILE = re.compile(r"(?:\.\./)?[\w.-]+(?:/[\w.-]+)*\.(?:py|pyi|cpp|h|inl|md|toml|jsonl?|yml|sh)\b")
NAME = re.compile(r"`([A-Z]\w*[a-z]\w*)(?:\.(\w+))?(?:\([^`]*\))?`")
# Files that documents name which the programs write or the user brings, in examples.
NOT_OURS = {"config.json", "tokenizer.json", "requests.jsonl", "PATH/load.py", "PATH/limits.py", "openapi.json"}
NOT_OURS |= {"llama.cpp", "DESIGN.md", "PATH/run_cases.py"}
# Flags of the programs beside ours, as they are written in the documents.
FOREIGN = {"--upgrade", "--launch", "--gguf", "--model-dir", "--engine", "--strict-fields", "--dtype-tolerance"}
FOREIGN_NAMES = {"NaN", "Infinity", "RuntimeEndpoint"}


def ids(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def slug(heading: str) -> str:
    """As GitHub makes anchors of headings."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(path: Path) -> set[str]:
    return {slug(line.lstrip("#")) for line in path.read_text().splitlines() if line.startswith("#")}


@pytest.mark.parametrize("path", DOCS, ids=ids(DOCS))
def test_relative_links_resolve(path: Path) -> None:
    for target in LINK.findall(path.read_text()):
        if re.match(r"\w+:", target):
            continue
        name, _, anchor = target.partition("#")
        found = path.parent / name if name else path
        assert found.exists(), target
        if anchor:
            assert anchor in anchors(found), target


def test_every_document_can_be_reached_from_readme() -> None:
    found, ahead = set[Path](), [ROOT / "README.md"]
    while ahead:
        path = ahead.pop()
        if path not in found:
            found.add(path)
            names = (link.partition("#")[0] for link in LINK.findall(path.read_text()))
            ahead += [(path.parent / name).resolve() for name in names if name.endswith(".md") and ":" not in name]
    assert {path for path in DOCS if path.resolve() not in found} == set()


@cache
def all_files() -> frozenset[str]:
    """Every file of ours, by each end of its path: `kvcache/pins.py`, `pins.py`, ..."""
    names: set[str] = set()
    for folder in ("src", "native", "tests", "benchmarks", "examples", "docs", "deploy", "scripts"):
        for path in (ROOT / folder).rglob("*"):
            parts = path.relative_to(ROOT).parts
            names |= {"/".join(parts[i:]) for i in range(len(parts))}
    return frozenset(names | {path.name for path in ROOT.iterdir()})


@pytest.mark.parametrize("path", DOCS, ids=ids(DOCS))
def test_files_that_are_named_exist(path: Path) -> None:
    text = LINK.sub("", path.read_text())
    named = {name.removeprefix("../") for name in FILE.findall(text)} - NOT_OURS
    assert {name for name in named if name not in all_files() and "NNN" not in name} == set()


@cache
def sources() -> str:
    return "\n".join(path.read_text() for path in sorted((*SOURCE.rglob("*.py"), *SOURCE.rglob("*.pyi"))))


@pytest.mark.parametrize("path", DOCS, ids=ids(DOCS))
def test_classes_and_functions_that_are_named_exist(path: Path) -> None:
    text = path.read_text()
    for kind, member in NAME.findall(text):
        if kind in FOREIGN_NAMES:
            continue
        declared = re.search(rf"^(?:class {kind}\b|{kind} = ).*?(?=^class |\Z)", sources(), re.MULTILINE | re.DOTALL)
        assert declared, kind
        assert re.search(rf"\b{member}\b", declared[0]), f"{kind}.{member}"
    for function in re.findall(r"`([a-z]\w+)\([^`]*`", text):
        assert re.search(rf"def {function}\b", sources()), function


def test_names_are_in_the_files_that_architecture_md_says() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    places = re.findall(
        r"`([\w.]+)`(?: in | \()`((?:core|server|engine|text|kvcache|scheduler|executor)/[\w/]+\.py)`", text
    )
    assert len(places) >= 15
    for name, file in places:
        last = name.rpartition(".")[2]
        assert re.search(rf"^ *(?:(?:async )?def|class) {last}\b", (SOURCE / file).read_text(), re.MULTILINE), name


@cache
def flags_of(*commands: str) -> frozenset[str]:
    """All flags, those that the help leaves out too."""
    parsers = [cli.make_parser(name, COMMANDS[name]) for name in commands or COMMANDS]
    flags = {flag for parser in parsers for action in parser._actions for flag in action.option_strings}
    return frozenset(flags | {"--help", "--version"})


@cache
def script_flags() -> frozenset[str]:
    """Of benchmarks and examples."""
    texts = [path.read_text() for path in (*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "native/tests").glob("*.cpp"))]
    return frozenset(flag for text in texts for flag in FLAG.findall(text))


@pytest.mark.parametrize("path", DOCS, ids=ids(DOCS))
def test_flags_that_are_named_exist(path: Path) -> None:
    for line in path.read_text().splitlines():
        allowed = flags_of() | FOREIGN
        if "benchmarks/" in line or ".py" in line or "bench_" in line:
            allowed |= script_flags()
        assert set(FLAG.findall(line)) <= allowed, line


def test_every_flag_of_the_server_is_in_flags_md() -> None:
    text = (ROOT / "docs/flags.md").read_text()
    named = set(FLAG.findall(text))
    assert {flag for flag in flags_of("serve") if flag.startswith("--")} - named == {"--version"}
    assert re.search(r"(?:`| )-q`", text)


def test_every_flag_of_the_other_commands_is_somewhere() -> None:
    named = {flag for path in DOCS for flag in FLAG.findall(path.read_text())}
    parsers = [cli.make_parser(name, command) for name, command in COMMANDS.items()]
    shown = {action.option_strings[-1] for p in parsers for action in p._actions if action.option_strings}
    spelled = {flag for flag in shown if flag.startswith("--")}
    assert spelled - named == set()


def test_every_route_and_limit_is_named() -> None:
    text = "\n".join(path.read_text() for path in DOCS)
    routes = create_app(ServerState("m", ServerSettings())).routes
    paths = {path for route in routes if (path := getattr(route, "path", "").partition("/{")[0])}
    assert len(paths) > 35
    assert {path for path in paths if not re.search(rf"{re.escape(path)}\b", text)} == set()
    limits = {name for name in ServerLimits.__struct_fields__ if name not in text}
    assert {name for name in limits if f"--{name.replace('_', '-')}" not in text} == set()


def test_every_command_is_named() -> None:
    text = "\n".join(path.read_text() for path in DOCS)
    missing = [name for name in COMMANDS if f"pinnate {name}" not in text]
    assert missing == []


def command_lines() -> Iterator[tuple[str, str]]:
    """(document, line) of each command line of ours in an indented or fenced block that names no placeholder."""
    for path in DOCS:
        text = path.read_text().replace("\\\n", " ")
        for line in re.findall(r"^(?:    )?(?:\$ )?pinnate ((?:[a-z]).*)$", text, re.MULTILINE):
            line = line.split("   ")[0].split(" #")[0].split(" &")[0].strip()
            if not re.search(r"[\[\]|]|\.\.\.", line):
                yield path.name, line


@pytest.mark.parametrize(("document", "line"), sorted(set(command_lines())))
def test_command_lines_parse(document: str, line: str) -> None:
    words = shlex.split(line)
    parts = cli.COMMANDS[words[0]].parts
    name = " ".join(words[: 2 if len(words) > 1 and words[1] in parts else 1])
    args = cli.make_parser(name, COMMANDS[name]).parse_args(words[len(name.split()) :])
    assert args is not None, document


def test_the_command_lines_were_found() -> None:
    assert len(set(command_lines())) > 8


# README's table: how the figure of each row is called in the recorded results.
ROWS = {
    "32 streams": ("batch", "output_tok_s"),
    "mixed": ("mixed", "output_tok_s"),
    "shared 1,500-token prefix": ("fewshot", "wall_s"),
    "8 chats": ("multiturn", "output_tok_s"),
    "8 prompts": ("parallel", "output_tok_s"),
    "one stream": ("single.tpot", ""),
    "2,000-token prompt": ("single.ttft2000", ""),
}


def result(name: str) -> Any:
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())


def median_of(precision: str, workload: str, key: str) -> tuple[float, float]:
    """The median, and times the limit; one stream's in ms."""
    recorded = result(precision)
    median = recorded["medians"][workload]
    if not key:
        return median["value"] * (1000 if workload == "single.tpot" else 1), median["x"]
    runs = [run[key] for run in recorded["runs"] if run["workload"] == workload]
    return statistics.median(runs), median["x"]


@pytest.mark.parametrize("row", ROWS)
def test_figures_are_the_recorded_ones(row: str) -> None:
    text = (ROOT / "README.md").read_text()
    line = next(line for line in text.splitlines() if line.startswith(f"| {row}"))
    cells = [float(re.sub(r"[,*x]", "", cell)) for cell in line.strip("|").split("|")[1:]]
    workload, key = ROWS[row]
    for precision, (value, peer, times) in (("bf16", cells[:3]), ("int8", cells[3:6])):
        measured, limit = median_of(precision, workload, key)
        assert value == pytest.approx(measured, rel=0.01)
        assert times == pytest.approx(max(measured / peer, peer / measured), abs=0.055)
        if precision == "bf16":
            assert cells[6] == pytest.approx(limit, abs=0.006)


@pytest.mark.parametrize("row", ROWS)
def test_the_best_peer_is_the_best_one(row: str) -> None:
    """Of the table in benchmarks/README.md: three columns of bf16, three of 8 bits."""
    workload = ROWS[row][0]
    name = {"single.tpot": "single: ms", "single.ttft2000": "single: seconds"}.get(workload, workload)
    text = (ROOT / "benchmarks/README.md").read_text().split("## Peers")[1]
    line = next(line for line in text.splitlines() if line.startswith(f"| {name}"))
    peers = [float(re.match(r" ~?([\d.]+)", cell)[1]) for cell in line.strip("|").split("|")[2:8]]  # type: ignore[index]
    best = max if "tokens/s" in line else min
    shown = next(line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith(f"| {row}"))
    cells = [cell.strip() for cell in shown.strip("|").split("|")]
    assert [float(cells[2]), float(cells[5])] == [best(peers[:3]), best(peers[3:])]


def test_the_other_figures_are_recorded_ones() -> None:
    rows = [line.strip("|").split("|") for line in (ROOT / "README.md").read_text().splitlines()]
    shown = {row[0].strip().split("**")[1]: row[1] for row in rows if len(row) == 3 and row[0].startswith(" **")}
    figures = {name: [float(number) for number in re.findall(r"\d+(?:\.\d+)?", cell)] for name, cell in shown.items()}
    tiers, overhead = result("kv_tiers")["rows"][-1], result("step_overhead")[-1]
    assert (tiers["tokens"], overhead["rows"]) == (2000, 64)
    assert figures["The cache survives"] == [
        round(tiers["compute"] / tiers[where]) for where in ("disk", "cached file")
    ]
    assert figures["One native call a step"] == [round(100 * overhead["share"], 1)]
    assert figures["Ready in a second"] == [round(result("startup")["medians"]["ready"], 1)]
    assert figures["Neighbours"] == [round(100 * result("contention")["share"])]
    structured = result("structured")
    made = structured["generations"]
    assert figures["Structured outputs"][:2] == [made["valid"], made["finished"]]
    assert figures["Structured outputs"][2] <= structured["cost"]["slower_percent"] <= figures["Structured outputs"][3]
    schemes = result("allocation")["single"]["schemes"]
    assert figures["Paging"][0] == round(schemes["paged"]["mean_batch"] / schemes["max"]["mean_batch"], 1)


def test_results_hold_no_path_of_a_machine() -> None:
    results = sorted((ROOT / "benchmarks/results").glob("*.json*"))
    assert len(results) > 15
    assert [
        path.name for path in results if re.search(r'"[^"]*(?<![\w:/.])/(?:home|root|tmp|work|usr)/', path.read_text())
    ] == []

"""Requests on their way through the compiler: in order, aborted meanwhile, refused, remembered."""

from __future__ import annotations

import threading

import pytest

from pinnate.core.errors import GrammarError, InvalidRequestError
from pinnate.core.request import FinishReason, Request
from pinnate.core.sampling import SamplingParams
from pinnate.core.structured import StructuredOutput
from pinnate.engine.grammar_intake import GrammarCache, GrammarIntake, checked_params
from pinnate.text.grammars.backend import Grammar, LLGuidanceBackend, VocabularyBytes


class Backend:
    """A real one over bytes, which waits for `go` before it compiles."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.go = threading.Event()
        self.go.set()
        self._inner = LLGuidanceBackend(VocabularyBytes([b"</s>", *(bytes([byte]) for byte in range(256))], [0], [0]))

    def compile(self, structured: StructuredOutput) -> Grammar:
        self.go.wait()
        self.compiled.append(structured.text)
        return self._inner.compile(structured)


def ask(name: str, pattern: str, n: int = 1) -> Request:
    structured = StructuredOutput(kind="regex", text=pattern)
    params = SamplingParams(n=n, max_tokens=4, seed=0, structured_output=structured)
    return Request(request_id=name, prompt_token_ids=[1], sampling=params)


def arrivals(intake: GrammarIntake) -> list[str]:
    found: list[str] = []
    while len(intake):
        intake.wait()
        found += [arrival.request.request_id for arrival in intake.arrivals()]
    return found


@pytest.fixture
def backend() -> Backend:
    return Backend()


def test_what_was_compiled_is_taken_at_once(backend: Backend) -> None:
    intake = GrammarIntake(GrammarCache(lambda: backend))
    assert intake.take(ask("a", "x")) is None
    assert intake.take(ask("b", "y")) is None
    assert arrivals(intake) == ["a", "b"]
    first, second = intake.take(ask("c", "x")), intake.take(ask("d", "x"))
    assert first is not None
    assert second is not None
    first.advance(ord("x") + 1)
    assert first.is_terminated
    assert not second.is_terminated
    assert backend.compiled == ["x", "y"]
    assert not intake.wait()
    intake.close()


def test_a_spoilt_grammar_is_compiled_anew(backend: Backend) -> None:
    intake = GrammarIntake(GrammarCache(lambda: backend))
    intake.take(ask("a", "x"))
    arrivals(intake)
    matcher = intake.take(ask("b", "x"))
    assert matcher is not None
    with pytest.raises(GrammarError):
        matcher.advance(1)
    assert intake.take(ask("c", "x")) is None
    assert arrivals(intake) == ["c"]
    assert backend.compiled == ["x", "x"]
    intake.close()


def test_aborts_while_it_is_compiled(backend: Backend) -> None:
    backend.go.clear()
    intake = GrammarIntake(GrammarCache(lambda: backend))
    for name in "abc":
        intake.take(ask(name, name, n=2))
    ended = intake.abort(["b", "unknown"], None)
    assert [(output.request_id, output.index, output.finish_reason) for output in ended] == [
        ("b", 0, FinishReason.ABORT),
        ("b", 1, FinishReason.ABORT),
    ]
    assert intake.abort(["c"], 1) == []
    assert intake.wait()  # for a moment, then messages are looked at again
    assert intake.arrivals() == []
    backend.go.set()
    found = []
    while len(intake):
        intake.wait()
        found += intake.arrivals()
    assert [(arrival.request.request_id, arrival.aborted) for arrival in found] == [("a", []), ("c", [1])]
    intake.close()


def test_one_that_does_not_compile_ends_each_choice(backend: Backend) -> None:
    intake = GrammarIntake(GrammarCache(lambda: backend))
    intake.take(ask("a", "(", n=2))
    intake.wait()
    while not (found := intake.arrivals()):
        intake.wait()
    [arrival] = found
    assert arrival.matcher is None
    assert [(output.index, output.finish_reason) for output in arrival.outputs] == [
        (0, FinishReason.ERROR),
        (1, FinishReason.ERROR),
    ]
    assert "unclosed group" in (arrival.outputs[0].error or "")
    intake.close()


def test_least_recently_used_grammars_go_by_count_and_by_size(backend: Backend) -> None:
    cache = GrammarCache(lambda: backend, most=2, most_bytes=10)
    for pattern in ("a", "b", "a", "c"):
        cache.compile(StructuredOutput(kind="regex", text=pattern))
    assert backend.compiled == ["a", "b", "c"]
    assert cache.get(StructuredOutput(kind="regex", text="b")) is None
    cache.compile(StructuredOutput(kind="regex", text="x" * 10))
    assert cache.get(StructuredOutput(kind="regex", text="c")) is None
    assert cache.get(StructuredOutput(kind="regex", text="x" * 10)) is not None


def test_offline_programs_get_the_same_refusals() -> None:
    structured = StructuredOutput(kind="json_schema", text='{"items": {"type": "x"}}', param="mine")
    with pytest.raises(InvalidRequestError, match="mine at #/items/type"):
        checked_params(SamplingParams(structured_output=structured))
    plain = SamplingParams()
    assert checked_params(plain) is plain

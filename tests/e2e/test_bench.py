"""`pinnate bench`: against a small server that misbehaves on request, against the real one, and offline."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from pinnate.cli.main import main
from tests.e2e.conftest import MODEL
from tests.e2e.harness import Server, free_port


class SmallServer:
    """Streams as many words as asked for. Every third request fails as `failing` says, if it says anything."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.bodies: list[dict[str, Any]] = []
        self.failing: str | None = None
        self.running = self.most = 0
        paths = ("/v1/completions", "/v1/chat/completions")
        routes = [Route(path, self._complete, methods=["POST"]) for path in paths]
        app = Starlette(routes=[*routes, Route("/v1/models", self._models)])
        self._server = uvicorn.Server(uvicorn.Config(app, port=self.port, log_level="error", lifespan="off"))
        self._thread = threading.Thread(target=self._server.run)

    def start(self) -> None:
        self._thread.start()
        while not self._server.started:
            self._thread.join(0.01)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join()

    def reset(self) -> None:
        self.bodies, self.failing, self.most = [], None, 0

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"data": [{"id": "small"}]})

    async def _complete(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        failing = self.failing if len(self.bodies) % 3 == 0 else None
        if failing == "status":
            return JSONResponse({"error": {"message": "queue is full"}}, status_code=503)
        return StreamingResponse(self._stream(body, failing), media_type="text/event-stream")

    async def _stream(self, body: dict[str, Any], failing: str | None) -> AsyncIterator[str]:
        self.running += 1
        self.most = max(self.most, self.running)
        chat = "messages" in body
        if chat:
            yield _event(choices=[{"delta": {"role": "assistant", "content": ""}}])
        for number in range(body["max_tokens"]):
            await asyncio.sleep(0.001)
            if failing == "cut" and number == 2:
                self.running -= 1
                return
            word = f"w{number} "
            yield _event(choices=[{"delta": {"content": word}} if chat else {"text": word}])
        yield _event(choices=[{"delta": {}, "text": "", "finish_reason": "length"}])
        yield _event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": body["max_tokens"]})
        self.running -= 1
        yield "data: [DONE]\n\n"


def _event(**fields: Any) -> str:
    return f"data: {json.dumps(fields)}\n\n"


@pytest.fixture(scope="module")
def shared_small() -> Iterator[SmallServer]:
    server = SmallServer()
    server.start()
    yield server
    server.stop()


@pytest.fixture
def small(shared_small: SmallServer, monkeypatch: pytest.MonkeyPatch) -> SmallServer:
    monkeypatch.delenv("PINNATE_API_KEY", raising=False)
    shared_small.reset()
    return shared_small


def bench(server: SmallServer | Server, *arguments: str) -> int:
    return main(["bench", "serve", "--base-url", server.url, *arguments])


def saved(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


SHORT = ("--random-input-len", "6", "--random-output-len", "5")


def test_a_load_and_its_result(small: SmallServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--num-prompts", "12", "--max-concurrency", "4", "--goodput", "e2el:60000")
    assert bench(small, *SHORT, *flags, "--save-detailed", "--result-dir", str(tmp_path)) == 0
    (result,) = saved(tmp_path)
    assert (result["model_id"], result["tokenizer_id"], result["backend"]) == ("small", None, "openai")
    assert (result["completed"], result["failed"], result["max_concurrency"]) == (12, 0, 4)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (84, 60)
    assert result["request_goodput"] == result["request_throughput"]
    assert result["generated_texts"] == ["w0 w1 w2 w3 w4 "] * 12
    assert [len(gaps) for gaps in result["itls"]] == [4] * 12
    assert 0 < result["median_ttft_ms"] < result["median_e2el_ms"]
    assert small.most == 4
    assert len(small.bodies) == 13  # one to warm up
    assert len({body["prompt"] for body in small.bodies}) == 13
    out = capsys.readouterr().out
    assert "no tokenizer here" in out
    assert "requests completed                    12" in out


@pytest.mark.parametrize(
    ("failing", "message"),
    [("status", "HTTP 503: queue is full"), ("cut", "the stream ended without [DONE] or a finish_reason")],
)
def test_failed_requests_are_counted_and_shown(
    failing: str, message: str, small: SmallServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small.failing = failing
    flags = (
        "--num-prompts",
        "9",
        "--num-warmups",
        "0",
        "--model",
        "any",
        "--result-filename",
        str(tmp_path / "r.json"),
    )
    assert bench(small, *SHORT, *flags) == 0
    (result,) = saved(tmp_path)
    assert (result["num_prompts"], result["completed"], result["failed"]) == (9, 6, 3)
    assert result["total_output_tokens"] == 30
    assert "errors" not in result  # details were not asked for
    assert f"failed 3 x: {message}" in capsys.readouterr().out


def test_conversations_are_sent_with_their_history(small: SmallServer) -> None:
    flags = ("--multi-turn-users", "2", "--multi-turn-turns", "3", "--multi-turn-output-len", "2", "--num-warmups", "0")
    assert bench(small, "--dataset-name", "multi-turn", *flags) == 0
    assert sorted(len(body["messages"]) for body in small.bodies) == [1, 1, 3, 3, 5, 5]
    longest = max(small.bodies, key=lambda body: len(body["messages"]))["messages"]
    assert [m["content"] for m in longest[1::2]] == ["w0 w1 ", "w0 w1 "]


def test_a_sweep_with_a_file_for_each_point(
    small: SmallServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--concurrency", "2,1", "--num-prompts", "4", "--result-filename", str(tmp_path / "s.json"))
    assert bench(small, *SHORT, *flags) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s-concurrency1.json", "s-concurrency2.json"]
    assert [r["max_concurrency"] for r in saved(tmp_path)] == [1, 2]
    assert len({body["prompt"] for body in small.bodies}) == 9  # fresh prompts at each point
    rows = capsys.readouterr().out.splitlines()[-2:]
    assert [row.split()[:2] for row in rows] == [["1", "0"], ["2", "0"]]


def test_a_sweep_draws_its_chart(small: SmallServer, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert bench(small, *SHORT, "--concurrency", "1,2", "--num-prompts", "2", "--chart", str(tmp_path / "c.png")) == 0
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")


def test_a_server_that_refuses_everything(small: SmallServer, capsys: pytest.CaptureFixture[str]) -> None:
    small.failing = "status"
    small.bodies = [{}, {}]
    assert bench(small, *SHORT) == 1
    assert "the first request failed: HTTP 503: queue is full" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ the real engine


@pytest.mark.parametrize(
    "flags",
    [
        ("--prompt-format", "ids"),
        ("--backend", "openai-chat", "--request-rate", "50", "--burstiness", "0.5"),
    ],
)
def test_the_real_server(server: Server, flags: tuple[str, ...], tmp_path: Path) -> None:
    arguments = ("--num-prompts", "4", *SHORT, "--ignore-eos", "--save-detailed", "--result-dir", str(tmp_path), *flags)
    assert bench(server, *arguments) == 0
    (result,) = saved(tmp_path)
    assert (result["model_id"], result["tokenizer_id"], result["failed"]) == (MODEL, MODEL, 0)
    assert result["output_lens"] == [5] * 4
    if "ids" in flags:
        assert result["input_lens"] == [6] * 4
    else:
        assert min(result["input_lens"]) > 6  # the chat template's own tokens
    assert result["errors"] == [""] * 4


def test_prompts_as_text_have_the_length_asked_for(server: Server, tmp_path: Path) -> None:
    flags = ("--dataset-name", "prefix-repetition", "--prefix-repetition-num-prefixes", "2")
    sizes = ("--prefix-repetition-prefix-len", "20", "--prefix-repetition-suffix-len", "4")
    output = (
        "--prefix-repetition-output-len",
        "2",
        "--num-prompts",
        "3",
        "--save-detailed",
        "--result-dir",
        str(tmp_path),
    )
    assert bench(server, *flags, *sizes, *output) == 0
    assert saved(tmp_path)[0]["input_lens"] == [24] * 3


OFFLINE = ("--max-model-len", "256", "--dtype", "float32")


def test_throughput(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.json"
    work = ("--num-prompts", "3", "--input-len", "9", "--output-len", "4")
    assert main(["bench", "throughput", *work, *OFFLINE, "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert (result["num_requests"], result["total_prompt_tokens"], result["total_output_tokens"]) == (3, 27, 12)
    assert result["total_num_tokens"] == 39
    assert result["tokens_per_second"] == pytest.approx(39 / result["elapsed_time"])
    assert result["requests_per_second"] == pytest.approx(3 / result["elapsed_time"])
    assert capsys.readouterr().out.startswith("3 requests in ")


def test_latency(tmp_path: Path) -> None:
    path = tmp_path / "l.json"
    work = ("--batch-size", "2", "--input-len", "4", "--output-len", "3", "--num-iters", "4")
    assert main(["bench", "latency", *work, *OFFLINE, "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert len(result["latencies"]) == 4
    assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 4)
    assert min(result["latencies"]) <= result["percentiles"]["50"] <= max(result["latencies"])


@pytest.mark.parametrize(
    ("what", "steps"),
    [
        ("engine", ["ready", "map the model", "build the executor"]),
        ("server", ["HTTP answers", "ready", "first token", "engine: map the model"]),
    ],
)
def test_startup(what: str, steps: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PINNATE_API_KEY", raising=False)
    path = tmp_path / "s.json"
    assert main(["bench", "startup", "--what", what, "--num-iters", "1", *OFFLINE, "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    (run,) = result["runs"]
    assert result["medians"] == run
    assert "/" not in result["model"]
    assert set(steps) <= set(run)
    assert run["ready"] > 0
    if what == "server":
        assert run["HTTP answers"] <= run["ready"] < run["first token"]


def test_a_server_that_cannot_start_says_why(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"nonsense")
    assert main(["bench", "startup", "--num-iters", "1", str(tmp_path / "m.gguf")]) == 1
    assert "the server ended with exit code 2; it wrote last: " in (error := capsys.readouterr().err)
    assert "m.gguf" in error

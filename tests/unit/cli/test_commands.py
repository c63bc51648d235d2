"""serve, generate, chat and doctor, with the engine and the server replaced."""

import asyncio
import io
import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pinnate.cli import chat, doctor
from pinnate.cli.main import main
from pinnate.core.config import EngineConfig
from pinnate.core.errors import ContextLengthError, EngineDeadError, ModelError
from pinnate.core.sampling import SamplingParams
from pinnate.engine.launch import Launched
from pinnate.executor.base import WeightGroup
from pinnate.text.chat_template import ChatTemplate
from pinnate.weights.resolve import default_model_path

TEMPLATE = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PINNATE_ISA", "PINNATE_LOG_LEVEL", "PINNATE_API_KEY"):
        monkeypatch.delenv(name, raising=False)


class Served:
    """Stands in for server/lifecycle.py."""

    def serve(self, config: EngineConfig, settings: Any, launched: Launched) -> int:
        self.config, self.settings = config, settings
        with launched.take() as process:  # it started while the flags were read
            process.kill()
        os.close(launched.heartbeat)
        return 3


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    fake = Served()
    monkeypatch.setitem(sys.modules, "pinnate.server.lifecycle", fake)  # type: ignore[arg-type]
    return fake


class FakeLLM:
    """Answers each prompt with its own text in capitals; remembers how it was made."""

    made: list["FakeLLM"] = []

    def __init__(self, model: str, **config: Any) -> None:
        self.model, self.config, self.closed = model, config, False
        self.made.append(self)

    def __enter__(self) -> "FakeLLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def generate(self, prompts: list[str], params: SamplingParams, *, use_tqdm: bool) -> list[Any]:
        assert not use_tqdm
        self.params = params
        return [self._output(prompt) for prompt in prompts]

    def chat(self, conversations: list[Any], params: SamplingParams, *, use_tqdm: bool) -> list[Any]:
        assert not use_tqdm
        self.params = params
        return [self._output("chat " + messages[0]["content"]) for messages in conversations]

    def _output(self, prompt: str) -> Any:
        choice = SimpleNamespace(text=prompt.upper(), finish_reason="stop", token_ids=[1, 2])
        return SimpleNamespace(outputs=[choice], prompt_token_ids=[7, 8, 9])


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> type[FakeLLM]:
    monkeypatch.setattr(FakeLLM, "made", [])
    monkeypatch.setitem(sys.modules, "pinnate.engine.llm", SimpleNamespace(LLM=FakeLLM))  # type: ignore[arg-type]
    return FakeLLM


class FakeEngine:
    """AsyncEngine as the chat sees it: answers with `answers` in turn, one delta a word."""

    def __init__(self, answers: list[str | Exception], template: str | None = TEMPLATE) -> None:
        self.answers, self.prompts, self.closed, self.aborted = answers, [], False, 0  # type: ignore[var-annotated]
        self.chat_template = None if template is None else ChatTemplate(template)

    async def start(self, config: EngineConfig) -> "FakeEngine":
        self.config = config
        return self

    async def tokenize(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        self.prompts.append(text)
        return [1]

    async def submit(self, ids: list[int], params: SamplingParams, *, request_id: str) -> Any:
        assert ids == [1]
        assert request_id
        assert params.n == 1
        answer = self.answers.pop(0)
        if isinstance(answer, ContextLengthError):
            raise answer
        return FakeStream(self, answer)

    async def close(self) -> None:
        self.closed = True


class FakeStream:
    def __init__(self, engine: FakeEngine, answer: str | Exception) -> None:
        self.engine, self.answer = engine, answer

    async def __aiter__(self) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        for word in self.answer.split(" "):
            if word == "INTERRUPT":
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.sleep(10)
            yield SimpleNamespace(text=word + " ")

    def abort(self) -> None:
        self.engine.aborted += 1


def talk(monkeypatch: pytest.MonkeyPatch, engine: FakeEngine, lines: str, *flags: str) -> int:
    monkeypatch.setitem(sys.modules, "pinnate.engine.async_engine", SimpleNamespace(AsyncEngine=engine))  # type: ignore[arg-type]
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    return main(["chat", *flags])


def test_serve_hands_over_config_and_settings(served: Served, tmp_path: Path) -> None:
    flags = [
        "--host",
        "::",
        "--port",
        "0",
        "--served-model-name",
        "a",
        "b",
        "--shutdown-timeout",
        "1.5",
        "--access-log",
    ]
    assert main(["serve", str(tmp_path), *flags, "--threads", "2", "--api-key", "k", "--log-level", "debug"]) == 3
    assert served.config == EngineConfig(model=str(tmp_path), threads=2, log_level="debug")
    settings = served.settings
    assert (settings.host, settings.port, settings.served_model_name) == ("::", 0, ("a", "b"))
    assert (settings.shutdown_timeout, settings.access_log, settings.api_keys, settings.log_level) == (
        1.5,
        True,
        ("k",),
        "debug",
    )


def test_serve_takes_the_default_model_and_the_environment(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PINNATE_API_KEY", "secret")
    monkeypatch.setenv("PINNATE_LOG_LEVEL", "warning")
    assert main(["serve"]) == 3
    assert served.config.model == str(default_model_path())
    assert (served.settings.api_keys, served.settings.log_level) == (("secret",), "warning")
    assert served.config.log_level == "warning"  # of the engine's process
    assert served.settings.served_model_name == ()
    main(["serve", "--api-key", "flag", "--log-level", "error"])
    assert served.settings.api_keys == ("flag",)
    assert (served.settings.log_level, served.config.log_level) == ("error", "error")


def test_serve_calls_a_model_from_the_hub_by_its_name(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pinnate.cli.arguments.resolve_model", lambda _: tmp_path)
    main(["serve", "org/name"])
    assert served.settings.served_model_name == ("org/name",)
    main(["serve", "org/name", "--alias", "mine"])
    assert served.settings.served_model_name == ("mine",)


@pytest.mark.parametrize(
    "flags", [["--port", "70000"], ["--shutdown-timeout", "nan"], ["--dtype", "int3"], ["a", "-m", "b"]]
)
def test_serve_refuses_bad_settings(flags: list[str], served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", *flags]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not hasattr(served, "config")


def test_generate_prints_texts(llm: type[FakeLLM], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "one", "two", "--temperature", "0", "--dtype", "fp32"]) == 0
    assert capsys.readouterr().out == "ONE\n---\nTWO\n"
    made = llm.made[0]
    assert made.closed
    assert made.model == str(default_model_path())
    assert (made.params.temperature, made.params.max_tokens) == (0.0, 256)
    assert made.config == {"isa": "auto", "dtype": "float32", "max_num_seqs": 2}


def test_generate_from_stdin_as_json(
    llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("two\nlines"))
    assert main(["generate", "--json", "--chat"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "prompt": "two\nlines",
        "text": "CHAT TWO\nLINES",
        "finish_reason": "stop",
        "prompt_tokens": 3,
        "completion_tokens": 2,
        "token_ids": [1, 2],
    }
    assert llm.made[0].config["max_num_seqs"] == 1


def test_generate_without_a_prompt(
    llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["generate"]) == 2
    assert "no prompt" in capsys.readouterr().err
    assert llm.made == []


def test_chat_keeps_the_history(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine(["hello there", "fine", "new"])
    assert talk(monkeypatch, engine, "hi\n\nhow?\n/reset\nagain\n/what\n/exit\nnever\n", "--system", "S") == 0
    assert engine.prompts == [
        "[system:S][user:hi]",
        "[system:S][user:hi][assistant:hello there ][user:how?]",
        "[system:S][user:again]",
    ]
    assert capsys.readouterr().out == f"{chat.HELP}\nhello there \nfine \nnew \n{chat.HELP}\n"
    assert engine.closed
    assert engine.config.max_num_seqs == 1


def test_chat_survives_a_refused_message(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine([ContextLengthError("too long: 9 tokens"), "ok"])
    assert talk(monkeypatch, engine, "long\nshort\n") == 0
    assert engine.prompts == ["[user:long]", "[user:short]"]
    assert "refused: too long: 9 tokens" in capsys.readouterr().err


def test_chat_ctrl_c_stops_the_answer_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine(["part INTERRUPT more", "next"])
    assert talk(monkeypatch, engine, "a\nb\n") == 0
    assert engine.prompts[1] == "[user:a][assistant:part ][user:b]"
    assert engine.aborted == 2
    assert "part  [stopped]\nnext \n" in capsys.readouterr().out


def test_chat_ends_when_the_engine_dies(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine([EngineDeadError("the engine process died")])
    assert talk(monkeypatch, engine, "a\nb\n") == 1
    assert capsys.readouterr().err == "pinnate: error: the engine process died\n"
    assert engine.closed


def test_chat_needs_a_template(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine([], template=None)
    assert talk(monkeypatch, engine, "a\n") == 2
    assert "has no chat template" in capsys.readouterr().err
    assert engine.closed


def fake_machine(monkeypatch: pytest.MonkeyPatch, isas: list[str]) -> None:
    """A native module, a model and a plan, so that `doctor` can be read without any of them."""
    native = SimpleNamespace(cpu_features=lambda: {"model": "CPU X", "flags": ["avx2", "fma"], "isas": isas})
    config = SimpleNamespace(family="llama", max_position_embeddings=100)
    graph = SimpleNamespace(kv_layers=[1, 2], vocab_size=50)
    loaded = SimpleNamespace(config=config, graph=graph, warnings=())
    choice = lambda value, reason: SimpleNamespace(value=value, reason=reason)  # noqa: E731
    plan = SimpleNamespace(
        dtype=choice("float32", "float32: why"), quantization=choice("int8", "int8: asked"),
        weights=[WeightGroup("int8", "Q8_0: as it is", 3, 5 << 20), WeightGroup("float32", "norms", 2, 1 << 19)],
        max_model_len=choice(100, "100 tokens: why"),
        num_pages=choice(4, "from the memory"), page_bytes=1 << 20,
        memory=SimpleNamespace(lines=lambda: ["5.5 MiB weights", "64.0 KiB of KV per token", "why"]),
        kv_cache_dtype=choice("int8", "int8: why"), groups=SimpleNamespace(reason="2 layers in one group"),
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pinnate._native", native)  # type: ignore[arg-type]
    monkeypatch.setattr("pinnate._native", native, raising=False)
    monkeypatch.setitem(sys.modules, "pinnate.models.load", SimpleNamespace(load_model=lambda _: loaded))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "pinnate.engine.build", SimpleNamespace(plan_engine=lambda *_: plan))  # type: ignore[arg-type]


def test_doctor_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fake_machine(monkeypatch, ["avx2", "portable"])
    assert main(["doctor", "--json", "--threads", "3"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["cpu"]["kernels"] == {"value": "avx2", "reason": "the best that this CPU can run"}
    assert report["machine"]["threads"] == {"value": 3, "reason": "3 threads: set by --threads"}
    assert report["model"]["path"] == str(default_model_path())
    assert report["plan"]["pages"] == {"value": 4, "reason": "from the memory"}
    assert report["plan"]["KV layers"] == "2 layers in one group"
    assert report["plan"]["KV bytes"] == 4 << 20
    assert report["plan"]["memory"] == "5.5 MiB weights"
    assert report["plan"]["KV tokens"] == "64.0 KiB of KV per token"
    assert report["plan"]["quantization"] == {"value": "int8", "reason": "int8: asked"}
    assert report["plan"]["weights"][0] == {
        "format": "int8", "reason": "Q8_0: as it is", "pieces": 3, "bytes": 5 << 20
    }  # fmt: skip
    assert report["versions"]["msgspec"]
    assert report["problems"] == []


def test_doctor_as_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fake_machine(monkeypatch, ["avx2", "portable"])
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    columns = {line[20:21] for line in lines if line.startswith("  ") and len(line) > 20}
    assert " " not in columns, "values do not start in one column"
    text = "\n".join(" ".join(line.split()) for line in lines)
    for expected in (
        "kernels avx2: the best",
        "pages 4: from the memory",
        "KV bytes 4.0 MiB",
        "features avx2 fma",
        "weights 3 in int8 (5.0 MiB; Q8_0: as it is); 2 in float32 (0.5 MiB; norms)",
    ):
        assert expected in text
    assert lines[-2:] == ["problems", "  none"]


def test_doctor_names_what_is_wrong(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fake_machine(monkeypatch, ["portable"])
    monkeypatch.setenv("PINNATE_ISA", "avx512")
    assert main(["doctor", "/no/such/model"]) == 1
    out = capsys.readouterr().out
    assert "PINNATE_ISA is avx512, but this CPU can run portable" in out
    assert "model '/no/such/model': no such file or folder" in out


def test_doctor_without_the_native_module(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fake_machine(monkeypatch, ["portable"])
    monkeypatch.setitem(sys.modules, "pinnate._native", None)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "pinnate.engine.build", None)  # type: ignore[arg-type]

    def broken(_: str) -> None:
        raise ModelError("model.gguf: truncated")

    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert "make install" in report["problems"][0]
    assert report["plan"] == {}
    monkeypatch.setitem(sys.modules, "pinnate.models.load", SimpleNamespace(load_model=broken))  # type: ignore[arg-type]
    assert main(["doctor"]) == 1
    assert "model.gguf: truncated" in capsys.readouterr().out


def test_doctor_shows_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_PACKAGES", ("no-such-package-here",))
    assert doctor._versions()["no-such-package-here"] == "not installed"


def test_serve_takes_keys_from_flags_files_and_the_environment(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PINNATE_API_KEY", "e1, e2")
    monkeypatch.setenv("PINNATE_ADMIN_API_KEY", "boss")
    main(["serve"])
    assert (served.settings.api_keys, served.settings.admin_api_keys) == (("e1", "e2"), ("boss",))
    file = tmp_path / "keys"
    file.write_text("# for the batch job\nf1\n\n  f2,with-comma\n")
    main(["serve", "--api-key", "a,b", "--api-key", "a", "--api-key-file", str(file), "--admin-api-key", "root"])
    assert served.settings.api_keys == ("a", "b", "f1", "f2,with-comma")
    assert served.settings.admin_api_keys == ("root",)


def test_serve_takes_origins_and_logs(served: Served) -> None:
    main(["serve", "--allowed-origins", '["https://a.example"]', "--allowed-origins", "https://b.example,*"])
    assert served.settings.allowed_origins == ("https://a.example", "https://b.example", "*")
    assert not served.settings.access_log
    main(["serve", "--log-format", "json"])
    assert (served.settings.access_log, served.settings.log_format) == (True, "json")
    assert served.config.log_format == "json"
    main(["serve", "--log-format", "json", "--disable-uvicorn-access-log"])
    assert not served.settings.access_log


@pytest.mark.parametrize("content", [None, b"", b"# nothing\n", b"\xff\xfe"])
def test_serve_refuses_a_bad_file_of_keys(
    content: bytes | None, served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    assert main(["serve", "--api-key-file", str(file)]) == 2
    assert "--api-key-file" in capsys.readouterr().err
    assert main(["serve", "--allowed-origins", "[1]"]) == 2
    assert "--allowed-origins" in capsys.readouterr().err
    assert not hasattr(served, "config")

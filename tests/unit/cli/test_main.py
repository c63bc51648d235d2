import subprocess
import sys
from types import SimpleNamespace

import pytest

from pinnate import __version__
from pinnate.cli import main as cli
from pinnate.core.errors import ConfigError, EngineError, InvalidRequestError, ModelError


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A sub-command `probe`; its `run` is set by the test."""
    module = SimpleNamespace(add_arguments=lambda parser: parser.add_argument("--n", type=int, default=0))
    monkeypatch.setitem(sys.modules, "probe_command", module)
    monkeypatch.setattr(cli, "COMMANDS", {"probe": cli.Command("probe_command", "probe things", "[options]")})
    return module


def raising(error: BaseException) -> object:
    def run(_: object) -> int:
        raise error

    return run


def test_a_command_gets_its_arguments_and_gives_the_exit_code(command: SimpleNamespace) -> None:
    command.run = lambda args: args.n
    assert cli.main(["probe", "--n", "7"]) == 7
    assert cli.main(["probe"]) == 0


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("--threads must be at least 1,\ngot 0"), 2),
        (ModelError("x.gguf: not a GGUF file"), 2),
        (InvalidRequestError("top_p must be above 0", param="top_p"), 2),
        (EngineError("the engine failed"), 1),
        (ModuleNotFoundError("No module named 'pinnate._native'", name="pinnate._native"), 2),
    ],
)
def test_errors_are_one_line(
    error: Exception, code: int, command: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    command.run = raising(error)
    assert cli.main(["probe"]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("pinnate: error: ")
    assert err.count("\n") == 1


def test_errors_that_nobody_foresaw_keep_their_traceback(command: SimpleNamespace) -> None:
    for error in (ZeroDivisionError(), ModuleNotFoundError("x", name="x")):
        command.run = raising(error)
        with pytest.raises(type(error)):
            cli.main(["probe"])


def test_interrupted(command: SimpleNamespace) -> None:
    command.run = raising(KeyboardInterrupt())
    assert cli.main(["probe"]) == 130


@pytest.mark.parametrize("arguments", [["probe", "--unknown"], ["probe", "--n", "x"], ["probe", "extra"], ["frob"]])
def test_wrong_usage_is_one_line(
    arguments: list[str], command: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    command.run = raising(AssertionError("must not run"))
    assert cli.main(arguments) == 2
    err = capsys.readouterr().err
    assert "error: " in err
    assert err.count("\n") == 1


def test_overview_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("serve", "chat", "generate", "bench", "doctor"))
    assert cli.main([]) == 2
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.endswith(f"pinnate {__version__}\n")


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_help_is_short(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: pinnate {name}")
    assert len(out.splitlines()) < 60


def test_at_most_40_flags() -> None:
    flags = set()
    for name, command in cli.COMMANDS.items():
        parser = cli.make_parser(name, command)
        flags |= {action.option_strings[0] for action in parser._actions if action.option_strings and shown(action)}
    assert 20 < len(flags) <= 40, sorted(flags)


def shown(action: object) -> bool:
    return getattr(action, "help", "") != "==SUPPRESS=="


def test_the_entry_point_loads_nothing_heavy() -> None:
    heavy = ("numpy", "tokenizers", "jinja2", "zmq", "starlette", "uvicorn", "huggingface_hub", "msgspec", "asyncio")
    code = f"import sys, pinnate.cli.main; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_as_a_program() -> None:
    command = [sys.executable, "-m", "pinnate.cli.main", "serve", "/no/such/model.gguf"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "pinnate: error: model '/no/such/model.gguf': no such file or folder\n"
    assert done.stdout == ""

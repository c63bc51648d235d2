"""`pinnate`: picks the sub-command, and turns errors into one line and an exit code.

Knows: the names of the sub-commands. Must not know: their flags or what they import; a module is loaded only when its
command runs.

Exit codes: 0 done; 1 it failed while running; 2 wrong usage, settings or model; 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, NoReturn

from pinnate import __version__
from pinnate.core.errors import ConfigError, ModelError, PinnateError, RequestError

HELP = frozenset(("-h", "--help"))


class Command(NamedTuple):
    module: str
    summary: str
    usage: str  # what follows the command's name
    parts: Mapping[str, Command] = MappingProxyType({})  # sub-commands of its own; without one, it runs itself
    engine: bool = False  # it takes an engine process, `args.launched`


BENCH: Mapping[str, Command] = MappingProxyType(
    {
        "engine": Command("pinnate.bench.command", "the engine against the machine's limits", "[MODEL] [options]"),
        "serve": Command("pinnate.cli.bench.serve", "load a running OpenAI-compatible server", "[options]"),
        "throughput": Command("pinnate.cli.bench.throughput", "tokens a second, offline", "[MODEL] [options]"),
        "latency": Command("pinnate.cli.bench.latency", "seconds of one batch, offline", "[MODEL] [options]"),
        "startup": Command("pinnate.cli.bench.startup", "from start to ready", "[MODEL] [options]"),
    }
)

COMMANDS: Mapping[str, Command] = MappingProxyType(
    {
        "serve": Command(
            "pinnate.cli.serve", "serve a model over an OpenAI-compatible API", "[MODEL] [options]", engine=True
        ),
        "chat": Command("pinnate.cli.chat", "talk to a model in the terminal", "[MODEL] [options]"),
        "generate": Command("pinnate.cli.generate", "complete prompts and exit", "[PROMPT ...] [options]"),
        "run-batch": Command("pinnate.cli.run_batch", "answer a file of requests and exit", "INPUT OUTPUT [options]"),
        "bench": Command(
            "pinnate.bench.command", "measure the engine and the machine's limits", "[MODEL] [options]", BENCH
        ),
        "doctor": Command("pinnate.cli.doctor", "show what pinnate finds and chooses here", "[MODEL] [options]"),
    }
)


class OneLineParser(argparse.ArgumentParser):
    """Reports wrong usage in one line, without the usage text. `error` is argparse's hook for that."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["--version"]:
        print(f"pinnate {__version__}")
        return 0
    if not arguments or arguments[0] in (*HELP, "help"):
        print(_overview())
        return 0 if arguments else 2
    name, rest = arguments[0], arguments[1:]
    command = COMMANDS.get(name)
    if command is None:
        return _fail(f"unknown command {name!r} (commands: {', '.join(COMMANDS)})", 2)
    if rest and rest[0] in command.parts:
        name, command, rest = f"{name} {rest[0]}", command.parts[rest[0]], rest[1:]
    try:
        return _run(name, command, rest)
    except SystemExit as stop:  # argparse: --help, or wrong usage already reported
        return stop.code if isinstance(stop.code, int) else 2
    except (ConfigError, ModelError, RequestError) as error:
        return _fail(str(error), 2)
    except PinnateError as error:
        return _fail(str(error), 1)
    except ModuleNotFoundError as error:
        if error.name != "pinnate._native":
            raise
        return _fail("the native module is not built: run `make install`", 2)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of a pipe is gone. Python would complain once more when it flushes stdout at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def make_parser(name: str, command: Command) -> argparse.ArgumentParser:
    """The parser of one sub-command, with its module's arguments."""
    parser = OneLineParser(
        prog=f"pinnate {name}",
        usage=f"pinnate {name} {command.usage}",
        description=command.summary[0].upper() + command.summary[1:] + ".",
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=110),
    )
    importlib.import_module(command.module).add_arguments(parser)
    if command.parts:
        listed = "; ".join(f"{part}: {inner.summary}" for part, inner in command.parts.items())
        parser.epilog = f"pinnate {name} COMMAND --help shows the options of a command. {listed}."
    return parser


def _run(name: str, command: Command, arguments: Sequence[str]) -> int:
    # The engine's process imports what it needs while this one reads the flags: half of the time to ready.
    launched = None
    if command.engine and not HELP & set(arguments):
        from pinnate.engine.launch import Launched

        launched = Launched()
    try:
        args = make_parser(name, command).parse_args(arguments)
        args.launched = launched
        code: int = importlib.import_module(command.module).run(args)
        return code
    finally:
        if launched is not None:
            launched.abandon()


def _overview() -> str:
    lines = ["usage: pinnate COMMAND [options]", "", "commands:"]
    lines += [f"  {name:<11}{command.summary}" for name, command in COMMANDS.items()]
    return "\n".join([*lines, "", "pinnate COMMAND --help lists the options of a command; pinnate --version."])


def _fail(message: str, code: int) -> int:
    line = " ".join(message.split())
    print(f"pinnate: error: {line}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())

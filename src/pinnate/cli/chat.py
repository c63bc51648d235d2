"""`pinnate chat`: a conversation in the terminal, streamed.

Knows: lines, commands, the history. Must not know: how an engine works; it sees AsyncEngine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pinnate.cli.arguments import (
    add_engine_arguments,
    add_flag,
    add_model_arguments,
    add_sampling_arguments,
    engine_config,
    sampling_params,
)
from pinnate.core.errors import ModelError, RequestError
from pinnate.core.sampling import SamplingParams

if TYPE_CHECKING:
    from pinnate.engine.async_engine import AsyncEngine

HELP = "/reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C stops an answer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add_sampling_arguments(parser)
    group = parser.add_argument_group("chat")
    add_flag(group, "--system", metavar="TEXT", help="system message of the conversation")
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    params = sampling_params(args)
    config = engine_config(args, max_num_seqs=1)
    from pinnate.engine.async_engine import AsyncEngine

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (gives input() editing and history)
    with asyncio.Runner() as runner:
        engine = runner.run(AsyncEngine.start(config))
        try:
            if engine.chat_template is None:
                raise ModelError(f"{config.model} has no chat template; use pinnate generate")
            print(HELP)
            conversation = Conversation(engine, params, getattr(args, "system", None), _write)
            _talk(conversation, runner)
        finally:
            runner.run(engine.close())
    return 0


class Conversation:
    """The history of one chat. An answer that was stopped or cut stays in it as far as it came."""

    def __init__(
        self, engine: AsyncEngine, params: SamplingParams, system: str | None, write: Callable[[str], object]
    ) -> None:
        self._engine = engine
        self._params = params
        self._start = [] if system is None else [{"role": "system", "content": system}]
        self._write = write
        self.messages: list[dict[str, Any]] = list(self._start)

    def reset(self) -> None:
        self.messages = list(self._start)

    async def ask(self, text: str) -> None:
        """Streams the answer to `text`; both join the history.

        Raises:
            RequestError: the message is refused (too long, say); the history is as before.
            EngineError: the engine failed; the history ends with what had arrived.
        """
        engine, asked = self._engine, [*self.messages, {"role": "user", "content": text}]
        assert engine.chat_template is not None
        prompt = engine.chat_template.render(asked)
        ids = await engine.tokenize(prompt, add_special_tokens=False)
        stream = await engine.submit(ids, self._params, request_id="chat")
        pieces: list[str] = []
        try:
            async for delta in stream:
                pieces.append(delta.text)
                self._write(delta.text)
        finally:
            stream.abort()
            self.messages = [*asked, {"role": "assistant", "content": "".join(pieces)}]


def _talk(conversation: Conversation, runner: asyncio.Runner) -> None:
    """Reads lines until the end."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:  # at the prompt it clears the line, as in a shell
            print()
            continue
        if line in ("/exit", "/quit"):
            return
        if line == "/reset":
            conversation.reset()
        elif line.startswith("/"):
            print(HELP)
        elif line:
            _answer(conversation, runner, line)


def _answer(conversation: Conversation, runner: asyncio.Runner, line: str) -> None:
    try:
        runner.run(conversation.ask(line))
    except RequestError as error:
        print(f"refused: {error} (/reset starts anew)", file=sys.stderr)
    except KeyboardInterrupt:
        print(" [stopped]", end="")
    print()


def _write(text: str) -> None:
    print(text, end="", flush=True)

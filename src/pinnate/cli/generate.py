"""`pinnate generate`: completes prompts from the command line or stdin and exits."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from pinnate.cli.arguments import (
    add_engine_arguments,
    add_model_arguments,
    add_sampling_arguments,
    engine_config,
    engine_settings,
    sampling_params,
)
from pinnate.core.errors import ConfigError

if TYPE_CHECKING:
    from pinnate.engine.llm import RequestOutput

MAX_TOKENS = 256  # where no flag says otherwise: a base model may never end by itself


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompts", metavar="PROMPT", nargs="*", help="text to complete (default: all of stdin)")
    parser.add_argument("--chat", action="store_true", help="each prompt is a message that the model answers")
    parser.add_argument("--json", action="store_true", help="one JSON object a line, with tokens and counts")
    add_sampling_arguments(parser)
    add_model_arguments(parser, positional=False)
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    params = sampling_params(args, max_tokens=MAX_TOKENS)
    prompts = args.prompts or [_read_stdin()]
    config = engine_config(args, max_num_seqs=min(len(prompts), 64))
    from pinnate.engine.llm import LLM

    settings = engine_settings(args) | {"max_num_seqs": config.max_num_seqs}
    with LLM(config.model, **settings) as llm:
        progress = len(prompts) > 1 and sys.stderr.isatty()
        if args.chat:
            conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
            outputs = llm.chat(conversations, params, use_tqdm=progress)
        else:
            outputs = llm.generate(prompts, params, use_tqdm=progress)
    print(_as_json(prompts, outputs) if args.json else _as_text(outputs))
    return 0


def _read_stdin() -> str:
    if sys.stdin.isatty():
        raise ConfigError("no prompt is given; name one, or send it on stdin")
    text = sys.stdin.read()
    if not text:
        raise ConfigError("stdin is empty: no prompt")
    return text


def _as_text(outputs: list[RequestOutput]) -> str:
    return "\n---\n".join(output.outputs[0].text for output in outputs)


def _as_json(prompts: list[str], outputs: list[RequestOutput]) -> str:
    return "\n".join(
        json.dumps(_record(prompt, output), ensure_ascii=False) for prompt, output in zip(prompts, outputs, strict=True)
    )


def _record(prompt: str, output: RequestOutput) -> dict[str, Any]:
    choice = output.outputs[0]
    return {
        "prompt": prompt,
        "text": choice.text,
        "finish_reason": choice.finish_reason,
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": len(choice.token_ids),
        "token_ids": choice.token_ids,
    }

"""`pinnate bench throughput`: all prompts at once, offline, in this process."""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from pinnate.cli.arguments import add_engine_arguments, add_model_arguments, engine_settings, model_of
from pinnate.cli.bench.common import add_json_argument, check_at_least, write_json
from pinnate.core.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    group = parser.add_argument_group("work")
    group.add_argument("--num-prompts", type=int, default=64, metavar="N", help="default: %(default)s")
    group.add_argument("--input-len", type=int, default=128, metavar="N", help="default: %(default)s")
    group.add_argument("--output-len", type=int, metavar="N", help="default: 128; sharegpt: the recorded answer's")
    group.add_argument("--dataset-name", "--dataset", dest="dataset", choices=("random", "sharegpt"), default="random")
    group.add_argument("--dataset-path", type=Path, metavar="FILE", help="sharegpt: JSON in the ShareGPT format")
    add_json_argument(group)
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    check_at_least(args, num_prompts=1, input_len=1)
    if args.output_len is not None:
        check_at_least(args, output_len=1)
    if args.dataset == "sharegpt" and args.dataset_path is None:
        raise ConfigError("--dataset sharegpt needs --dataset-path FILE")
    settings = engine_settings(args)
    from pinnate.bench.datasets import TokenizerSource, random_prompts, sharegpt
    from pinnate.bench.inprocess import measure_latency, measure_throughput
    from pinnate.engine.llm import LLM

    with LLM(model_of(args), **settings) as llm:
        source, rng = TokenizerSource(llm.tokenizer), random.Random(llm.config.seed)
        if args.dataset == "sharegpt":
            work = sharegpt(source, rng, args.num_prompts, path=args.dataset_path, output_len=args.output_len)
        else:
            lengths = {"input_len": args.input_len, "output_len": args.output_len or 128}
            work = random_prompts(source, rng, args.num_prompts, as_ids=True, **lengths)
        measure_latency(llm, rng, batch_size=1, input_len=32, output_len=8, warmup=0, iterations=1)  # warms up
        result = measure_throughput(llm, work).as_json()
        about = {"model": Path(llm.config.model).name, "dtype": llm.info["dtype"], "threads": llm.info["threads"]}
    print(
        f"{result['num_requests']:.0f} requests in {result['elapsed_time']:.2f} s: "
        f"{result['requests_per_second']:.2f} requests/s, {result['tokens_per_second']:.1f} tokens/s, "
        f"{result['output_tokens_per_second']:.1f} of them output"
    )
    write_json(args.json, about | result)
    return 0

"""`pinnate bench latency`: one batch again and again, offline, in this process."""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from pinnate.cli.arguments import add_engine_arguments, add_model_arguments, engine_settings, model_of
from pinnate.cli.bench.common import add_json_argument, check_at_least, write_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    group = parser.add_argument_group("work")
    group.add_argument("--input-len", type=int, default=32, metavar="N", help="default: %(default)s")
    group.add_argument("--output-len", type=int, default=128, metavar="N", help="default: %(default)s")
    group.add_argument("--batch-size", type=int, default=8, metavar="N", help="default: %(default)s")
    group.add_argument("--num-iters", type=int, default=10, metavar="N", help="counted (default: %(default)s)")
    group.add_argument("--num-iters-warmup", type=int, default=1, metavar="N", help="before those, not counted")
    add_json_argument(group)
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    check_at_least(args, input_len=1, output_len=1, batch_size=1, num_iters=1, num_iters_warmup=0)
    settings = engine_settings(args)
    from pinnate.bench.inprocess import PERCENTILES, measure_latency
    from pinnate.engine.llm import LLM

    with LLM(model_of(args), **settings) as llm:
        latency = measure_latency(
            llm, random.Random(llm.config.seed), batch_size=args.batch_size, input_len=args.input_len,
            output_len=args.output_len, warmup=args.num_iters_warmup, iterations=args.num_iters,
        )  # fmt: skip
        about = {"model": Path(llm.config.model).name, "dtype": llm.info["dtype"], "threads": llm.info["threads"]}
    result = latency.as_json()
    print(f"average {result['avg_latency']:.4f} s over {args.num_iters} iterations")
    for p in PERCENTILES:
        print(f"p{p:<6} {result['percentiles'][str(p)]:.4f} s")
    write_json(args.json, about | result)
    return 0

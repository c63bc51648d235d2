"""Pages that the choices of one request share: n drawn choices and beam search, against each with pages of its own.

Part of allocation.py. Every request runs alone, all of its steps are run; pages are added up over the steps.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import msgspec

from pinnate.core.request import Request
from pinnate.core.sampling import SamplingParams
from pinnate.engine.engine_core import EngineCore
from pinnate.engine.mailbox import Mailbox
from pinnate.executor.base import Executor
from pinnate.kvcache.manager import KVCacheManager
from pinnate.scheduler.scheduler import Scheduler

Lengths = tuple[int, int]
PARALLEL = SamplingParams(n=8, temperature=1.0, ignore_eos=True, seed=0)
BEAMS = SamplingParams(n=4, temperature=0.0, use_beam_search=True, ignore_eos=True, seed=0)
REQUESTS, MAX_OUTPUT = 4, 512  # each takes time: the longest outputs of the distribution are left out


def measure_sharing(
    executor: Executor, num_pages: int, page_size: int, max_model_len: int, draw: Callable[[random.Random], Lengths]
) -> dict[str, Any]:
    rng = random.Random("sharing")
    drawn = (draw(rng) for _ in itertools.count())
    lengths = list(itertools.islice((pair for pair in drawn if pair[1] <= MAX_OUTPUT), REQUESTS))
    result = {}
    for name, params in (("n = 8", PARALLEL), ("beam width 4", BEAMS)):
        held = lone = prompts = computed = 0
        for asked, wanted in lengths:
            cache = KVCacheManager(num_pages, page_size)
            scheduler = Scheduler(cache, max_num_seqs=8, max_num_batched_tokens=512, max_model_len=max_model_len)
            prompt = [rng.randrange(100, 40_000) for _ in range(asked)]
            pages = run_alone(scheduler, executor, prompt, msgspec.structs.replace(params, max_tokens=wanted))
            held, lone, computed = held + pages[0], lone + pages[1], computed + pages[2]
            prompts += asked
        result[name] = {
            "lengths": lengths,
            "page_steps": held,
            "page_steps_unshared": lone,
            "saved": 1 - held / lone,
            "prompt_tokens_computed": computed / prompts,
        }
    return result


def run_alone(
    scheduler: Scheduler, executor: Executor, prompt: list[int], params: SamplingParams
) -> tuple[int, int, int]:
    """Pages held, pages that unshared tables would hold (both added up over the steps of the forked request), and
    tokens computed as parts of the prompt."""
    mailbox = Mailbox()
    core = EngineCore(scheduler, executor, mailbox)
    request = Request(request_id="0", prompt_token_ids=prompt, sampling=params, eos_token_ids=(2,))
    mailbox.inbox.append(request)
    held = lone = 0
    while True:
        core.step()
        tables = [seq.page_table for seq in scheduler._queues.running]
        if len(tables) > 1 and not params.use_beam_search:
            held += len({page for table in tables for page in table})
            lone += sum(len(table) for table in tables)
        for message in mailbox.collect():
            for output in message.outputs:  # type: ignore[union-attr]
                if output.error is not None:
                    raise RuntimeError(output.error)
        if not scheduler.has_work():
            break
    stats = core.stats()
    if params.use_beam_search:
        held, lone = stats.beam_page_steps, stats.beam_lone_page_steps
    return held, lone, stats.prompt_tokens - stats.prefix_cache_hits

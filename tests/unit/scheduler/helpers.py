"""A scheduler with an executor that returns what a test tells it to."""

from __future__ import annotations

from collections.abc import Callable

from pinnate.core.batch import Sample, SchedulerOutput, StepResult, TokenLogprobs
from pinnate.core.messages import CacheReport, TokenOutput
from pinnate.core.request import Request
from pinnate.core.sampling import SamplingParams
from pinnate.kvcache.explain import EvictedPaths, MatchExplainer
from pinnate.kvcache.manager import KVCacheManager
from pinnate.kvcache.page_hashes import PageHashes
from pinnate.scheduler.scheduler import Scheduler

EOS = 0


def make_request(name: str, prompt: list[int], **fields: object) -> Request:
    outer = {key: fields.pop(key) for key in ("priority", "cache_salt", "adapter", "cache_report") if key in fields}
    params = SamplingParams(**{"max_tokens": 4, "seed": 0, **fields})  # type: ignore[arg-type]
    return Request(request_id=name, prompt_token_ids=prompt, sampling=params, eos_token_ids=(EOS,), **outer)  # type: ignore[arg-type]


class Engine:
    """One step is schedule, execute (each sample draws `token(sample)`, by default 100) and update."""

    def __init__(
        self,
        *,
        num_pages: int = 64,
        page_size: int = 4,
        caching: bool = True,
        policy: str = "fcfs",
        max_num_seqs: int = 8,
        budget: int = 64,
        max_model_len: int = 128,
        max_num_queued_reqs: int = 1024,
        pinnable_pages: int = 0,
        reports: bool = False,
    ) -> None:
        evicted = EvictedPaths(page_size)
        hashes = PageHashes(page_size, [evicted]) if reports else None
        self.cache = KVCacheManager(
            num_pages, page_size, enable_prefix_caching=caching, pinnable_pages=pinnable_pages, watch=hashes
        )
        explainer = MatchExplainer(self.cache.tree, hashes, evicted, page_size, True) if hashes is not None else None
        self.scheduler = Scheduler(
            self.cache,
            policy=policy,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            max_num_queued_reqs=max_num_queued_reqs,
            explainer=explainer,
        )
        self.token: Callable[[Sample], int] = lambda _sample: 100
        self.output: SchedulerOutput | None = None  # of the latest step
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.ends: dict[tuple[str, int], TokenOutput] = {}
        self.reports: dict[str, CacheReport] = {}

    def add(self, name: str, prompt: list[int], **fields: object) -> None:
        self.scheduler.add(make_request(name, prompt, **fields))

    def step(self) -> list[TokenOutput]:
        self.output = self.scheduler.schedule()
        if self.output is None:
            return []
        outputs = self.scheduler.update(self.output, self.result(self.output))
        self.scheduler.check_integrity()
        self.take(outputs)
        return outputs

    def result(self, output: SchedulerOutput) -> StepResult:
        samples = [sample for part in output.sequences for sample in part.samples]
        scores = {
            part.seq_id: [TokenLogprobs(t, -1.0 * (part.start + 1 + i), 1) for i, t in enumerate(part.score)]
            for part in output.sequences
            if part.score is not None
        }
        return StepResult([self.token(sample) for sample in samples], [None] * len(samples), scores)

    def take(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            key = output.request_id, output.index
            self.tokens.setdefault(key, []).extend(output.token_ids)
            if output.cache_report is not None:
                assert output.request_id not in self.reports
                self.reports[output.request_id] = output.cache_report
            if output.finish_reason is not None:
                self.ends[key] = output

    def run(self, max_steps: int = 500) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_work():
                return
            self.step()
        raise AssertionError("no end in sight")

    def sizes(self) -> list[int]:
        """Tokens of each sequence in the latest step, in its order."""
        return [] if self.output is None else [len(part.token_ids) for part in self.output.sequences]

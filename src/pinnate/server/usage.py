"""Counting the tokens of one job while its outputs pass by.

Knows: prompts, choices, the usage object. Must not know: times, metrics, shapes of answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pinnate.server.protocol.common import PromptTokensDetails, Usage

if TYPE_CHECKING:
    from pinnate.engine.output_processor import OutputDelta
    from pinnate.server.generation import Job


class UsageCounter:
    """Fed with every output of a job. `cached`: tokens found in the prefix cache, by prompt; `generated`: tokens, by
    prompt and choice."""

    def __init__(self, job: Job) -> None:
        self._prompt_tokens = sum(len(prompt.token_ids) for prompt in job.prompts)
        self.cached = [0] * len(job.prompts)
        self.generated: dict[tuple[int, int], int] = {}

    def add(self, number: int, delta: OutputDelta) -> None:
        """What a choice of prompt `number` got."""
        key = (number, delta.index)
        self.cached[number] = max(self.cached[number], delta.num_cached_tokens)
        self.generated[key] = self.generated.get(key, 0) + len(delta.token_ids)

    def usage(self) -> Usage:
        """Of all choices so far; each prompt counts once."""
        generated = sum(self.generated.values())
        details = PromptTokensDetails(sum(self.cached))
        return Usage(self._prompt_tokens, generated, self._prompt_tokens + generated, details)

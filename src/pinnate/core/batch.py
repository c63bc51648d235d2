"""What the control plane tells the data plane to run in one step, and what comes back.

Plain integers and arrays of integers; no numpy. Frozen: once made, a SchedulerOutput is only read.
`array` members are borrowed from their Sequence and must not be changed by the reader.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import msgspec

from pinnate.core.sampling import SamplingParams
from pinnate.core.structured import Matcher


@dataclass(frozen=True, slots=True)
class Sample:
    """One token to draw from the logits of a sequence's last scheduled position.

    `seed` + `index` (which of n) and `position` (of the token to be drawn) key the random generator, so that the
    draw does not depend on the batch, and choice i draws what a lone request with the seed + i draws. `token_ids` is
    the whole history (prompt, then output) where penalties need it, else None. `banned` tokens get no probability (EOS
    before min_tokens).
    `target` >= 0 reports that token's raw log-probability instead of drawing one. `num_top` is how many of the most
    likely tokens to report; None: what the params ask for. `matcher` says which tokens may be drawn; borrowed until
    the step is done.
    """

    params: SamplingParams
    seed: int
    index: int
    position: int
    token_ids: array[int] | None = None
    num_prompt_tokens: int = 0
    banned: tuple[int, ...] = ()
    target: int = -1
    num_top: int | None = None
    matcher: Matcher | None = None


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """The tokens of one sequence to compute this step.

    `token_ids` occupy positions start .. start+len-1; `page_table` covers them and everything before. So does each of
    `window_tables`, one for each windowed layer group, with the null page where no token of the step looks.
    `samples` is empty for a chunk that does not reach the last known token; n entries where a prompt of a
    request with n choices is completed (all drawn from the same logits). `score` asks for the
    log-probabilities of prompt tokens: the logits of position start+i score the token at start+i+1, which is
    `score[i]`; `score_top` is how many alternatives. `score_ids` are reported at each scored position too.
    """

    seq_id: int
    start: int
    token_ids: array[int]
    page_table: array[int]
    samples: tuple[Sample, ...] = ()
    score: array[int] | None = None
    score_top: int = 0
    window_tables: tuple[array[int], ...] = ()
    score_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step. `copies` are (source page, target page) of copy-on-write, run before the forward pass."""

    sequences: tuple[ScheduledSequence, ...]
    copies: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(s.token_ids) for s in self.sequences)


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one token, of the raw distribution, and the most likely ones, best first."""

    token_id: int
    logprob: float
    rank: int  # 1 = most likely
    top: list[tuple[int, float]] = []
    chosen: list[tuple[int, float]] = []  # of `logprob_token_ids`, in that order


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results of one step, in the order of the SchedulerOutput.

    `token_ids[i]` belongs to the i-th Sample (sequences in order, their samples in order); `logprobs[i]` is None
    unless that sample or its params ask for it. `scores` maps seq_id to the scores of its `score` tokens.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    scores: dict[int, list[TokenLogprobs]]

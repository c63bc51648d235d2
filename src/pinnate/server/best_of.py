"""best_of: more candidates than choices, of which the most likely are shown.

Knows: a finished job. Must not know: how candidates are drawn. They are ranked by their mean log-probability per token
(of the raw distribution), as OpenAI defines it; equal ones stay in the order of their index.
"""

from __future__ import annotations

from dataclasses import replace

from pinnate.core.errors import InvalidRequestError
from pinnate.core.sampling import MAX_N
from pinnate.server.generation import Job
from pinnate.server.replies import Choice, Gathered


def check_best_of(best_of: int | None, n: int, *, most: int, stream: bool, beams: bool) -> int | None:
    """`best_of` if it asks for anything. `most` sequences can run at once.

    Raises:
        InvalidRequestError: less than n, too many, or candidates to choose from in a stream.
    """
    if best_of is None:
        return None
    most = min(most, MAX_N)
    if not n <= best_of <= most:
        raise InvalidRequestError(
            f"best_of must be at least n ({n}) and at most {most}, got {best_of}", param="best_of"
        )
    if best_of == n:
        return None
    if stream and not beams:
        raise InvalidRequestError("best_of larger than n is not available with stream: true", param="best_of")
    return best_of


def choose(job: Job, gathered: Gathered) -> tuple[Job, Gathered]:
    """The job as the client asked for it, with the best of each prompt's candidates, best first."""
    if job.shown is None:
        return job, gathered
    shown = replace(job, params=job.shown, shown=None)
    best = Gathered(shown)
    best.prompt_scores, best.cache_reports = gathered.prompt_scores, gathered.cache_reports
    best.stopwatch = gathered.stopwatch
    candidates = job.params.n
    for number in range(len(job.prompts)):
        of_prompt = gathered.choices[number * candidates : (number + 1) * candidates]
        first = number * shown.params.n
        best.choices[first : first + shown.params.n] = sorted(of_prompt, key=_unlikeliness)[: shown.params.n]
    return shown, best


def _unlikeliness(choice: Choice) -> float:
    scored = [entry.logprob for entry in choice.logprobs]
    return -sum(scored) / len(scored) if scored else float("inf")

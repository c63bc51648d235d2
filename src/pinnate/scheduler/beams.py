"""BeamGroup: the beam search of one request, and which sequence computes which beam.

Knows: what a beam's row of logits must report, how reports become candidates, which sequences fork and die, what the
choices get at the end. Must not know: page tables, queues, the running batch; the scheduler makes and ends sequences.

A step of the search needs the candidates of every beam. Where they come in different steps (a chunked or preempted
beam), those that came first wait here; their sequences need no pages for it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Listed
from typing import ClassVar, Protocol

import msgspec

from pinnate.core.batch import Sample, TokenLogprobs
from pinnate.core.messages import CacheReport, RequestTiming, TokenOutput
from pinnate.core.request import FinishReason, Request, RequestStatus, Sequence
from pinnate.core.sampling import SamplingParams
from pinnate.scheduler.beam_search import BeamRules, BeamSearch, Candidate, Hypothesis, StopScanner


class Brood(Protocol):
    """What a search does to sequences; the scheduler's part."""

    def num_free_seqs(self) -> int: ...
    def branch(self, parent: Sequence, index: int, *, runs: bool) -> Sequence: ...
    def wait_again(self, seq: Sequence) -> None: ...
    def drop(self, seq: Sequence) -> None: ...


class BeamGroup:
    """`sequences[i]` computes `search.beams[i]`. `choices` are the indices a client still waits for."""

    COUNTERS: ClassVar = ("beam_page_steps", "beam_lone_page_steps")  # see EngineStats

    def __init__(self, request: Request, stop_tokens: frozenset[int], scanner: StopScanner | None) -> None:
        params = request.sampling
        self._request_id = request.request_id
        self._params = params
        self._stop_tokens = stop_tokens
        self._raised = tuple(token for token, bias in params.logit_bias.items() if bias > 0)
        self._num_reported = _num_reported(params, len(stop_tokens))
        self.search = BeamSearch(
            BeamRules(
                width=params.num_sequences,
                max_tokens=request.max_tokens,
                length_penalty=params.length_penalty,
                early_stopping=params.early_stopping,
                stop_tokens=stop_tokens,
                min_tokens=params.min_tokens,
            ),
            scanner,
        )
        self.sequences: list[Sequence] = []
        self.choices = list(range(params.n))
        self._offers: dict[int, Iterable[Candidate]] = {}  # by seq_id, of the beams whose candidates are known

    def samples(self, seq: Sequence) -> tuple[Sample, ...]:
        """What the beam's row of logits must report: the most likely tokens, and those that a bias raises."""
        position = len(seq.token_ids)
        seed = seq.request.seed
        first, *others = self._raised or (0,)
        rows = [Sample(self._params, seed, 0, position, num_top=self._num_reported, target=first)]
        rows += [Sample(self._params, seed, 0, position, num_top=0, target=token) for token in others]
        return tuple(rows)

    def offer(self, seq: Sequence, reports: Listed[TokenLogprobs | None]) -> bool:
        """Takes in what `samples` asked for. Returns whether every beam's candidates are known now."""
        self._offers[seq.seq_id] = self._candidates([report for report in reports if report is not None])
        return len(self._offers) == len(self.sequences)

    def has_offered(self, seq: Sequence) -> bool:
        """Whether this beam has nothing to compute until the search goes on."""
        return seq.seq_id in self._offers

    def advance(self, brood: Brood) -> None:
        """One step of the search: beams die and fork, all by page tables; no key or value is moved. A beam whose parent
        has no pages, or for which there is no place, waits to be computed again."""
        branches = self.search.advance([self._offers[seq.seq_id] for seq in self.sequences])
        self._offers.clear()
        if self.search.is_done:
            return
        first = {branch.parent: number for number, branch in reversed(list(enumerate(branches)))}
        for number, seq in enumerate(self.sequences):
            if number not in first:
                brood.drop(seq)
        used = {self.sequences[number].index for number in first}
        unused = (index for index in itertools.count() if index not in used)
        places = brood.num_free_seqs()
        heirs: list[Sequence] = []
        for number, branch in enumerate(branches):
            seq = self.sequences[branch.parent]
            if number != first[branch.parent]:
                runs = seq.status is RequestStatus.RUNNING and places > 0
                places -= runs
                seq = brood.branch(seq, next(unused), runs=runs)
            heirs.append(seq)
        for seq, branch in zip(heirs, branches, strict=True):  # now that all have forked
            seq.token_ids.append(branch.token)
            if seq.status is RequestStatus.PARKED:
                brood.wait_again(seq)
        self.sequences = heirs

    def count_pages(self, totals: dict[str, int]) -> None:
        """Adds the pages that the beams hold, and those that they would hold if none were shared."""
        tables = [seq.page_table for seq in self.sequences]
        held, lone = self.COUNTERS
        totals[held] += len({page for table in tables for page in table})
        totals[lone] += sum(len(table) for table in tables)

    def take_choices(self, index: int | None) -> list[int]:
        """The choices that nobody waits for any more: the one given, or all."""
        ended = [choice for choice in self.choices if index is None or choice == index]
        self.choices = [choice for choice in self.choices if choice not in ended]
        return ended

    def results(
        self,
        num_cached_tokens: int,
        prompt_logprobs: list[TokenLogprobs | None] | None,
        cache_report: CacheReport | None,
        timing: RequestTiming | None,
    ) -> list[TokenOutput]:
        """The end of every choice that is still waited for, the best hypothesis first. The first carries the prompt's
        scores, the cache's report and the timing."""
        first, complete = self.choices[0], self.search.complete
        outputs = [
            self._result(
                index,
                # Fewer hypotheses than choices: the vocabulary has no more of this length.
                complete[index] if index < len(complete) else None,
                num_cached_tokens,
                prompt_logprobs if index == first else None,
                cache_report if index == first else None,
            )
            for index in self.choices
        ]
        return [msgspec.structs.replace(outputs[0], timing=timing), *outputs[1:]]

    def _result(
        self,
        index: int,
        found: Hypothesis | None,
        num_cached_tokens: int,
        prompt_logprobs: list[TokenLogprobs | None] | None,
        cache_report: CacheReport | None,
    ) -> TokenOutput:
        tokens = [] if found is None else found.outputs()
        return TokenOutput(
            self._request_id,
            index,
            [step.token for step in tokens],
            None if self._params.logprobs is None else [step.entry for step in tokens],
            FinishReason.STOP if found is not None and found.stopped else FinishReason.LENGTH,
            None if found is None else found.stop_token,
            num_cached_tokens,
            prompt_logprobs,
            cache_report=cache_report,
            score=None if found is None else found.score,
        )

    def _candidates(self, reports: Listed[TokenLogprobs]) -> Iterable[Candidate]:
        """Continuations, best first. The reported list has the most likely tokens of the raw distribution; a raised
        token that is not among them was asked for by itself."""
        is_early = self.search.length < self._params.min_tokens
        entries = self._entries(reports, self._stop_tokens if is_early else frozenset())
        bias = self._params.logit_bias
        if not bias:
            return (Candidate(entry.token_id, entry.logprob, entry) for entry in entries)
        found = [Candidate(entry.token_id, entry.logprob + bias.get(entry.token_id, 0.0), entry) for entry in entries]
        return sorted(found, key=lambda candidate: (-candidate.logprob, candidate.entry.rank))

    def _entries(self, reports: Listed[TokenLogprobs], banned: frozenset[int]) -> Iterator[TokenLogprobs]:
        """What a client would see of each token that may come next. Made on demand, when the search has gone on: few of
        them win a place."""
        top = reports[0].top
        alternatives = top[: self._params.logprobs or 0]
        for rank, (token, logprob) in enumerate(top, start=1):
            if token not in banned:
                yield TokenLogprobs(token, logprob, rank, alternatives)
        if not self._raised:
            return
        known = {token for token, _ in top}
        for report in reports:
            if report.token_id not in known and report.token_id not in banned:
                yield TokenLogprobs(report.token_id, report.logprob, report.rank, alternatives)


def _num_reported(params: SamplingParams, num_stop_tokens: int) -> int:
    """How many of the most likely tokens a beam must report, so that the best `width` that do not end the hypothesis
    are among them whatever bans and biases take away. Stop strings may end as many again."""
    wanted = params.num_sequences * (2 if params.stop else 1) + num_stop_tokens + len(params.logit_bias)
    return max(wanted, params.logprobs or 0)

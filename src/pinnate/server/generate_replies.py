"""Answers of POST /generate: one object for each choice, whole or, in a stream, with all there is of it so far.

Knows: SGLang's shape. Must not know: HTTP, the engine.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import msgspec

from pinnate.core.batch import TokenLogprobs
from pinnate.core.request import FinishReason
from pinnate.server.cache_report import Vocabulary
from pinnate.server.generation import Job, Output
from pinnate.server.logprobs import finite
from pinnate.server.protocol.common import Usage
from pinnate.server.protocol.generate import Aborted, Cut, Generated, MetaInfo, Scored, Stopped
from pinnate.server.replies import Choice, Gathered
from pinnate.server.streaming import DONE, event


@dataclass(frozen=True, slots=True)
class Shown:
    """What an answer has beside its text. `members[p]`: None where prompt p asks for no log-probabilities, else the
    first token of it that is scored (-1: none). `text`: tokens are spelled beside their ids."""

    members: list[int | None] = field(default_factory=list)
    text: bool = False
    is_list: bool = False


def generated(job: Job, gathered: Gathered, vocabulary: Vocabulary, shown: Shown) -> Generated | list[Generated]:
    """The choices of each prompt one after the other; a list where prompts came as one, or n is above 1."""
    view = _View(job, gathered, vocabulary, shown)
    answers = [view.show(index) for index in range(job.num_choices)]
    if job.warnings:
        for answer in answers:
            answer.meta_info.warnings = list(job.warnings)
    return answers if shown.is_list else answers[0]


class GenerateWriter:
    """Each event has a choice's whole text so far, which is what SGLang sends by default."""

    def __init__(self, job: Job, vocabulary: Vocabulary, shown: Shown) -> None:
        self._job = job
        self._gathered = Gathered(job)
        self._view = _View(job, self._gathered, vocabulary, shown)
        self._is_list = shown.is_list
        self._warnings = list(job.warnings)

    def write(self, outputs: list[Output]) -> bytes:
        self._gathered.add(outputs)
        grown = dict.fromkeys(number * self._job.params.n + delta.index for number, delta in outputs)
        return b"".join([self._event(index) for index in grown])

    def end(self, usage: Usage) -> bytes:  # noqa: ARG002
        return DONE

    def _event(self, index: int) -> bytes:
        answer = self._view.show(index)
        if self._is_list:
            answer.index = index
        if self._warnings:
            answer.meta_info.warnings, self._warnings = self._warnings, []
        return event(msgspec.json.encode(answer))


class _View:
    def __init__(self, job: Job, gathered: Gathered, vocabulary: Vocabulary, shown: Shown) -> None:
        self._job = job
        self._gathered = gathered
        self._vocabulary = vocabulary
        self._shown = shown

    def show(self, index: int) -> Generated:
        job, n = self._job, self._job.params.n
        number, choice = index // n, self._gathered.choices[index]
        prompt = job.prompts[number]
        info = MetaInfo(
            id=prompt.request_id if n == 1 else f"{prompt.request_id}_{index % n}",
            finish_reason=_finish(choice),
            prompt_tokens=len(prompt.token_ids),
            completion_tokens=len(choice.token_ids),
            cached_tokens=self._gathered.num_cached_tokens.get(number, 0),
            e2e_latency=time.monotonic() - job.arrival,
        )
        start = self._shown.members[number]
        if start is not None:
            self._add_logprobs(info, number, choice, start)
        return Generated(text=choice.text, output_ids=choice.token_ids, meta_info=info)

    def _add_logprobs(self, info: MetaInfo, number: int, choice: Choice, start: int) -> None:
        prompt = self._job.prompts[number]
        assert prompt.params is not None
        scores = self._gathered.prompt_scores.get(number, []) if start >= 0 else []
        scores, ids = scores[start:] if scores else [], prompt.token_ids[start:] if scores else []
        info.input_token_logprobs = [self._own(entry, token) for entry, token in zip(scores, ids, strict=True)]
        info.output_token_logprobs = [self._own(entry, entry.token_id) for entry in choice.logprobs]
        if prompt.params.logprobs:
            info.input_top_logprobs = [None if entry is None else self._scored(entry.top) for entry in scores]
            info.output_top_logprobs = [self._scored(entry.top) for entry in choice.logprobs]
        if prompt.params.logprob_token_ids:
            info.input_token_ids_logprobs = [None if entry is None else self._scored(entry.chosen) for entry in scores]
            info.output_token_ids_logprobs = [self._scored(entry.chosen) for entry in choice.logprobs]

    def _own(self, entry: TokenLogprobs | None, token_id: int) -> Scored:
        return (None if entry is None else finite(entry.logprob), token_id, self._text(token_id))

    def _scored(self, pairs: list[tuple[int, float]]) -> list[Scored]:
        return [(finite(logprob), token_id, self._text(token_id)) for token_id, logprob in pairs]

    def _text(self, token_id: int) -> str | None:
        return self._vocabulary.token_bytes(token_id).decode("utf-8", "replace") if self._shown.text else None


def _finish(choice: Choice) -> Stopped | Cut | Aborted | None:
    match choice.finish_reason:
        case None:
            return None
        case FinishReason.STOP:
            matched = choice.stop_reason
            return Stopped(choice.token_ids[-1] if matched is None and choice.token_ids else matched)
        case FinishReason.LENGTH:
            return Cut(len(choice.token_ids))
        case _:
            return Aborted()

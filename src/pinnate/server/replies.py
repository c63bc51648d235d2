"""Plain answers: all outputs of a job gathered, then one JSON object.

Knows: the two answers' shapes. Must not know: HTTP, the engine. `Vocabulary` is what logprobs need of the tokenizer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from msgspec import UNSET

from pinnate.core.batch import TokenLogprobs
from pinnate.core.messages import CacheReport
from pinnate.server.body import FieldWarning
from pinnate.server.cache_report import Vocabulary, show_report
from pinnate.server.chat_events import TOOL_CALLS, MessageParts, read_message
from pinnate.server.generation import Job, Output
from pinnate.server.logprobs import LogprobsWriter, chat_logprobs, joined, prompt_logprobs
from pinnate.server.protocol.chat import (
    AnswerMessage,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    FunctionCall,
    ToolCall,
)
from pinnate.server.protocol.common import CacheReport as ShownReport
from pinnate.server.protocol.common import PromptLogprobs, Usage
from pinnate.server.protocol.completions import Completion, CompletionChoice, CompletionLogprobs
from pinnate.server.stopwatch import Stopwatch

if TYPE_CHECKING:
    from msgspec import UnsetType


class Choice:
    """One choice while it grows."""

    def __init__(self) -> None:
        self.texts: list[str] = []  # of each delta
        self.counts: list[int] = []  # tokens of each delta
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def deltas(self) -> Iterator[tuple[str, int, list[TokenLogprobs]]]:
        """What came, as it came: text, number of tokens, their log-probabilities where asked for."""
        start = 0
        for text, count in zip(self.texts, self.counts, strict=True):
            yield text, count, self.logprobs[start : start + count]
            start += count


class Gathered:
    """Everything a job's choices got. `prompt_scores[p]` are the log-probabilities of prompt p, where asked for."""

    def __init__(self, job: Job) -> None:
        self._n = job.params.n
        self.choices = [Choice() for _ in range(job.num_choices)]
        self.prompt_scores: dict[int, list[TokenLogprobs | None]] = {}
        self.cache_reports: dict[int, CacheReport] = {}  # by prompt
        self.num_cached_tokens: dict[int, int] = {}  # by prompt
        self.stopwatch = Stopwatch(job) if job.return_timings else None

    def add(self, outputs: list[Output]) -> None:
        if self.stopwatch is not None:
            self.stopwatch.add(outputs)
        for number, delta in outputs:
            choice = self.choices[number * self._n + delta.index]
            choice.texts.append(delta.text)
            choice.counts.append(len(delta.token_ids))
            choice.token_ids += delta.token_ids
            choice.logprobs += delta.logprobs or ()
            if delta.finish_reason is not None:
                choice.finish_reason, choice.stop_reason = str(delta.finish_reason), delta.stop_reason
            self.num_cached_tokens[number] = max(self.num_cached_tokens.get(number, 0), delta.num_cached_tokens)
            if delta.prompt_logprobs is not None:
                self.prompt_scores[number] = delta.prompt_logprobs
            if delta.cache_report is not None:
                self.cache_reports[number] = delta.cache_report


def completion(job: Job, gathered: Gathered, usage: Usage, vocabulary: Vocabulary) -> Completion:
    """Choices in the order of their index."""
    choices = []
    for index, choice in enumerate(gathered.choices):
        number = index // job.params.n
        prompt = job.prompts[number]
        scores = gathered.prompt_scores.get(number, [])
        choices.append(
            CompletionChoice(
                index=index,
                text=prompt.text + choice.text if job.echo else choice.text,
                logprobs=completion_logprobs(job, number, scores, choice, vocabulary),
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
                prompt_logprobs=shown_prompt_logprobs(job, scores, vocabulary),
                prompt_token_ids=prompt.token_ids if job.return_token_ids else UNSET,
                token_ids=choice.token_ids if job.return_token_ids else UNSET,
            )
        )
    return Completion(
        id=job.id,
        created=job.created,
        model=job.model,
        system_fingerprint=job.fingerprint,
        choices=choices,
        usage=usage,
        cache_report=_cache_reports(job, gathered, vocabulary),
        timings=UNSET if gathered.stopwatch is None else gathered.stopwatch.timings(),
        warnings=shown_warnings(job),
    )


def completion_logprobs(
    job: Job, number: int, scores: list[TokenLogprobs | None], choice: Choice, vocabulary: Vocabulary
) -> CompletionLogprobs | None:
    """The prompt's tokens first where it is echoed."""
    if job.params.logprobs is None:
        return None
    prompt = job.prompts[number]
    writer = logprobs_writer(job, vocabulary)
    echoed = writer.write_echo(scores, prompt.token_ids, prompt.text) if job.echo else None
    return joined(echoed, writer.write(choice.logprobs, choice.token_ids))


def logprobs_writer(job: Job, vocabulary: Vocabulary) -> LogprobsWriter:
    return LogprobsWriter(
        vocabulary, skip_special_tokens=job.params.skip_special_tokens, as_ids=job.return_tokens_as_token_ids
    )


def shown_prompt_logprobs(
    job: Job, scores: list[TokenLogprobs | None], vocabulary: Vocabulary
) -> PromptLogprobs | UnsetType:
    return prompt_logprobs(scores, vocabulary.token_bytes) if job.prompt_logprobs else UNSET


def shown_logprobs(job: Job, scored: list[TokenLogprobs], vocabulary: Vocabulary) -> ChatLogprobs | None:
    if job.params.logprobs is None:
        return None
    return chat_logprobs(scored, vocabulary.token_bytes, as_ids=job.return_tokens_as_token_ids)


def shown_warnings(job: Job) -> list[FieldWarning] | UnsetType:
    return list(job.warnings) or UNSET


def chat_completion(job: Job, gathered: Gathered, usage: Usage, vocabulary: Vocabulary) -> ChatCompletion:
    messages = [read_message(job.new_parser, choice.text) for choice in gathered.choices]
    choices = [
        ChatChoice(
            index=index,
            message=_answer(message, job.prompts[0].text if job.echo else ""),
            logprobs=shown_logprobs(job, choice.logprobs, vocabulary),
            finish_reason=TOOL_CALLS if message.calls and choice.finish_reason == "stop" else choice.finish_reason,
            stop_reason=choice.stop_reason,
            token_ids=choice.token_ids if job.return_token_ids else UNSET,
        )
        for index, (choice, message) in enumerate(zip(gathered.choices, messages, strict=True))
    ]
    return ChatCompletion(
        id=job.id,
        created=job.created,
        model=job.model,
        system_fingerprint=job.fingerprint,
        choices=choices,
        usage=usage,
        prompt_logprobs=shown_prompt_logprobs(job, gathered.prompt_scores.get(0, []), vocabulary),
        prompt_token_ids=job.prompts[0].token_ids if job.return_token_ids else UNSET,
        cache_report=_cache_reports(job, gathered, vocabulary),
        timings=UNSET if gathered.stopwatch is None else gathered.stopwatch.timings(),
        warnings=shown_warnings(job),
    )


def _answer(message: MessageParts, echoed: str) -> AnswerMessage:
    calls = [
        ToolCall(id=call.id, function=FunctionCall(name=call.name, arguments=call.arguments)) for call in message.calls
    ]
    reasoning = UNSET if message.reasoning is None else message.reasoning
    return AnswerMessage(
        content=None if calls and not (echoed or message.content) else echoed + message.content,
        reasoning=reasoning,
        reasoning_content=reasoning,
        tool_calls=calls or UNSET,
    )


def _cache_reports(job: Job, gathered: Gathered, vocabulary: Vocabulary) -> list[ShownReport] | UnsetType:
    if not job.cache_report:
        return UNSET
    reports = sorted(gathered.cache_reports.items())
    return [show_report(report, job.prompts[number].token_ids, vocabulary) for number, report in reports]

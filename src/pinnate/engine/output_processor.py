"""From TokenOutputs to OutputDeltas: detokenising, stop strings, and how each choice ends.

Knows: what a client may see of the tokens. Must not know: processes, queues, asyncio. Shared by AsyncEngine and LLM.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pinnate.core.batch import TokenLogprobs
from pinnate.core.errors import EngineError, GrammarError
from pinnate.core.messages import CacheReport, RequestTiming, TokenOutput
from pinnate.core.request import FinishReason, Request
from pinnate.text.detokenizer import IncrementalDetokenizer
from pinnate.text.stop import StopMatcher
from pinnate.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """What one choice got since the delta before.

    `text` holds no special token (unless asked for), no EOS, and no stop string (unless included). `token_ids` are the
    tokens kept, the EOS or stop token that ended the choice among them; `logprobs` are aligned with them.
    `stop_reason` is the stop string or stop token id that ended the choice, None for EOS.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    cache_report: CacheReport | None = None
    score: float | None = None  # of a beam search's hypothesis, which comes whole
    timing: RequestTiming | None = None  # with the request's first delta

    def merged_with(self, later: OutputDelta) -> OutputDelta:
        """One delta in place of two of the same choice."""
        logprobs = self.logprobs
        if later.logprobs is not None:
            logprobs = (logprobs or []) + later.logprobs
        return replace(
            later,
            text=self.text + later.text,
            token_ids=self.token_ids + later.token_ids,
            logprobs=logprobs,
            num_cached_tokens=max(self.num_cached_tokens, later.num_cached_tokens),
            prompt_logprobs=self.prompt_logprobs or later.prompt_logprobs,
            cache_report=self.cache_report or later.cache_report,
            timing=self.timing or later.timing,
        )


class OutputProcessor:
    """All choices of one request. `push` each TokenOutput in order; `is_finished` once every choice has ended."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self.request_id = request.request_id
        self.num_sequences = request.sampling.num_sequences
        self._choices = [_Choice(request, tokenizer) for _ in range(request.sampling.n)]
        self._unfinished = request.sampling.n

    @property
    def is_finished(self) -> bool:
        return self._unfinished == 0

    def push(self, output: TokenOutput) -> tuple[OutputDelta | None, bool]:
        """(delta, whether the engine must be told to stop this choice: a stop string was found here).

        The delta is None where the choice had ended before (tokens that were under way when it was stopped).

        Raises:
            EngineError: the request failed inside the engine (GrammarError: what it asks for cannot be followed).
        """
        choice = self._choices[output.index]
        if choice.finished:
            return None, False
        if output.finish_reason is FinishReason.ERROR:
            if output.is_refusal and output.error:
                raise GrammarError(output.error)
            raise EngineError(output.error or "the request failed inside the engine")
        delta = choice.push(output)
        if choice.finished:
            self._unfinished -= 1
        return delta, choice.finished and output.finish_reason is None


class _Choice:
    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        params = request.sampling
        self.finished = False
        self._eos = frozenset() if params.ignore_eos else frozenset(request.eos_token_ids)
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._detokenizer = IncrementalDetokenizer(
            tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            kept=params.kept_special_tokens,
            continuation=True,
        )
        self._stop = StopMatcher(params.stop, include=params.include_stop_str_in_output)

    def push(self, output: TokenOutput) -> OutputDelta:
        parts: list[str] = []
        matched: str | None = None
        kept = 0
        # Token by token, so that what follows a stop string within this output is dropped, logprobs and all.
        for token in output.token_ids:
            kept += 1
            text, matched = self._text_of(token, output)
            parts.append(text)
            if matched is not None:
                break
        reason = output.finish_reason
        stop_reason: str | int | None = None
        if matched is None and reason is not None:
            text, matched = self._rest()
            parts.append(text)
        if matched is not None:
            reason, stop_reason = FinishReason.STOP, matched
        elif output.stop_token is not None and output.stop_token not in self._eos:
            stop_reason = output.stop_token
        self.finished = reason is not None
        return OutputDelta(
            index=output.index,
            text="".join(parts),
            token_ids=output.token_ids[:kept],
            logprobs=None if output.logprobs is None else output.logprobs[:kept],
            finish_reason=reason,
            stop_reason=stop_reason,
            num_cached_tokens=output.num_cached_tokens,
            prompt_logprobs=output.prompt_logprobs,
            cache_report=output.cache_report,
            score=output.score,
            timing=output.timing,
        )

    def _text_of(self, token: int, output: TokenOutput) -> tuple[str, str | None]:
        """Text to emit for one more token, and the stop string it completes."""
        self._num_tokens += 1
        if token == output.stop_token and (token in self._eos or not self._include_stop):
            return "", None
        text = self._detokenizer.push((token,))
        if self._num_tokens <= self._min_tokens:  # too early for stop strings
            return text, None
        return self._stop.push(text)

    def _rest(self) -> tuple[str, str | None]:
        """At the end: the broken character and the beginning of a stop string that were held back."""
        text, matched = self._stop.push(self._detokenizer.finish())
        return (text, matched) if matched is not None else (text + self._stop.finish(), None)

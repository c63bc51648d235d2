"""LLM: offline generation, synchronous, in this process.

Knows: lists of prompts, their order, progress. Must not know: processes, asyncio, how an engine computes.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, cast

from tqdm import tqdm

from pinnate.core.batch import TokenLogprobs
from pinnate.core.config import EngineConfig
from pinnate.core.errors import EngineError, InvalidRequestError, ModelError, UnsupportedError
from pinnate.core.messages import Abort, EngineStats, StepOutputs, TokenOutput
from pinnate.core.request import FinishReason, Request
from pinnate.core.sampling import SamplingParams
from pinnate.engine.admission import Admission, Limits
from pinnate.engine.grammar_intake import checked_params
from pinnate.engine.inproc import InprocClient
from pinnate.engine.model_text import load_model_text
from pinnate.engine.output_processor import OutputDelta, OutputProcessor
from pinnate.text.bad_words import bad_word_ids
from pinnate.text.chat_template import ChatTemplate
from pinnate.text.parsers.registry import choose_tool_format
from pinnate.text.tokenizer import Tokenizer
from pinnate.text.tool_prompt import messages_for
from pinnate.weights.resolve import resolve_model

Prompt = str | list[int]
Message = Mapping[str, Any]


@dataclass(slots=True)
class CompletionOutput:
    """One choice. `token_ids` holds the EOS or stop token that ended it; `logprobs` are aligned with it."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    score: float | None = None  # of a beam search: summed log-probability / length ** length_penalty


@dataclass(slots=True)
class RequestOutput:
    """One prompt and its n choices, in the order of `index`. `prompt` is None where token ids were given."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)


class LLM:
    """A model and its engine. Results depend on the prompts and parameters alone: seeds that are not given are drawn
    from `EngineConfig.seed` (0 if that is not set).

    `model` is a path or a name (weights/resolve.py), None the default model; the rest are fields of EngineConfig.

    Raises:
        ModelError, ConfigError: the engine cannot be made with this model or these settings.
    """

    def __init__(self, model: str | Path | None = None, **config: Any) -> None:
        path = resolve_model(None if model is None else str(model))
        self.config = EngineConfig(model=str(path), **config)
        self._client = InprocClient(self.config)  # first: what is wrong with the model itself counts most
        try:
            self._text = load_model_text(path)
        except ModelError:
            self._client.close()
            raise
        self.info: dict[str, Any] = self._client.info
        eos = dict.fromkeys((*self.tokenizer.eos_token_ids, *self.info["eos_token_ids"]))
        self._admission = Admission(Limits.from_info(self.info), tuple(eos), random.Random(self.config.seed or 0))
        self._numbers = itertools.count()

    @property
    def tokenizer(self) -> Tokenizer:
        return self._text.tokenizer

    @property
    def chat_template(self) -> ChatTemplate | None:
        return self._text.chat_template

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Completes each prompt (a text or a list of token ids); one SamplingParams for all, or one for each.

        Every prompt is checked before any is run. The results are in the order of the prompts.

        Raises:
            RequestError: a prompt or its parameters are refused, see Limits.check; nothing has run.
            EngineError: a request failed inside the engine; the others are aborted.
        """
        listed = _as_list(prompts)
        texts = [prompt if isinstance(prompt, str) else None for prompt in listed]
        ids = [self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in listed]
        return self._generate(texts, ids, _for_each(params, len(ids)), use_tqdm)

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        **variables: Any,
    ) -> list[RequestOutput]:
        """As `generate`, for one conversation or several; each is a list of {"role", "content"} messages.
        `variables` are handed to the chat template. `tools`, as OpenAI's API has them, are shown to the model; its
        calls are in the text, for a parser of text/parsers to read.

        Raises:
            UnsupportedError: the model has no chat template.
        """
        template = self.chat_template
        if template is None:
            raise UnsupportedError("this model has no chat template", param="messages")
        form, _ = choose_tool_format(template.source)
        if tools:
            variables["tools"] = list(tools)
        texts = [
            template.render(
                messages_for(template.source, [dict(message) for message in conversation], tools, form),
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **variables,
            )
            for conversation in _as_conversations(conversations)
        ]
        # The template writes BOS itself where the model wants one.
        ids = [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        return self._generate(texts, ids, _for_each(params, len(ids)), use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        beam_width: int = 4,
        n: int | None = None,
        max_tokens: int | None = None,
        length_penalty: float = 1.0,
        early_stopping: bool | Literal["never"] = False,
        use_tqdm: bool = True,
        **params: Any,
    ) -> list[RequestOutput]:
        """As `generate`: the `n` (None: all) best of `beam_width` hypotheses of each prompt, best first, each with its
        `score`. `params` are further fields of SamplingParams (stop, logprobs, min_tokens, ...).

        Raises:
            UnsupportedError: a field that a beam search cannot honour, as top_p.
        """
        wanted = SamplingParams(
            n=beam_width if n is None else n,
            max_tokens=max_tokens,
            use_beam_search=True,
            beam_width=beam_width,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            **params,
        )
        return self.generate(prompts, wanted, use_tqdm=use_tqdm)

    def stats(self) -> EngineStats:
        """Gauges and lifetime counters."""
        return self._client.core.stats()

    def close(self) -> None:
        """Frees the engine's memory and threads."""
        self._client.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _generate(
        self, texts: Sequence[str | None], ids: Sequence[list[int]], params: Sequence[SamplingParams], use_tqdm: bool
    ) -> list[RequestOutput]:
        requests = [
            self._admission.make_request(
                str(next(self._numbers)),
                prompt,
                checked_params(param),
                bad_word_ids=bad_word_ids(self.tokenizer, param.bad_words),
            )
            for prompt, param in zip(ids, params, strict=True)
        ]
        run = _Run(self._client, self.tokenizer, self._admission.limits.max_sequences)
        with tqdm(total=len(requests), unit="prompt", disable=not use_tqdm) as bar:
            for _ in run.work_through(requests):
                bar.update()
        return [run.result(request, text) for request, text in zip(requests, texts, strict=True)]


class _Run:
    """One call of `generate`: feeds requests as the queue has room, collects their outputs."""

    def __init__(self, client: InprocClient, tokenizer: Tokenizer, max_sequences: int) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._max_sequences = max_sequences
        self._open: dict[str, OutputProcessor] = {}
        self._deltas: dict[tuple[str, int], list[OutputDelta]] = {}

    def work_through(self, requests: Sequence[Request]) -> Iterator[str]:
        """Runs all requests; yields each id when it has finished. Left early, it aborts the unfinished ones."""
        waiting = list(reversed(requests))
        try:
            while waiting or self._open:
                in_flight = sum(processor.num_sequences for processor in self._open.values())
                while waiting and in_flight + waiting[-1].sampling.num_sequences <= self._max_sequences:
                    request = waiting.pop()
                    in_flight += request.sampling.num_sequences
                    self._open[request.request_id] = OutputProcessor(request, self._tokenizer)
                    self._client.send(request)
                messages = self._client.step()
                if not messages and self._client.core.is_idle:
                    raise EngineError(f"the engine has nothing to run, with {len(self._open)} requests unfinished")
                for message in messages:
                    if isinstance(message, StepOutputs):
                        yield from (done for output in message.outputs if (done := self._take(output)) is not None)
        finally:
            self._client.send(Abort(list(self._open)))
            while not self._client.core.is_idle:
                self._client.step()

    def result(self, request: Request, text: str | None) -> RequestOutput:
        deltas = [self._deltas[request.request_id, index] for index in range(request.sampling.n)]
        everything = [delta for choice in deltas for delta in choice]
        return RequestOutput(
            request_id=request.request_id,
            prompt=text,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[_completion(choice) for choice in deltas],
            num_cached_tokens=max(delta.num_cached_tokens for delta in everything),
            prompt_logprobs=next((d.prompt_logprobs for d in everything if d.prompt_logprobs is not None), None),
        )

    def _take(self, output: TokenOutput) -> str | None:
        processor = self._open.get(output.request_id)
        if processor is None:
            return None
        delta, stopped_here = processor.push(output)
        if delta is not None:
            self._deltas.setdefault((output.request_id, output.index), []).append(delta)
        if stopped_here:
            self._client.send(Abort([output.request_id], output.index))
        if not processor.is_finished:
            return None
        del self._open[output.request_id]
        return output.request_id


def _completion(deltas: Sequence[OutputDelta]) -> CompletionOutput:
    result = CompletionOutput(deltas[0].index, "".join(delta.text for delta in deltas))
    for delta in deltas:
        result.token_ids += delta.token_ids
        if delta.logprobs is not None:
            result.logprobs = (result.logprobs or []) + delta.logprobs
    result.finish_reason, result.stop_reason = deltas[-1].finish_reason, deltas[-1].stop_reason
    result.score = deltas[-1].score
    return result


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and isinstance(prompts[0], int):
        return [list(prompts)]  # type: ignore[arg-type]
    return list(prompts)  # type: ignore[arg-type]


def _as_conversations(given: Sequence[Message] | Sequence[Sequence[Message]]) -> Sequence[Sequence[Message]]:
    single = bool(given) and isinstance(given[0], Mapping)
    return cast(Sequence[Sequence[Message]], [given] if single else given)


def _for_each(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise InvalidRequestError(f"{len(params)} SamplingParams for {count} prompts", param="params")
    return list(params)

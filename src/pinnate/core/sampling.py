"""SamplingParams: what a client may ask of the decoding of one request.

Knows: the fields, their ranges, which combinations contradict. Must not know: the vocabulary, the
context length or how sampling is computed.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from pinnate.core.errors import InvalidRequestError, UnsupportedError
from pinnate.core.structured import StructuredOutput

MAX_N = 128
MAX_LOGPROBS = 1024  # of an offline LLM; a server has a limit of its own (--max-logprobs)
MAX_BAD_WORDS = 1024
MAX_LOGPROB_TOKENS = 128
MAX_PROMPT_LOGPROB_TOKENS = 16  # where a prompt is scored: they cost as much at each of its tokens
MAX_STOP_STRINGS = 16
SEED_LIMIT = 2**63
MAX_LENGTH_PENALTY = 8.0
MAX_BEAM_TOKENS = 256  # that a beam search biases or stops at: each makes every step of every beam dearer


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Decoding parameters of one request, validated when made.

    Temperature 0 is greedy. `top_k` 0 or -1, `top_p` 1 and `min_p` 0 are off. `logprobs=k` returns the
    log-probability of every sampled token and the k most likely ones, of the raw distribution (before
    temperature, penalties and truncation); those of `logprob_token_ids` come with them wherever they rank.
    `prompt_logprobs=k` does the same for the prompt's tokens, from `prompt_logprobs_start` on; what is before may come
    from the prefix cache. `seed=None` draws one per request. Choice i of n is drawn with the seed + i.

    With `use_beam_search` the n choices are the best of a search of `beam_width` (None: n) hypotheses by their summed
    log-probability / length ** length_penalty; nothing is drawn. `early_stopping` as in transformers: False, True or
    "never" (scheduler/beam_search.py).

    `allowed_token_ids`: no other token is drawn. `bad_words`: their tokens, with and without a blank before them, never
    come one after the other in the output: the last one is banned where the others have just come.

    `structured_output` is the language that every output belongs to; it is over when nothing more may follow. It goes
    before `min_tokens` and `ignore_eos`: those make it as long as the language allows (docs/structured-output.md).

    `kept_special_tokens` are shown though `skip_special_tokens` hides the others: marks that a parser must see.

    Raises:
        InvalidRequestError: a field is out of range; `param` names it.
        UnsupportedError: a field that a beam search cannot honour.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    skip_special_tokens: bool = True
    kept_special_tokens: tuple[int, ...] = ()
    use_beam_search: bool = False
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    structured_output: StructuredOutput | None = None

    def __post_init__(self) -> None:
        _in_range("n", self.n, 1, MAX_N)
        if self.max_tokens is not None:
            _in_range("max_tokens", self.max_tokens, 0, None)
        _in_range("min_tokens", self.min_tokens, 0, None)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({self.min_tokens}) is larger than max_tokens ({self.max_tokens})", param="min_tokens"
            )
        _in_range("temperature", self.temperature, 0.0, None)
        _in_range("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _in_range("top_k", self.top_k, -1, None)
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _in_range("repetition_penalty", self.repetition_penalty, 0.0, None, open_low=True)
        for token, bias in self.logit_bias.items():
            _in_range(f"logit_bias[{token}]", bias, -100.0, 100.0, param="logit_bias")
        if self.seed is not None:
            _in_range("seed", self.seed, -SEED_LIMIT, SEED_LIMIT - 1)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError(f"stop has more than {MAX_STOP_STRINGS} strings", param="stop")
        if any(not text for text in self.stop):
            raise InvalidRequestError("stop must not contain an empty string", param="stop")
        if self.logprob_token_ids and self.logprobs is None:
            raise InvalidRequestError("logprob_token_ids needs logprobs", param="logprob_token_ids")
        most = MAX_LOGPROB_TOKENS if self.prompt_logprobs is None else MAX_PROMPT_LOGPROB_TOKENS
        if len(self.logprob_token_ids) > most:
            raise InvalidRequestError(f"logprob_token_ids names more than {most} tokens", param="logprob_token_ids")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidRequestError("allowed_token_ids must not be empty", param="allowed_token_ids")
        if len(self.bad_words) > MAX_BAD_WORDS:
            raise InvalidRequestError(f"bad_words has more than {MAX_BAD_WORDS} words", param="bad_words")
        if any(not word for word in self.bad_words):
            raise InvalidRequestError("bad_words must not contain an empty string", param="bad_words")
        if self.logprobs is not None:
            _in_range("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            _in_range("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        _in_range("prompt_logprobs_start", self.prompt_logprobs_start, 0, None)
        self._check_beams()

    @property
    def num_sequences(self) -> int:
        """How many run at once: the choices, or the beams that they are the best of."""
        return self.beam_width if self.use_beam_search and self.beam_width is not None else self.n

    @property
    def is_greedy(self) -> bool:
        return self.temperature < 1e-5

    @property
    def needs_history(self) -> bool:
        """Whether sampling looks at the tokens before (penalties)."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    def _check_beams(self) -> None:
        _in_range("length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        if not (isinstance(self.early_stopping, bool) or self.early_stopping == "never"):
            raise InvalidRequestError('early_stopping must be true, false or "never"', param="early_stopping")
        if not self.use_beam_search:
            given = {
                "beam_width": self.beam_width is not None,
                "length_penalty": self.length_penalty != 1.0,
                "early_stopping": self.early_stopping is not False,
            }
            for name in (name for name, is_given in given.items() if is_given):
                raise InvalidRequestError(f"{name} needs use_beam_search", param=name)
            return
        if self.beam_width is not None:
            _in_range("beam_width", self.beam_width, self.n, MAX_N)
        if self.max_tokens == 0:
            raise InvalidRequestError("max_tokens must be at least 1 with use_beam_search", param="max_tokens")
        drawing = {
            "temperature": self.temperature not in (0.0, 1.0),
            "top_p": self.top_p != 1.0,
            "top_k": self.top_k > 0,
            "min_p": self.min_p != 0.0,
            "presence_penalty": self.presence_penalty != 0.0,
            "frequency_penalty": self.frequency_penalty != 0.0,
            "repetition_penalty": self.repetition_penalty != 1.0,
            "allowed_token_ids": self.allowed_token_ids is not None,
            "bad_words": bool(self.bad_words),
            "logprob_token_ids": bool(self.logprob_token_ids),
        }
        for name in (name for name, is_given in drawing.items() if is_given):
            raise UnsupportedError(f"{name} is not supported with use_beam_search", param=name)
        if self.structured_output is not None:
            name = self.structured_output.param
            raise UnsupportedError(f"{name} is not supported with use_beam_search", param=name)
        if len(self.logit_bias) + len(self.stop_token_ids) > MAX_BEAM_TOKENS:
            field = "logit_bias" if len(self.logit_bias) > len(self.stop_token_ids) else "stop_token_ids"
            raise InvalidRequestError(
                f"logit_bias and stop_token_ids name more than {MAX_BEAM_TOKENS} tokens, too many for use_beam_search",
                param=field,
            )


def _in_range(
    name: str, value: float, low: float, high: float | None, *, open_low: bool = False, param: str | None = None
) -> None:
    # Comparisons are written so that NaN fails them.
    above = value > low if open_low else value >= low
    below = math.isfinite(value) and (high is None or value <= high)
    if above and below:
        return
    left = f"above {low}" if open_low else f"at least {low}"
    right = "" if high is None else f" and at most {high}"
    shown = value if math.isfinite(value) else str(value)
    raise InvalidRequestError(f"{name} must be {left}{right}, got {shown}", param=param or name)

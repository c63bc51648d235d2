"""The other routes: health, models, metrics, version, start-up facts, cache flush, tokenizing.

Knows: what each shows. Must not know: how requests are generated.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import pinnate
from pinnate.core.errors import InvalidRequestError, PinnateError
from pinnate.server.anthropic import models as anthropic_models
from pinnate.server.body import convert, read_json, read_nothing
from pinnate.server.errors import describe, error_response
from pinnate.server.metrics import CONTENT_TYPE
from pinnate.server.params import check_model
from pinnate.server.protocol.operator import DetokenizeRequest, ModelCard, ModelList, TokenizeRequest, TokenizerInfo
from pinnate.server.rendering import render_and_tokenize
from pinnate.server.state import ServerState
from pinnate.server.tokenizing import tokenize


def json_response(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


class Operator:
    """The handlers. GET /health is the only one that needs no key; it says ready or not, and nothing else."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def health(self, request: Request) -> Response:  # noqa: ARG002
        """200 when requests are taken; 503 with an error object while it starts, shuts down, has lost its engine, or
        the engine shows no sign of life."""
        try:
            self._state.live_engine()
        except PinnateError as error:
            return error_response(*describe(error))
        return json_response({"status": "ok"})

    async def models(self, request: Request) -> Response:
        if anthropic_models.is_meant(request):
            return json_response(anthropic_models.model_page(self._state))
        return json_response(ModelList(data=[self._card(name) for name in self._state.model_names]))

    async def model(self, request: Request) -> Response:
        name = check_model(request.path_params["model"], self._state.model_names)
        if anthropic_models.is_meant(request):
            return json_response(anthropic_models.model_info(self._state, name))
        return json_response(self._card(name))

    async def metrics(self, request: Request) -> Response:  # noqa: ARG002
        state = self._state
        if state.engine is not None:
            state.metrics.record_stats(state.engine.stats)
        return Response(state.metrics.text(), media_type=CONTENT_TYPE)

    async def version(self, request: Request) -> Response:  # noqa: ARG002
        return json_response({"version": pinnate.__version__})

    async def flush_cache(self, request: Request) -> Response:
        """Empties the prefix cache of all pages that no request holds."""
        engine, notes = self._state.ready_engine(), self._state.field_notes()
        await read_nothing(request, self._state.settings.max_body_bytes, notes)
        return json_response(await engine.command("flush_cache") | notes.members("/flush_cache"))

    async def load(self, request: Request) -> Response:  # noqa: ARG002
        """Requests under way, those that wait for a place included."""
        return json_response({"server_load": len(self._state.ongoing)})

    async def tokenize(self, request: Request) -> Response:
        state, engine = self._state, self._state.ready_engine()
        notes = state.field_notes()
        asked = convert(await read_json(request, state.settings.max_body_bytes), TokenizeRequest, notes=notes)
        check_model(asked.model, state.model_names)
        if (asked.prompt is None) == (asked.messages is None):
            raise InvalidRequestError("one of prompt and messages is needed", param="prompt")
        if asked.messages is not None:
            tokens = await render_and_tokenize(state, engine, asked.messages, asked, notes)
        else:
            assert asked.prompt is not None
            special = asked.add_special_tokens is not False
            tokens = await tokenize(state, engine, asked.prompt, add_special_tokens=special, param="prompt")
        strings = None
        if asked.return_token_strs:
            strings = [engine.tokenizer.token_bytes(token).decode("utf-8", "replace") for token in tokens]
        answer = {"tokens": tokens, "count": len(tokens), "max_model_len": engine.max_model_len, "token_strs": strings}
        return json_response(answer | notes.members("/tokenize"))

    async def detokenize(self, request: Request) -> Response:
        state, engine = self._state, self._state.ready_engine()
        notes = state.field_notes()
        asked = convert(await read_json(request, state.settings.max_body_bytes), DetokenizeRequest, notes=notes)
        check_model(asked.model, state.model_names)
        for token in asked.tokens:
            if not 0 <= token < engine.vocab_size:
                raise InvalidRequestError(f"tokens: id {token} is not in the vocabulary", param="tokens")
        return json_response(
            {"prompt": engine.tokenizer.decode(asked.tokens, skip_special_tokens=False)} | notes.members("/detokenize")
        )

    async def tokenizer_info(self, request: Request) -> Response:  # noqa: ARG002
        """What a client needs beside /tokenize to count and cut as the server does (lm-eval's `remote` tokenizer)."""
        engine = self._state.ready_engine()
        template = self._state.chat_template or engine.chat_template
        tokenizer = engine.tokenizer
        info = TokenizerInfo(
            vocab_size=engine.vocab_size,
            model_max_length=engine.max_model_len,
            bos_token=tokenizer.bos_token,
            eos_token=tokenizer.eos_token,
            chat_template=None if template is None else template.source,
        )
        return json_response(info)

    def _card(self, name: str) -> ModelCard:
        engine = self._state.ready_engine()
        return ModelCard(id=name, created=self._state.created, max_model_len=engine.max_model_len)

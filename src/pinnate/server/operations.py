"""What each route takes and gives, for the OpenAPI document.

Knows: the routes' paths and types. Must not know: handlers. A route without an entry here fails a test.
"""

from __future__ import annotations

from typing import Literal

from pinnate.server.openapi import TEXT, Operation
from pinnate.server.protocol.anthropic import (
    CountTokensRequest,
    Event,
    InputMessage,
    Message,
    MessagesRequest,
    TokensCount,
    ToolParam,
)
from pinnate.server.protocol.batches import Batch, BatchCreate, BatchList, FileDeleted, FileList, FileObject, Order
from pinnate.server.protocol.chat import ChatChunk, ChatCompletion, ChatMessage, ChatRequest
from pinnate.server.protocol.common import CacheReport, ChunkOptions, StreamOptions
from pinnate.server.protocol.completions import Completion, CompletionRequest
from pinnate.server.protocol.generate import AbortRequest, Generated, GenerateRequest, GenerateSampling
from pinnate.server.protocol.operator import (
    DetokenizeRequest,
    ModelCard,
    ModelList,
    PrefixRequest,
    TokenizeRequest,
    TokenizerInfo,
    UnpinRequest,
)
from pinnate.server.protocol.responses import (
    DeletedResponse,
    FunctionTool,
    InputTokens,
    ItemList,
    Response,
    ResponseEvent,
    ResponsesRequest,
)
from pinnate.server.protocol.score import ScoreRequest, Scores


def operations() -> dict[str, Operation]:
    """By method and path, as the route is declared."""
    generation = {**_generation(), **_responses(), **_anthropic(), **_sglang(), **_scores()}
    return {**generation, **_operator(), **_cache(), **_batches()}


def _generation() -> dict[str, Operation]:
    options = {"stream_options": ChunkOptions}
    return {
        "POST /v1/chat/completions": Operation(
            "Answers a chat",
            ChatRequest,
            ChatCompletion,
            ChatChunk,
            refined={"messages": list[ChatMessage], **options},
        ),
        "POST /v1/completions": Operation(
            "Continues one or more prompts", CompletionRequest, Completion, Completion, refined=options
        ),
        "GET /v1/models": Operation("The models that requests may name", answer=ModelList, query={"beta": bool}),
        "GET /v1/models/{model:path}": Operation("One model", answer=ModelCard, query={"beta": bool}),
    }


def _responses() -> dict[str, Operation]:
    options = {"stream_options": StreamOptions, "tools": list[FunctionTool]}
    page = {"limit": int, "order": Literal["asc", "desc"], "after": str, "include": str}
    return {
        "POST /v1/responses": Operation("Makes a response", ResponsesRequest, Response, ResponseEvent, refined=options),
        "POST /v1/responses/input_tokens": Operation(
            "How many tokens the input of a response would be", ResponsesRequest, InputTokens, refined=options
        ),
        "GET /v1/responses/{id}": Operation(
            "A stored response, or its events again",
            answer=Response,
            chunk=ResponseEvent,
            query={"stream": bool, "starting_after": int, "include": str, "include_obfuscation": bool},
        ),
        "DELETE /v1/responses/{id}": Operation("Forgets a response", answer=DeletedResponse),
        "POST /v1/responses/{id}/cancel": Operation("Ends a background response", answer=Response),
        "GET /v1/responses/{id}/input_items": Operation(
            "What a response was an answer to", answer=ItemList, query=page
        ),
    }


def _scores() -> dict[str, Operation]:
    score = Operation("How likely labels are as the next token after a query and each item", ScoreRequest, Scores)
    return {f"POST {path}": score for path in ("/score", "/v1/score", "/generative_scoring")}


def _sglang() -> dict[str, Operation]:
    generate = Operation(
        "SGLang's own API: continues one prompt or a batch",
        GenerateRequest,
        Generated,
        Generated,
        refined={"sampling_params": GenerateSampling | list[GenerateSampling]},
    )
    info, model = Operation("What was chosen at the start, and why"), Operation("The model's place and kind")
    return {
        "POST /generate": generate,
        "PUT /generate": generate,
        "POST /abort_request": Operation("Ends a request by its id, or all", AbortRequest),
        "GET /server_info": info,
        "GET /get_server_info": info,
        "GET /model_info": model,
        "GET /get_model_info": model,
        "GET /health_generate": Operation("Whether a token can be generated"),
    }


def _anthropic() -> dict[str, Operation]:
    refined = {"messages": list[InputMessage], "tools": list[ToolParam]}
    beta = {"beta": bool}  # sent by Anthropic's clients for their beta; makes no difference
    return {
        "POST /v1/messages": Operation(
            "Answers a conversation", MessagesRequest, Message, Event, refined=refined, query=beta
        ),
        "POST /v1/messages/count_tokens": Operation(
            "How many tokens a conversation would be", CountTokensRequest, TokensCount, refined=refined, query=beta
        ),
    }


def _operator() -> dict[str, Operation]:
    return {
        "GET /openapi.json": Operation("This document"),
        "GET /health": Operation("Whether requests are taken"),
        "GET /metrics": Operation("Prometheus metrics", media_type=TEXT),
        "GET /load": Operation("How many requests are under way"),
        "GET /ready": Operation("Whether requests are taken"),
        "GET /ping": Operation("Whether requests are taken"),
        "POST /ping": Operation("Whether requests are taken"),
        "GET /version": Operation("The version of this server"),
        "POST /tokenize": Operation(
            "A text or a chat as token ids", TokenizeRequest, refined={"messages": list[ChatMessage]}
        ),
        "POST /detokenize": Operation("Token ids as text", DetokenizeRequest),
        "GET /tokenizer_info": Operation("How the tokenizer begins, ends and frames a text", answer=TokenizerInfo),
    }


def _cache() -> dict[str, Operation]:
    chat = {"messages": list[ChatMessage]}
    return {
        "GET /flush_cache": Operation("Empties the prefix cache of what no request holds"),
        "POST /flush_cache": Operation("Empties the prefix cache of what no request holds"),
        "POST /pin_prefix": Operation("Keeps a prefix cached", PrefixRequest, refined=chat),
        "POST /unpin_prefix": Operation("Lets a pinned prefix go", UnpinRequest),
        "POST /resync_kv_events": Operation("Publishes all cached pages anew"),
        "GET /debug/cache": Operation("What the prefix cache holds"),
        "POST /debug/check_integrity": Operation("Proves that the books of the KV memory balance"),
        "POST /debug/match": Operation(
            "How much of a prompt is cached, and why no more", PrefixRequest, CacheReport, refined=chat
        ),
    }


def _batches() -> dict[str, Operation]:
    page = {"after": str, "limit": int}
    return {
        "POST /v1/files": Operation(
            "Uploads the requests of a batch, a JSON object a line",
            answer=FileObject,
            form={
                "file": bytes,
                "purpose": str,
                "expires_after[anchor]": str | None,
                "expires_after[seconds]": int | None,
            },
        ),
        "GET /v1/files": Operation(
            "The files of this key", answer=FileList, query={**page, "order": Order, "purpose": str}
        ),
        "GET /v1/files/{file_id}": Operation("One file", answer=FileObject),
        "DELETE /v1/files/{file_id}": Operation("Deletes a file", answer=FileDeleted),
        "GET /v1/files/{file_id}/content": Operation("The bytes of a file", media_type="application/octet-stream"),
        "POST /v1/batches": Operation("Runs the requests of a file beside live traffic", BatchCreate, Batch),
        "GET /v1/batches": Operation("The batches of this key", answer=BatchList, query=page),
        "GET /v1/batches/{batch_id}": Operation("One batch and how far it is", answer=Batch),
        "POST /v1/batches/{batch_id}/cancel": Operation("Ends a batch; what is answered is kept", answer=Batch),
    }

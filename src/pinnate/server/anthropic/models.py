"""The models as Anthropic's API shows them, on the paths that OpenAI's has too.

Knows: which clients are meant, the shapes. Must not know: routes. Anthropic's clients send `anthropic-version` with
every request.
"""

from __future__ import annotations

import datetime

from starlette.requests import Request

from pinnate.server.errors import from_anthropic
from pinnate.server.protocol.anthropic import ModelInfo, ModelPage
from pinnate.server.state import ServerState


def is_meant(request: Request) -> bool:
    return from_anthropic(request.scope)


def model_info(state: ServerState, name: str) -> ModelInfo:
    limit = state.ready_engine().max_model_len
    created = datetime.datetime.fromtimestamp(state.created, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return ModelInfo(id=name, display_name=name, created_at=created, max_input_tokens=limit, max_tokens=limit)


def model_page(state: ServerState) -> ModelPage:
    """All of them: there are never more than a page holds."""
    names = state.model_names
    return ModelPage(data=[model_info(state, name) for name in names], first_id=names[0], last_id=names[-1])

"""/v1/files and /v1/batches of a server without --data-dir: they say what is missing.

Knows: the flag's name. Must not know: what the routes would do (`batches/routes.py`).
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from pinnate.core.errors import UnsupportedError


class NoDataDir:
    """The same handlers as BatchRoutes."""

    async def upload(self, request: Request) -> Response:  # noqa: ARG002
        raise UnsupportedError(
            "files and batches need a folder to be kept in: start the server with --data-dir DIR", code="no_data_dir"
        )

    list_files = get_file = content = delete_file = create = list_batches = get_batch = cancel = upload

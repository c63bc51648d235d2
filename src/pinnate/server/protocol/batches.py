"""/v1/files and /v1/batches, and the lines of their files."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Order = Literal["asc", "desc"]


class FileObject(msgspec.Struct, kw_only=True):
    """`status` is OpenAI's, deprecated there: a file is checked when a batch is made of it."""

    id: str
    object: str = "file"
    bytes: int
    created_at: int
    expires_at: int | None = None
    filename: str
    purpose: str
    status: str = "processed"
    status_details: None = None


class FileDeleted(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "file"
    deleted: bool = True


class ExpiresAfter(msgspec.Struct, frozen=True, kw_only=True):
    """Of a file, in seconds from its creation."""

    anchor: Literal["created_at"] = "created_at"
    seconds: int


class BatchCreate(msgspec.Struct, kw_only=True):
    """POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str = "24h"
    metadata: dict[str, Any] | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchError(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    line: int | None = None
    message: str
    param: str | None = None


class BatchErrors(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[BatchError]


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True):
    """`completed` and `failed` have a line in the output or the error file; the others have not run (yet)."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class InputTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0


class BatchUsage(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int = 0
    input_tokens_details: InputTokensDetails = InputTokensDetails()
    output_tokens: int = 0
    output_tokens_details: OutputTokensDetails = OutputTokensDetails()
    total_tokens: int = 0


class Batch(msgspec.Struct, kw_only=True):
    """A job. `model` is that of its first request."""

    id: str
    object: str = "batch"
    endpoint: str
    model: str | None = None
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: str = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    usage: BatchUsage = BatchUsage()
    metadata: dict[str, str] | None = None


class FileList(msgspec.Struct, frozen=True, kw_only=True):
    """A page. The next one begins `after` its `last_id`."""

    object: str = "list"
    data: list[FileObject]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False


class BatchList(msgspec.Struct, frozen=True, kw_only=True):
    """As FileList."""

    object: str = "list"
    data: list[Batch]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False


class BatchLine(msgspec.Struct, kw_only=True):
    """A line of an input file."""

    custom_id: str
    method: str = "POST"
    url: str
    body: dict[str, Any]


class LineResponse(msgspec.Struct, frozen=True, kw_only=True):
    """What the same request would have got over HTTP."""

    status_code: int
    request_id: str
    body: Any


class LineError(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request was never run."""

    code: str
    message: str


class OutputLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of an output or error file."""

    id: str
    custom_id: str
    response: LineResponse | None
    error: LineError | None = None

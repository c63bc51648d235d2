"""Stored responses of a real server with a data directory: kill -9, a full disk, a damaged database, run-of-the-mill
restarts; by OpenAI's own client."""

from __future__ import annotations

import resource
import signal
import time
from pathlib import Path

import openai
import pytest

from tests.e2e.conftest import MODEL
from tests.e2e.harness import Server

DATABASE = "responses.sqlite"


def start(folder: Path) -> Server:
    return Server(folder, "--data-dir", str(folder / "data"), "--max-model-len", "1024").wait_until(200)


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def ask(client: openai.OpenAI, text: str, **fields: object) -> openai.types.responses.Response:
    made = client.responses.create(model=MODEL, input=text, temperature=0, max_output_tokens=8, **fields)  # type: ignore[call-overload]
    assert isinstance(made, openai.types.responses.Response)
    return made


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_responses_outlive_the_server(tmp_path: Path, end: signal.Signals) -> None:
    server = start(tmp_path)
    try:
        client = client_of(server)
        first = ask(client, "My name is Ann.")
        second = ask(client, "And my age is 7.", previous_response_id=first.id)
        running = client.responses.create(
            model=MODEL, input="Count to 5000.", background=True, max_output_tokens=900, extra_body={"ignore_eos": True}
        )
        assert client.responses.retrieve(running.id).status in ("queued", "in_progress")
        if end == signal.SIGTERM:
            client.responses.cancel(running.id)
        server.signal(end)
        server.exit_code(40)
    finally:
        server.stop()
    server = start(tmp_path)
    try:
        client = client_of(server)
        assert client.responses.retrieve(first.id) == first
        assert client.responses.retrieve(second.id) == second
        items = client.responses.input_items.list(second.id, order="asc").data
        assert [item.content[0].text for item in items][::2] == ["My name is Ann.", "And my age is 7."]  # type: ignore[union-attr]
        cut = client.responses.retrieve(running.id)
        assert cut.status == ("failed" if end == signal.SIGKILL else "cancelled")
        assert client.responses.cancel(running.id).status == cut.status
        third = ask(client, "What is my name?", previous_response_id=second.id)
        assert third.usage is not None
        assert second.usage is not None
        assert third.usage.input_tokens > second.usage.input_tokens
        client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first.id)
    finally:
        server.stop()


def test_a_full_disk(tmp_path: Path) -> None:
    """No file of the server may grow, as if the disk were full, until there is room again."""
    server = start(tmp_path)
    try:
        client = client_of(server)
        first = ask(client, "hi")
        size = (tmp_path / "data" / f"{DATABASE}-wal").stat().st_size
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        end = time.monotonic() + 30
        while True:  # the log is reused from its start now and then
            try:
                ask(client, "x" * 2000)
            except openai.APIStatusError as refused:
                assert (refused.status_code, refused.code) == (507, "storage_full")  # noqa: PT017
                break
            assert time.monotonic() < end
        assert client.responses.retrieve(first.id) == first
        assert ask(client, "hi", store=False).output
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        again = ask(client, "hi")
        assert client.responses.retrieve(again.id) == again
    finally:
        server.stop()


def test_a_damaged_database(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    database = tmp_path / "data" / DATABASE
    database.write_bytes(b"not a database " * 1000)
    server = start(tmp_path)
    try:
        client = client_of(server)
        with pytest.raises(openai.InternalServerError, match="damaged"):
            ask(client, "hi")
        assert ask(client, "hi", store=False).output
        assert client.files.list().data == []
    finally:
        server.stop()
    assert "Responses are not stored" in server.text()
    assert database.read_bytes() == b"not a database " * 1000

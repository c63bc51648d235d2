"""Files and batches over real HTTP with the real engine: OpenAI's own client, kill -9, a full disk, live requests."""

from __future__ import annotations

import json
import re
import resource
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.conftest import MODEL
from tests.e2e.harness import Server, counting

FINISHED = ("completed", "failed", "expired", "cancelled")


def line(custom_id: str, **body: Any) -> dict[str, Any]:
    full = {"model": MODEL, "temperature": 0, "max_tokens": 8, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": full}


def lines(count: int, **body: Any) -> list[dict[str, Any]]:
    return [line(f"r{i}", **{"prompt": counting(5 + i % 40, 1 + i % 4), **body}) for i in range(count)]


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def start_batch(client: openai.OpenAI, requests: list[dict[str, Any]]) -> str:
    content = "\n".join(json.dumps(each) for each in requests).encode()
    file = client.files.create(file=("requests.jsonl", content), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h", metadata={"of": "a test"}
    ).id


def wait(client: openai.OpenAI, batch_id: str, until: Callable[[Any], bool] = lambda b: b.status in FINISHED) -> Any:
    end = time.monotonic() + 60
    while not until(batch := client.batches.retrieve(batch_id)):
        assert time.monotonic() < end, batch
        time.sleep(0.02)
    return batch


def answers(client: openai.OpenAI, file_id: str) -> dict[str, Any]:
    """Texts by custom_id; each line once."""
    read = [json.loads(each) for each in client.files.content(file_id).text.splitlines()]
    by_id = {each["custom_id"]: each["response"]["body"]["choices"][0]["text"] for each in read}
    assert len(by_id) == len(read)
    return by_id


class DataServer(Server):
    """A server with a data directory."""

    def __init__(self, folder: Path, *flags: str) -> None:
        super().__init__(
            folder, "--data-dir", str(folder / "data"), "--max-model-len", "2048", "--num-pages", "512", *flags
        )


@pytest.fixture(scope="module")
def data_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = DataServer(tmp_path_factory.mktemp("batches"))
    try:
        yield server.wait_until(200)
    finally:
        server.stop()


def test_openai_client_from_upload_to_content(data_server: Server) -> None:
    client = client_of(data_server)
    requests = [*lines(12), line("bad", prompt="x", temperature=-1)]
    batch = wait(client, start_batch(client, requests))
    assert (batch.status, batch.metadata, batch.model) == ("completed", {"of": "a test"}, MODEL)
    assert batch.request_counts.model_dump() == {"total": 13, "completed": 12, "failed": 1}
    got = answers(client, batch.output_file_id)
    for i in (0, 7):  # what the same request gets live
        body = requests[i]["body"]
        assert got[f"r{i}"] == client.completions.create(**body).choices[0].text
    (failed,) = client.files.content(batch.error_file_id).text.splitlines()
    assert json.loads(failed)["response"]["body"]["error"]["param"] == "temperature"
    assert [each.id for each in client.batches.list(limit=1)][:1] == [batch.id]
    assert {each.id for each in client.files.list()} >= {batch.input_file_id, batch.output_file_id}
    assert client.files.delete(batch.output_file_id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.content(batch.output_file_id)


def test_openai_client_cancels(data_server: Server) -> None:
    client = client_of(data_server)
    batch_id = start_batch(client, lines(100, max_tokens=1500, ignore_eos=True))
    wait(client, batch_id, lambda b: b.status == "in_progress")
    assert client.batches.cancel(batch_id).status == "cancelling"
    batch = wait(client, batch_id)
    assert (batch.status, batch.output_file_id) == ("cancelled", None)
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch_id)


def test_live_requests_pass_a_batch_that_fills_the_engine(data_server: Server) -> None:
    client = client_of(data_server)
    batch_id = start_batch(client, lines(200, max_tokens=400, ignore_eos=True))
    wait(client, batch_id, lambda b: b.status == "in_progress")
    for _ in range(3):
        client.completions.create(model=MODEL, prompt=counting(9), max_tokens=8, temperature=0)
    assert client.batches.retrieve(batch_id).request_counts.completed < 100  # they did not wait for it
    client.batches.cancel(batch_id)
    wait(client, batch_id)


def test_requests_of_a_batch_wait_behind_a_full_live_queue_and_take_none_of_it(tmp_path: Path) -> None:
    """With a structured output too, for which the queue is asked before its check."""
    server = DataServer(tmp_path, "--max-num-seqs", "2", "--max-num-queued-reqs", "2", "--executor", "simulated",
                        "--simulated-step-ms", "5").wait_until(200)  # fmt: skip
    try:
        client = client_of(server)
        kinds: list[dict[str, Any]] = [{}, {"structured_outputs": {"regex": "[0-9]{3}"}}]
        requests = [line(f"r{i}", prompt="a", **kinds[i % 2]) for i in range(6)]
        with ThreadPoolExecutor(4) as pool:
            live = [pool.submit(complete, client, max_tokens=400, ignore_eos=True) for _ in range(4)]
            wait_for(lambda: gauge(server, "num_requests_waiting") == 2)
            batch_id = start_batch(client, requests)
            wait_for(
                lambda: gauge(server, "num_requests_waiting") == 2 + 3
            )  # as many as a batch may have in the engine
            with pytest.raises(openai.RateLimitError) as refused:
                complete(client, max_tokens=4)
            assert "4 sequences are in flight, the limit is 4" in str(refused.value)
            assert gauge(server, "batch_requests_in_flight") == 3
            assert client.batches.retrieve(batch_id).request_counts.completed == 0
            assert [each.result().choices[0].finish_reason for each in live] == ["length"] * 4
        batch = wait(client, batch_id)
        assert batch.request_counts.model_dump() == {"total": 6, "completed": 6, "failed": 0}
        texts = answers(client, batch.output_file_id)
        assert all(re.fullmatch("[0-9]{3}", texts[f"r{i}"]) for i in (1, 3, 5))
    finally:
        server.stop()


def complete(client: openai.OpenAI, **body: Any) -> Any:
    return client.completions.create(model=MODEL, prompt="a", **{"extra_body": body} if "ignore_eos" in body else body)


def gauge(server: Server, name: str) -> float:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return sum(s.value for family in families for s in family.samples if s.name == f"pinnate:{name}")


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_large_upload_is_never_in_memory(data_server: Server) -> None:
    """60 MB pass through a server that grows by much less."""
    before = peak_memory(data_server)
    content = json.dumps(line("r", prompt="x" * 20_000)).encode() + b"\n"
    client = client_of(data_server)
    file = client.files.create(file=("big.jsonl", content * (60_000_000 // len(content))), purpose="batch")
    assert file.bytes > 59_000_000
    client.files.delete(file.id)
    assert peak_memory(data_server) - before < 30_000_000


def peak_memory(server: Server) -> int:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["kill -9", "SIGTERM"])
def test_killed_in_the_middle_nothing_is_lost_or_answered_twice(tmp_path: Path, number: signal.Signals) -> None:
    requests = lines(40, max_tokens=8, ignore_eos=True)
    first = DataServer(tmp_path, "--max-num-seqs", "4").wait_until(200)
    try:
        client = client_of(first)
        batch_id = start_batch(client, requests)
        before = wait(client, batch_id, lambda b: b.request_counts.completed >= 8).request_counts.completed
    finally:
        began = time.monotonic()
        first.signal(number)
        first.process.wait(timeout=20)
        assert time.monotonic() - began < 5  # a batch is no reason to wait
    assert before < 40
    second = DataServer(tmp_path, "--max-num-seqs", "4").wait_until(200)
    try:
        client = client_of(second)
        batch = wait(client, batch_id)
        assert batch.request_counts.model_dump() == {"total": 40, "completed": 40, "failed": 0}
        got = answers(client, batch.output_file_id)
        assert list(got) == [each["custom_id"] for each in requests]
        body = {name: value for name, value in requests[33]["body"].items() if name != "ignore_eos"}
        alone = client.completions.create(**body, extra_body={"ignore_eos": True}).choices[0].text
        assert got["r33"] == alone
        done = int(second.text().partition(f"{batch_id}: ")[2].split()[0])  # "N requests to run"
        assert done <= 40 - before
        assert batch.usage.output_tokens == 40 * 8
    finally:
        second.stop()


def test_a_full_disk_stops_the_batch_and_nothing_else(tmp_path: Path) -> None:
    """No file of the server may grow beyond a size, as if the disk were full, until there is room again."""
    server = DataServer(tmp_path, "--max-num-seqs", "8").wait_until(200)
    try:
        client = client_of(server)
        batch_id = start_batch(client, lines(100, max_tokens=8, ignore_eos=True, logprobs=5))
        wait(client, batch_id, lambda b: b.request_counts.completed >= 8)
        wal = tmp_path / "data" / "batches.sqlite-wal"
        limit = wal.stat().st_size + 20_000
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        end = time.monotonic() + 30
        while "no room in the data directory" not in server.text():
            assert time.monotonic() < end, server.text()[-2000:]
            time.sleep(0.05)
        stuck = client.batches.retrieve(batch_id)
        assert stuck.status == "in_progress"
        assert client.completions.create(model=MODEL, prompt=counting(9), max_tokens=4).choices
        with pytest.raises(openai.APIStatusError) as refused:
            client.files.create(file=("more.jsonl", b"x" * (limit + 1)), purpose="batch")
        assert (refused.value.status_code, refused.value.code) == (507, "storage_full")
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        batch = wait(client, batch_id)
        assert batch.request_counts.model_dump() == {"total": 100, "completed": 100, "failed": 0}
        assert len(answers(client, batch.output_file_id)) == 100
        assert not list((tmp_path / "data" / "files").glob("*.part"))
    finally:
        server.stop()


def test_a_data_directory_in_use_or_damaged(tmp_path: Path, data_server: Server) -> None:
    folder = data_server.log.parent
    other = DataServer(folder)
    assert other.exit_code(30) == 2
    assert "another process uses it" in other.text()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "batches.sqlite").write_bytes(b"not a database " * 1000)
    server = DataServer(tmp_path).wait_until(200)
    try:
        client = client_of(server)
        with pytest.raises(openai.InternalServerError, match="damaged"):
            client.files.list()
        assert client.completions.create(model=MODEL, prompt=counting(9), max_tokens=4).choices
    finally:
        server.stop()

"""/v1/responses over the app: shapes, the order of events, what is stored, background runs."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.routing import Route

from pinnate.core.errors import EngineDeadError
from pinnate.core.request import FinishReason
from pinnate.engine.output_processor import OutputDelta
from pinnate.server.responses.store import MemoryStore
from tests.unit.server.conftest import Answer, Client, FakeEngine, make_client, score, spell
from tests.unit.server.responses.helpers import events, item_list, parse_events, response, without_ids


async def create(client: Client, given: Any = "hi", **fields: Any) -> Answer:
    return await client.post("/v1/responses", {"input": given, **fields})


def store_of(client: Client) -> MemoryStore:
    store = next(r.endpoint for r in client.app.routes if isinstance(r, Route) and r.path == "/v1/responses")._store
    assert isinstance(store, MemoryStore)
    return store


async def get(client: Client, path: str, query: str = "", method: str = "GET") -> Answer:
    return await client.call(method, f"/v1/responses/{path}", query=query)


async def until(client: Client, response_id: str, status: str) -> Any:
    async with asyncio.timeout(10):
        while (shown := (await get(client, response_id)).json)["status"] != status:
            await asyncio.sleep(0.001)
    return response(shown)


async def nothing_is_left(client: Client) -> None:
    """A task that has just ended is forgotten when the loop comes round."""
    async with asyncio.timeout(10):
        while client.state.ongoing:
            await asyncio.sleep(0.001)


async def test_a_plain_response(client: Client) -> None:
    client.engine.script = lambda *_: spell("okay", cached=1)
    answer = await create(client, instructions="Be brief.", metadata={"k": "v"}, temperature=0.5, max_output_tokens=9)
    assert answer.status == 200
    shown = response(answer.json)
    assert shown.output_text == "okay"
    assert (shown.status, shown.object, shown.model) == ("completed", "response", "Tiny")
    assert [item.type for item in shown.output] == ["message"]
    assert (shown.instructions, shown.metadata, shown.temperature) == ("Be brief.", {"k": "v"}, 0.5)
    submitted = client.engine.submitted[0]
    assert bytes(submitted.prompt).decode() == "[system]Be brief.[user]hi[assistant]"
    assert (submitted.params.max_tokens, submitted.params.temperature) == (9, 0.5)
    assert shown.usage is not None
    assert shown.usage.input_tokens == len(submitted.prompt)
    assert shown.usage.input_tokens_details.cached_tokens == 1
    assert (shown.usage.output_tokens, shown.usage.total_tokens) == (5, len(submitted.prompt) + 5)
    assert (await get(client, shown.id)).json == answer.json


async def test_the_order_of_events(client: Client) -> None:
    answer = await create(client, stream=True)
    seen = events(answer)
    assert [event.type for event in seen] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
        "response.output_text.delta", "response.output_text.delta", "response.output_text.done",
        "response.content_part.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert seen[-1].response.output_text == "ok" == seen[6].text == "".join(event.delta for event in seen[4:6])
    plain = await create(client)
    last = seen[-1].response.model_dump(mode="json", by_alias=True, exclude_unset=True)
    assert without_ids(last) == without_ids(plain.json)
    assert (await get(client, last["id"])).json == last


async def test_length_is_incomplete(client: Client) -> None:
    client.engine.script = lambda *_: [OutputDelta(0, "ab", [97, 98], finish_reason=FinishReason.LENGTH)]
    for answer in (await create(client), await create(client, stream=True)):
        shown = response(answer.json) if answer.body.startswith(b"{") else events(answer)[-1].response
        assert shown.status == "incomplete"
        assert shown.incomplete_details is not None
        assert shown.incomplete_details.reason == "max_output_tokens"
        assert shown.completed_at is None
        assert shown.output[0].status == "incomplete"


async def test_no_text_is_an_empty_message(client: Client) -> None:
    client.engine.script = lambda *_: spell("")
    assert response((await create(client)).json).output[0].content[0].text == ""
    assert [event.type for event in events(await create(client, stream=True))][3:6] == [
        "response.content_part.added", "response.output_text.done", "response.content_part.done",
    ]  # fmt: skip


async def test_logprobs_come_with_their_text(client: Client) -> None:
    client.engine.script = lambda *_: [
        OutputDelta(0, "o", [111], logprobs=[score(111, -0.25, top=[(111, -0.25), (112, -2.0)])]),
        OutputDelta(0, "", [0xC4], logprobs=[score(0xC4, -1.0)]),
        OutputDelta(0, "ď", [0x8F], logprobs=[score(0x8F, -2.0)]),
        OutputDelta(0, "", [0], logprobs=[score(0)], finish_reason=FinishReason.STOP),
    ]
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    shown = response((await create(client, **asked)).json)
    assert [entry.logprob for entry in shown.output[0].content[0].logprobs] == [-0.25, -1.0, -2.0]
    deltas = [event for event in events(await create(client, stream=True, **asked)) if hasattr(event, "delta")]
    assert [[entry.logprob for entry in event.logprobs] for event in deltas] == [[-0.25], [-1.0, -2.0]]
    assert client.engine.submitted[0].params.logprobs == 2
    assert response((await create(client)).json).output[0].content[0].logprobs == []


async def test_a_conversation_goes_on(client: Client) -> None:
    first = response((await create(client, "one", instructions="S")).json)
    second = response((await create(client, "two", previous_response_id=first.id)).json)
    third = await create(client, [{"role": "user", "content": "three"}], previous_response_id=second.id)
    prompt = bytes(client.engine.submitted[-1].prompt).decode()
    assert prompt == "[user]one[assistant]ok[user]two[assistant]ok[user]three[assistant]"
    listed = item_list((await get(client, f"{third.json['id']}/input_items", "order=asc&limit=3")).json)
    assert [item.content[0].text for item in listed.data] == ["one", "ok", "two"]
    assert listed.has_more
    rest = await get(client, f"{third.json['id']}/input_items", f"order=asc&after={listed.last_id}")
    assert [item.content[0].text for item in item_list(rest.json).data] == ["ok", "three"]
    newest = await get(client, f"{third.json['id']}/input_items", "limit=1")
    assert item_list(newest.json).data[0].content[0].text == "three"
    # A conversation outlives the parts of it that were deleted.
    assert (await get(client, first.id, method="DELETE")).json == {
        "id": first.id, "object": "response", "deleted": True,
    }  # fmt: skip
    assert (await get(client, first.id)).status == 404
    assert (await create(client, "four", previous_response_id=third.json["id"])).status == 200


async def test_items_can_be_named(client: Client) -> None:
    shown = response((await create(client, "one")).json)
    answer = await create(client, [{"type": "item_reference", "id": shown.output[0].id}, {"id": shown.output[0].id}])
    assert answer.status == 200
    assert bytes(client.engine.submitted[-1].prompt).decode() == "[assistant]ok[assistant]ok[assistant]"
    absent = await create(client, [{"type": "item_reference", "id": "msg_x"}])
    assert (absent.status, absent.error["param"]) == (400, "input[0].id")


async def test_what_is_not_stored_is_not_found(client: Client) -> None:
    shown = (await create(client, store=False)).json
    assert shown["store"] is False
    for path, method in (
        (shown["id"], "GET"),
        ("resp_x", "DELETE"),
        ("resp_x/cancel", "POST"),
        ("x/input_items", "GET"),
    ):
        answer = await get(client, path, method=method)
        assert (answer.status, answer.error["code"]) == (404, "response_not_found")
    answer = await create(client, previous_response_id=shown["id"])
    assert (answer.status, answer.error["code"]) == (400, "previous_response_not_found")


async def test_one_key_never_sees_anothers_responses() -> None:
    client = make_client(FakeEngine(), api_keys=("a", "b"))
    made = (await client.post("/v1/responses", {"input": "hi"}, headers={"authorization": "Bearer a"})).json
    for path in (made["id"], f"{made['id']}/input_items"):
        for key, status in (("a", 200), ("b", 404), ("c", 401)):
            answer = await client.call("GET", f"/v1/responses/{path}", headers={"authorization": f"Bearer {key}"})
            assert answer.status == status
    body = {"input": "x", "previous_response_id": made["id"]}
    assert (await client.post("/v1/responses", body, headers={"authorization": "Bearer b"})).status == 400


async def test_a_background_response(client: Client) -> None:
    go = asyncio.Event()
    client.engine.script = lambda *_: [*spell("ok")[:1], go, *spell("ok")[1:]]
    shown = response((await create(client, background=True)).json)
    assert (shown.status, shown.background, shown.output) == ("queued", True, [])
    running = await until(client, shown.id, "in_progress")
    assert running.output[0].content[0].text == "o"
    assert len(client.state.ongoing) == 1
    early = await create(client, previous_response_id=shown.id)
    assert (early.status, early.error["param"]) == (400, "previous_response_id")
    go.set()
    assert (await until(client, shown.id, "completed")).output_text == "ok"
    await nothing_is_left(client)
    assert (await get(client, shown.id, "stream=true")).error["param"] == "stream"


async def test_a_background_stream_is_resumed(client: Client) -> None:
    go = asyncio.Event()
    client.engine.script = lambda *_: [*spell("okay")[:2], go, *spell("okay")[2:]]
    leaving = asyncio.create_task(create(client, background=True, stream=True))
    async with asyncio.timeout(10):
        while not (ids := [key[1] for key in store_of(client)._records]):
            await asyncio.sleep(0.001)
        await until(client, ids[0], "in_progress")
        client.gone.set()  # this client leaves; the response goes on
        await leaving
    client.gone.clear()
    assert not client.engine.streams[0].aborted
    again = asyncio.create_task(get(client, ids[0], "stream=true&starting_after=2"))
    await asyncio.sleep(0.01)
    go.set()
    seen = events(await again)
    assert [event.sequence_number for event in seen] == list(range(3, 3 + len(seen)))
    assert (seen[0].type, seen[-1].type) == ("response.output_item.added", "response.completed")
    assert seen[-1].response.output_text == "okay"
    whole = events(await get(client, ids[0], "stream=true"))
    assert [event.type for event in whole[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert whole[3:] == seen
    assert events_after(await get(client, ids[0], "stream=true&starting_after=1000")) == []


def events_after(answer: Answer) -> list[Any]:
    return parse_events(answer.body) if answer.body else []


@pytest.mark.parametrize("tokens", [0, 1])
async def test_cancelling(client: Client, tokens: int) -> None:
    client.engine.script = lambda *_: [*spell("ok")[:tokens], asyncio.Event()]
    shown = response((await create(client, background=True, stream=False)).json)
    if tokens:
        await until(client, shown.id, "in_progress")
    cancelled = response((await get(client, f"{shown.id}/cancel", method="POST")).json)
    assert cancelled.status == "cancelled"
    assert client.engine.streams[0].aborted
    await asyncio.sleep(0)
    assert not client.state.ongoing
    again = await get(client, f"{shown.id}/cancel", method="POST")
    assert again.json == (await get(client, shown.id)).json


async def test_cancelling_at_once_and_after_the_end(client: Client) -> None:
    client.engine.script = lambda *_: [asyncio.Event()]
    answer, _ = await asyncio.gather(create(client, background=True), asyncio.sleep(0))
    assert (await get(client, f"{answer.json['id']}/cancel", method="POST")).json["status"] == "cancelled"
    client.engine.script = None
    done = await create(client, background=True)
    await until(client, done.json["id"], "completed")
    assert (await get(client, f"{done.json['id']}/cancel", method="POST")).json["status"] == "completed"
    plain = (await create(client)).json["id"]
    assert (await get(client, f"{plain}/cancel", method="POST")).status == 400


async def test_deleting_what_runs_ends_it(client: Client) -> None:
    client.engine.script = lambda *_: [*spell("ok")[:1], asyncio.Event()]
    watching = asyncio.create_task(create(client, background=True, stream=True))
    async with asyncio.timeout(10):
        while not (ids := [key[1] for key in store_of(client)._records]):
            await asyncio.sleep(0.001)
        await until(client, ids[0], "in_progress")
        assert (await get(client, ids[0], method="DELETE")).status == 200
        seen = events(await watching)
    assert (seen[-1].type, seen[-1].code) == ("error", "response_cancelled")
    assert client.engine.streams[0].aborted
    assert (await get(client, ids[0])).status == 404


async def test_a_client_that_leaves(client: Client) -> None:
    client.engine.script = lambda *_: [*spell("ok")[:1], asyncio.Event()]
    call = asyncio.create_task(create(client, stream=True))
    async with asyncio.timeout(10):
        while not (ids := [key[1] for key in store_of(client)._records]):
            await asyncio.sleep(0.001)
        client.gone.set()
        await call
    client.gone.clear()
    assert client.engine.streams[0].aborted
    shown = response((await get(client, ids[0])).json)
    assert (shown.status, shown.output[0].status) == ("cancelled", "incomplete")


async def test_failures(client: Client) -> None:
    client.engine.script = lambda *_: [EngineDeadError("gone")]
    assert (await create(client)).status == 503
    assert (await create(client, stream=True)).status == 503
    background = await create(client, background=True)
    failed = await until(client, background.json["id"], "failed")
    assert failed.error is not None
    assert (failed.error.code, failed.error.message) == ("server_error", "gone")
    client.engine.script = lambda *_: [*spell("ok")[:1], EngineDeadError("gone")]
    last = events(await create(client, stream=True))[-1]
    assert (last.type, last.response.status, last.response.error.message) == ("response.failed", "failed", "gone")
    assert (await get(client, last.response.id)).json["status"] == "failed"
    client.engine.full = True
    refused = await create(client, background=True)
    assert (refused.status, refused.error["code"]) == (429, "queue_full")


async def test_the_server_ends() -> None:
    client = make_client(FakeEngine(script=lambda *_: [*spell("ok")[:1], asyncio.Event()]))
    watching = asyncio.create_task(create(client, background=True, stream=True))
    streaming = asyncio.create_task(create(client, stream=True))
    async with asyncio.timeout(10):
        while len(store_of(client)) < 2:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        client.state.stop_requests()
        watched, streamed = await asyncio.gather(watching, streaming)
    assert events(streamed)[-1].type == "response.failed"
    assert parse_events(watched.body)[-1].type in ("error", "response.failed")
    statuses = {record.response.status for record in store_of(client)._records.values()}
    assert statuses == {"failed"}
    await asyncio.sleep(0)
    assert not client.state.ongoing


async def test_the_server_ends_before_a_background_response_began(client: Client) -> None:
    waiting = asyncio.Event()

    async def tokenize(*_: Any) -> list[int]:
        await waiting.wait()
        return []

    client.engine.tokenize = tokenize  # type: ignore[method-assign]
    call = asyncio.create_task(create(client, background=True))
    async with asyncio.timeout(10):
        while not client.state.ongoing:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        client.state.stop_requests()
        answer = await call
    assert (answer.status, answer.error["code"]) == (503, "shutting_down")
    assert len(store_of(client)) == 0


async def test_counting_input_tokens(client: Client) -> None:
    answer = await client.post("/v1/responses/input_tokens", {"input": "hi", "instructions": "S"})
    assert answer.json == {"object": "response.input_tokens", "input_tokens": len("[system]S[user]hi[assistant]")}
    assert not client.engine.submitted

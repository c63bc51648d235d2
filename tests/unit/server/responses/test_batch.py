"""A batch of responses."""

from __future__ import annotations

from typing import Any

from tests.unit.server.batches.conftest import BatchServer
from tests.unit.server.batches.conftest import server as server  # a fixture
from tests.unit.server.responses.helpers import response, without_ids


def line(custom_id: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/responses", "body": {"input": "hi", **body}}


async def test_lines_are_answered_as_over_http_and_not_stored(server: BatchServer) -> None:
    lines = [line("a", instructions="S"), line("b", background=True), line("c", previous_response_id="resp_x")]
    batch = await server.until(await server.batch_of(lines, endpoint="/v1/responses"))
    assert batch["request_counts"] == {"total": 3, "completed": 1, "failed": 2}
    (answered,) = await server.lines_of(batch["output_file_id"])
    shown = response(answered["response"]["body"])
    assert shown.output_text == "ok"
    assert (await server.get(f"/v1/responses/{shown.id}")).status == 404
    over_http = await server.client.post("/v1/responses", {"input": "hi", "instructions": "S", "store": False})
    assert without_ids(over_http.json) == without_ids(answered["response"]["body"])
    refused = await server.lines_of(batch["error_file_id"])
    assert [each["response"]["body"]["error"]["param"] for each in refused] == ["background", "previous_response_id"]

"""SGLang's /generate and vLLM's and SGLang's small routes, over a real server."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from tests.e2e.harness import Api, ids_of

P1, P1_NEXT = "1, 2, 3, 4, 5, 6, 7,", " 8, 9, 10, 11,"
P2, P2_NEXT = "10, 20, 30, 40, 50, 60,", " 70, 80, 90, 100,"
BF16 = 0.15
GREEDY = {"temperature": 0, "max_new_tokens": 8}


async def generate(api: Api, **fields: Any) -> Any:
    answer = await api.post("/generate", {"sampling_params": GREEDY, **fields})
    assert answer.status == 200, answer.body
    return answer.json


async def test_text_ids_and_batches_agree(api: Api) -> None:
    of_text, of_ids = await generate(api, text=P1), await generate(api, input_ids=ids_of(P1))
    batch = await generate(api, text=[P1, P2])
    for answer in (of_text, of_ids, batch[0]):
        assert (answer["text"], answer["output_ids"]) == (P1_NEXT[:8], ids_of(P1_NEXT[:8]))
        assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 8}
    assert batch[1]["text"] == P2_NEXT[:8]
    assert [answer["meta_info"]["prompt_tokens"] for answer in batch] == [20, 23]


async def test_streams_and_stop_strings(api: Api) -> None:
    body = {"text": P1, "sampling_params": {**GREEDY, "max_new_tokens": 18, "stop": "10"}, "rid": "me"}
    plain = await generate(api, **body)
    assert (plain["text"], plain["meta_info"]["finish_reason"]) == (" 8, 9, ", {"type": "stop", "matched": "10"})
    streamed = await api.stream_of("/generate", {**body, "stream": True})
    assert streamed.done == 1
    texts = [event["text"] for event in streamed.events]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    last = streamed.events[-1]
    for answer in (last, plain):
        answer["meta_info"]["e2e_latency"] = answer["meta_info"]["cached_tokens"] = 0
    assert last == plain
    kept = await generate(api, text=P1, sampling_params={**body["sampling_params"], "no_stop_trim": True})
    assert kept["text"] == " 8, 9, 10"


async def test_scores_as_select_asks_for_them(api: Api) -> None:
    """SGLang's frontend chooses among texts by the log-probabilities of their last tokens, and generates nothing."""
    fields = {"return_logprob": True, "return_text_in_logprobs": True, "logprob_start_len": 18, "top_logprobs_num": 2}
    answers = await generate(api, text=[P1, P1 + " and"], sampling_params={"max_new_tokens": 0}, **fields)
    first, second = [answer["meta_info"] for answer in answers]
    assert [entry[2] for entry in first["input_token_logprobs"]] == ["7", ","]
    assert [entry[1:] for entry in second["input_token_logprobs"]] == [[39, "7"], [28, ","], [284, " and"]]
    assert second["input_token_logprobs"][2][0] == pytest.approx(-4.0734, abs=BF16)
    assert second["input_top_logprobs"][2][0][2] == " "
    assert second["cached_tokens"] in (17, 0)  # what is before the first scored token may be cached
    assert (first["output_token_logprobs"], answers[0]["text"], first["completion_tokens"]) == ([], "", 0)


async def test_logprobs_of_chosen_tokens(api: Api) -> None:
    fields = {"return_logprob": True, "token_ids_logprob": [284, 216], "top_logprobs_num": 1}
    many = {"n": 2, "temperature": 1.0, "sampling_seed": 5, "max_new_tokens": 3}
    info = (await generate(api, text=P1, **fields))["meta_info"]
    own = [entry[0] for entry in info["output_token_logprobs"]]
    assert [entry[1] for entry in info["output_token_ids_logprobs"][0]] == [284, 216]
    assert info["output_token_ids_logprobs"][0][0][0] == pytest.approx(-4.0734, abs=BF16)
    assert info["output_token_ids_logprobs"][0][1][0] == own[0] == info["output_top_logprobs"][0][0][0]
    scored = (await generate(api, text=P1 + " and", logprob_start_len=19, **fields))["meta_info"]
    of_comma, of_and = scored["input_token_ids_logprobs"]
    assert of_and == info["output_token_ids_logprobs"][0]
    assert (len(of_comma), scored["input_token_logprobs"][1][0]) == (2, of_and[0][0])
    choices = await generate(api, text=P1, **{**fields, "sampling_params": many})
    assert all(len(choice["meta_info"]["output_token_ids_logprobs"]) == 3 for choice in choices)
    firsts = [choice["meta_info"]["output_token_ids_logprobs"][0] for choice in choices]
    assert firsts[0] == firsts[1] == info["output_token_ids_logprobs"][0]


async def test_abort_by_id_and_all(api: Api) -> None:
    endless = {"temperature": 0, "max_new_tokens": 1500, "ignore_eos": True}
    for how, rids in (({"rid": "b"}, ["a", "b"]), ({"abort_all": True}, ["c", "d"])):
        asked = [asyncio.create_task(generate(api, text=P1, sampling_params=endless, rid=rid)) for rid in rids]
        while (await api.get("/load")).json["server_load"] < 2:
            await asyncio.sleep(0.01)
        while not (await api.post("/abort_request", how)).json["aborted"]:
            await asyncio.sleep(0.01)
        ended = (await asked[1])["meta_info"]
        assert ended["finish_reason"]["type"] == "abort"
        assert ended["completion_tokens"] < 1500
        if how == {"rid": "b"}:
            assert not asked[0].done()
            await api.post("/abort_request", {"rid": "a"})
        assert (await asked[0])["meta_info"]["finish_reason"]["type"] == "abort"
    values = await api.until_idle()
    assert values["num_requests_running"] == 0


async def test_small_routes(api: Api) -> None:
    assert (await api.get("/health_generate")).status == 200
    assert (await api.get("/model_info")).json["is_generation"]
    assert (await api.get("/get_server_info")).json["context_length"] == 2048
    assert (await api.get("/flush_cache")).status == 200


async def test_scores_of_labels(api: Api) -> None:
    body = {"query": "1, 2, 3, 4, 5,", "items": [" 6, 7,", " 6, 7, and"], "label_token_ids": [216, 284]}
    answer = (await api.post("/v1/score", body)).json
    assert answer["scores"][0] == [pytest.approx(0.9637, abs=0.02), pytest.approx(0.0170, abs=0.004)]
    assert answer["usage"]["prompt_tokens"] == 20 + 21
    shared = (await api.post("/score", {**body, "apply_softmax": True})).json
    assert sum(shared["scores"][0]) == pytest.approx(1)
    assert shared["scores"][0][0] == pytest.approx(answer["scores"][0][0] / sum(answer["scores"][0]))

"""Requests that broke other engines: prefix cache, company, memory, queue, cancellation. See test_cases_api.py."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest

from tests.e2e.conftest import MODEL, open_session
from tests.e2e.harness import Api, Server, counting, counting_ids, fresh_ids, ids_of

SEQ = counting(2000)
P1, P1_NEXT = "1, 2, 3, 4, 5, 6, 7,", " " + counting(60, 8)
P2, P2_NEXT = "10, 20, 30, 40, 50, 60,", " 70, 80, 90, 100, 110, 120, 130, 140, 150, 160, 170, 180, 190"
P3, P3_NEXT = "0 1 0 1 0 1 0 1 0 1 0 1", " 1" * 40
P4 = "The weather today is"
TENS = (1, 5, 11, 21, 31, 41, 51, 61, 71, 81, 101, 201)

Starter = Callable[..., AbstractAsyncContextManager[Api]]


@pytest.fixture
def starting(tmp_path: Path) -> Starter:
    """A server of its own, for flags that others must not have."""

    @asynccontextmanager
    async def start(*flags: str) -> AsyncIterator[Api]:
        server = Server(tmp_path, *flags)
        try:
            await asyncio.to_thread(server.wait_until, 200)
            async with open_session() as session:
                yield Api(server, session, MODEL)
        finally:
            server.stop()

    return start


def tens(first: int) -> tuple[str, str]:
    """Ten numbers from `first`, and the 12 characters that follow."""
    return counting(first + 9, first), (" " + counting(first + 19, first + 10))[:12]


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 63, 64, 65, 128, 256, 257])
async def test_case_27_whole_prompt_cached(api: Api, length: int) -> None:
    prompt = counting_ids(length)
    answers = [await api.complete(prompt), *await asyncio.gather(*(api.complete(prompt) for _ in range(3)))]
    assert {answer.text for answer in answers} == {SEQ[length : length + 8]}
    assert all(answer.cached <= length - 1 for answer in answers)
    assert all(answer.cached == length - 1 for answer in answers[1:])


async def test_case_28_scores_do_not_depend_on_the_cache(api: Api) -> None:
    async def scores(prompt: list[int]) -> list[float | None]:
        answer = await api.complete(prompt, echo=True, logprobs=1, max_tokens=1)
        return list(answer.choice()["logprobs"]["token_logprobs"][: len(prompt)])

    prompt = fresh_ids(65)
    other = prompt[:40] + ids_of("50, 60, 70, 80, 90, 100, ")
    cold, cold_other = await scores(prompt), await scores(other)
    assert cold[:40] == cold_other[:40]
    assert await asyncio.gather(scores(prompt), scores(prompt), scores(other)) == [cold, cold, cold_other]
    await api.complete(prompt[:64])
    assert await scores(prompt) == cold


async def test_case_31_no_entry_is_crossed(api: Api) -> None:
    await api.complete(SEQ[:310], max_tokens=2)
    jobs = [(*tens(first), 12) for first in TENS] + [(counting(40)[:-1] + ", 50, 60, 70, 80,", " 90, 100", 8)]
    for _ in range(3):
        answers = await asyncio.gather(*(api.complete(prompt, max_tokens=n) for prompt, _, n in jobs))
        assert [answer.text for answer in answers] == [text for _, text, _ in jobs]


async def test_case_32_cached_tokens(api: Api) -> None:
    prompt = fresh_ids(129)
    before = (await api.metrics())["prefix_cache_hits_total"]
    counts = [(await api.complete(prompt, n=n, temperature=1, max_tokens=2)).cached for n in (1, 1, 3)]
    assert counts == [0, 128, 128]
    streamed = await api.stream(prompt, stream_options={"include_usage": True})
    assert streamed.events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 128
    assert (await api.metrics())["prefix_cache_hits_total"] - before == 3 * 128


async def test_case_32_the_second_turn_finds_the_first_and_its_answer(api: Api) -> None:
    question = {"role": "user", "content": "hi " + " ".join(str(random.randrange(10**6)) for _ in range(8))}
    first = await api.chat([question], max_tokens=48, logit_bias={"2": -100, "0": -100})
    turns = [question, {"role": "assistant", "content": first.text}, {"role": "user", "content": "go on"}]
    assert (await api.chat(turns)).cached > first.json["usage"]["prompt_tokens"]


async def test_case_34_salts_isolate(api: Api) -> None:
    prompt = fresh_ids(129)
    salts = [{"cache_salt": "A"}, {"cache_salt": "A"}, {"cache_salt": "B"}, {}, {"cache_salt": "A"}]
    assert [(await api.complete(prompt, max_tokens=1, **salt)).cached for salt in salts] == [0, 128, 0, 0, 128]


async def test_case_39_alone_and_in_company(api: Api) -> None:
    jobs = [(P1, P1_NEXT[:48], 48), (P2, P2_NEXT[:48], 48), (P3, P3_NEXT[:48], 48)] + [(*tens(k), 12) for k in TENS]
    noise = [
        api.drop(api.completion_body(fresh_ids(60), max_tokens=200, stream=True), 0.05 * i, reset=i % 2 == 0)
        for i in range(8)
    ]
    answers, _ = await asyncio.gather(
        asyncio.gather(*(api.complete(prompt, max_tokens=n) for prompt, _, n in jobs)), asyncio.gather(*noise)
    )
    assert [answer.text for answer in answers] == [text for _, text, _ in jobs]


async def test_case_40_seeds(api: Api) -> None:
    seeded = {"seed": 42, "temperature": 0.8, "max_tokens": 16}
    alone = (await api.complete(P4, **seeded)).text
    beside, _ = await asyncio.gather(api.complete(P4, **seeded), api.complete(P4, temperature=1, max_tokens=16))
    assert beside.text == alone
    first, second = [(await api.complete(P4, n=4, stop=["."], **seeded)).texts for _ in range(2)]
    assert first == second
    assert len(set(first)) > 1
    assert (await api.complete(P4, **{**seeded, "temperature": 1, "max_tokens": 40, "seed": None})).text != (
        await api.complete(P4, **{**seeded, "temperature": 1, "max_tokens": 40, "seed": None})
    ).text


async def test_case_35_preempted_and_resumed(starting: Starter) -> None:
    jobs = [(P1, P1_NEXT[:64]), (P2, None), (P3, P3_NEXT[:64]), (SEQ[:30], SEQ[30:94])]
    async with starting("--num-pages", "10", "--max-model-len", "128", "--max-num-seqs", "4") as api:
        alone = [await api.stream(prompt, max_tokens=64, ignore_eos=True) for prompt, _ in jobs]
        for _ in range(6):
            together = await asyncio.gather(*(api.stream(p, max_tokens=64, ignore_eos=True) for p, _ in jobs))
            for lone, streamed, (_, text) in zip(alone, together, jobs, strict=True):
                assert streamed.text() == lone.text()
                assert text is None or streamed.text() == text
                assert streamed.finish() == ["length"]
            if (await api.metrics())["num_preemptions_total"]:
                break
        values = await api.until_idle()
        assert values["num_preemptions_total"] > 0
        assert values["kv_pages_free"] + values["kv_pages_cached"] == values["kv_pages"] == 10


async def test_case_30_no_page_in_use_is_evicted(starting: Starter) -> None:
    """A pool for about three running requests, prompts that share prefixes, some sent twice at once, some dropped."""
    rng = random.Random(30)
    prompts = [counting_ids(rng.randrange(20, 200)) for _ in range(6)]
    prompts += [
        counting_ids(16 * shared) + ids_of(counting(first + 14, first)) for shared, first in enumerate(TENS[:6])
    ]
    async with starting("--num-pages", "32", "--max-model-len", "384", "--max-num-seqs", "4") as api:
        total = (await api.metrics())["kv_pages_free"]
        lone = [(await api.complete(prompt, max_tokens=12)).text for prompt in prompts]
        one_of_four = asyncio.Semaphore(4)

        async def run(number: int) -> None:
            which = rng.randrange(len(prompts))
            async with one_of_four:
                if number % 10 == 9:
                    await api.drop(api.completion_body(prompts[which], max_tokens=12, stream=True), 0.1 * rng.random())
                    return
                twice = (api.complete(prompts[which], max_tokens=12) for _ in range(2 if number % 5 == 0 else 1))
                assert {answer.text for answer in await asyncio.gather(*twice)} == {lone[which]}

        await asyncio.gather(*(run(number) for number in range(36)))
        values = await api.until_idle()
        assert values["kv_pages_free"] + values["kv_pages_cached"] == total == 32
        assert values["evicted_pages_total"] > 0
        assert (await api.post("/debug/check_integrity", {})).status == 200
        assert (await api.post("/flush_cache", {})).status == 200
        assert (await api.metrics())["kv_pages_free"] == total


async def test_case_37_what_can_never_fit_is_refused(starting: Starter) -> None:
    async with starting("--num-pages", "16", "--max-model-len", "1024", "--max-num-seqs", "4") as api:
        for length, fields in ((310, {"max_tokens": 4}), (257, {"max_tokens": 1}), (250, {"max_tokens": 200})):
            neighbour = asyncio.create_task(api.complete(P1))
            answer = await api.complete(counting_ids(length), **fields)
            assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
            assert str(length) in answer.error["message"]
            assert (await neighbour).text == P1_NEXT[:8]
        for length in (255, 256):
            assert (await api.complete(counting_ids(length), max_tokens=1)).text == SEQ[length]


async def test_case_48_and_case_51_the_queue(starting: Starter) -> None:
    async with starting("--max-num-seqs", "1", "--max-num-queued-reqs", "2", "--max-model-len", "2048") as api:
        run = asyncio.create_task(api.stream(P1, max_tokens=150, ignore_eos=True))
        while not (await api.metrics())["num_requests_running"]:
            await asyncio.sleep(0.01)
        before = (await api.metrics())["prompt_tokens_total"]
        # Two wait and leave; a third has taken the room of one of them; then the queue is full.
        leaving = [
            asyncio.create_task(api.drop(api.completion_body(fresh_ids(400), stream=bool(i)), 0.15)) for i in range(2)
        ]
        await asyncio.sleep(0.05)
        for refused in await asyncio.gather(*(api.stream(P1) for _ in range(2)), *(api.complete(P1) for _ in range(2))):
            assert refused.status == 429
            assert b"queue_full" in refused.body
        await asyncio.gather(*leaving)
        await asyncio.sleep(0.05)
        waiting = asyncio.create_task(api.complete(P2))
        assert (await run).text() == P1_NEXT[:150]
        assert (await waiting).text == P2_NEXT[:8]
        values = await api.until_idle()
        assert values["prompt_tokens_total"] - before <= 20 + 23  # those who left cost nothing
        assert values["requests_rejected_total"] == 4
        assert values["request_success_total"] >= 4


async def test_case_52_health_while_the_server_is_busy(api: Api) -> None:
    fat = api.completion_body("some words to tokenise, " * 100_000)
    async with asyncio.TaskGroup() as group:
        stream = group.create_task(api.stream(P1, max_tokens=60))
        refusals = [group.create_task(api.post("/v1/completions", fat)) for _ in range(4)]
        health = [group.create_task(api.get("/health")) for _ in range(10)]
    assert stream.result().text() == P1_NEXT[:60]
    assert all(answer.result().status == 200 for answer in health)
    assert {(a.result().status, a.result().error["code"]) for a in refusals} == {(400, "context_length_exceeded")}


async def test_case_64_gauges_after_mass_cancellation(api: Api) -> None:
    bodies = [api.completion_body(fresh_ids(20), max_tokens=1900, stream=bool(i % 2)) for i in range(40)]
    last: dict[str, float] = {}

    async def watch() -> None:
        for _ in range(20):
            values = await api.metrics()
            for name, value in values.items():
                assert value >= 0
                if name.endswith(("_total", "_count", "_bucket")):
                    assert value >= last.get(name, 0)
            last.update(values)
            await asyncio.sleep(0.01)

    await asyncio.gather(watch(), *(api.drop(body, 0.1, reset=i % 3 == 0) for i, body in enumerate(bodies)))
    values = await api.until_idle(4)
    assert values["kv_cache_usage_perc"] == 0

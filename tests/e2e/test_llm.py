"""LLM with the default model: reference texts, order, choices, stops, refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pinnate import LLM, SamplingParams
from pinnate.core.errors import ConfigError, ContextLengthError, InvalidRequestError, ModelError
from pinnate.core.request import FinishReason

FACTS = json.loads((Path(__file__).parent.parent / "data/smollm2_greedy.json").read_text())["greedy"]
RAW = [fact for fact in FACTS if "prompt" in fact]
CHATS = [fact for fact in FACTS if "messages" in fact]
CLEAR_MARGIN = 0.3  # of the best two logits: bfloat16 may decide otherwise below
GREEDY = SamplingParams(temperature=0.0, max_tokens=48)
EOS_TEXT = "<|im_end|>"


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(dtype="float32", max_model_len=512, max_num_seqs=16, max_num_queued_reqs=4, check_integrity=True) as llm:
        yield llm


def check(result: Any, fact: dict[str, Any]) -> None:
    (output,) = result.outputs
    assert output.token_ids == fact["output_ids"]
    assert output.text == fact["text"].removesuffix(EOS_TEXT)
    ended = fact["text"].endswith(EOS_TEXT)
    assert output.finish_reason is (FinishReason.STOP if ended else FinishReason.LENGTH)
    assert output.stop_reason is None
    assert result.prompt_token_ids == fact["prompt_ids"]
    assert result.finished


def test_greedy_texts_in_one_batch_and_in_order(llm: LLM) -> None:
    results = llm.generate([fact["prompt"] for fact in RAW], GREEDY, use_tqdm=False)
    for result, fact in zip(results, RAW, strict=True):
        assert result.prompt == fact["prompt"]
        check(result, fact)


def test_chats(llm: LLM) -> None:
    results = llm.chat([fact["messages"] for fact in CHATS], GREEDY, use_tqdm=False)
    for result, fact in zip(results, CHATS, strict=True):
        check(result, fact)
    (single,) = llm.chat(CHATS[0]["messages"], GREEDY, use_tqdm=False)
    check(single, CHATS[0])
    assert single.num_cached_tokens == len(single.prompt_token_ids) - 1


def test_chats_with_tools(llm: LLM) -> None:
    tool = {"type": "function", "function": {"name": "add"}}
    (result,) = llm.chat(
        [{"role": "user", "content": "hi"}], SamplingParams(max_tokens=1), tools=[tool], use_tqdm=False
    )
    assert result.prompt is not None
    assert result.prompt.startswith("<|im_start|>system\nYou may call functions")
    assert json.dumps(tool) in result.prompt


def test_bfloat16_where_the_margin_is_clear() -> None:
    clear = [fact for fact in RAW if fact["min_margin"] > CLEAR_MARGIN]
    assert len(clear) >= 2
    with LLM(max_model_len=512) as llm:
        assert llm.info["dtype"] == "bfloat16"
        for result, fact in zip(llm.generate([f["prompt_ids"] for f in clear], GREEDY), clear, strict=True):
            assert result.prompt is None
            check(result, fact)


def test_more_prompts_than_the_queue_holds(llm: LLM) -> None:
    prompts = [f"{number} plus {number} is" for number in range(60)]
    params = [SamplingParams(temperature=0.0, max_tokens=1 + number % 3, ignore_eos=True) for number in range(60)]
    results = llm.generate(prompts, params, use_tqdm=False)
    assert [result.prompt for result in results] == prompts
    assert [len(result.outputs[0].token_ids) for result in results] == [1 + number % 3 for number in range(60)]


def test_choices_share_the_prompt_and_differ(llm: LLM) -> None:
    params = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=12, logprobs=2)
    (first,) = llm.generate("My favourite animal is", params, use_tqdm=False)
    (again,) = llm.generate("My favourite animal is", params, use_tqdm=False)
    assert [output.index for output in first.outputs] == [0, 1, 2, 3]
    assert len({output.text for output in first.outputs}) > 1
    assert first.outputs == again.outputs
    for output in first.outputs:
        assert [entry.token_id for entry in output.logprobs] == output.token_ids
        assert all(len(entry.top) >= 2 and entry.logprob <= entry.top[0][1] for entry in output.logprobs)


def test_seeds_that_are_not_given_come_from_the_engine_seed(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=16)
    texts = [llm.generate("Once", params, use_tqdm=False)[0].outputs[0].text for _ in range(2)]
    assert texts[0] != texts[1]


def test_stop_string(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=48, stop=("12,",), logprobs=0)
    (result,) = llm.generate("1, 2, 3, 4, 5, 6, 7,", params, use_tqdm=False)
    (output,) = result.outputs
    assert output.text == " 8, 9, 10, 11, "
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, "12,")
    assert llm.tokenizer.decode(output.token_ids) == output.text + "12,"
    assert len(output.logprobs) == len(output.token_ids)


def test_prompt_logprobs(llm: LLM) -> None:
    ids = RAW[0]["prompt_ids"]
    (result,) = llm.generate([ids], SamplingParams(max_tokens=0, prompt_logprobs=1), use_tqdm=False)
    assert result.outputs[0].token_ids == []
    assert [entry and entry.token_id for entry in result.prompt_logprobs] == [None, *ids[1:]]
    assert all(entry.logprob <= 0 for entry in result.prompt_logprobs[1:])


def test_a_refused_prompt_runs_nothing(llm: LLM) -> None:
    with pytest.raises(ContextLengthError, match="the prompt alone has 600"):
        llm.generate([[1, 2], [1] * 600], GREEDY, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="2 SamplingParams for 1 prompts"):
        llm.generate("a", [GREEDY, GREEDY], use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="empty"):
        llm.generate([""], GREEDY, use_tqdm=False)
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_an_interrupted_call_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 0
    execute = llm._client.core.executor.execute

    def interrupted(batch: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 3:
            raise KeyboardInterrupt
        return execute(batch)

    monkeypatch.setattr(llm._client.core.executor, "execute", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a b c", "d e f"], GREEDY, use_tqdm=False)
    assert not llm._client.core.scheduler.has_work()
    check(llm.generate(RAW[0]["prompt"], GREEDY, use_tqdm=False)[0], RAW[0])


def test_start_up_errors(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no-such-model"):
        LLM(tmp_path / "no-such-model.gguf")
    with pytest.raises(ConfigError, match="--max-model-len 100000 is beyond"):
        LLM(max_model_len=100000)
    with pytest.raises(ConfigError, match="--kv-cache-memory 7 holds no page"):
        LLM(kv_cache_memory=7)


def test_a_request_larger_than_the_pool_is_refused_with_the_numbers() -> None:
    with LLM(max_model_len=100, num_pages=2) as llm:
        assert (llm.info["max_model_len"], llm.info["kv_tokens"]) == (100, 32)
        with pytest.raises(
            ContextLengthError, match=r"20 prompt tokens and 1 x 14 output tokens need 3 pages .* has 2"
        ):
            llm.generate([[1] * 20], SamplingParams(max_tokens=14), use_tqdm=False)
        (result,) = llm.generate([[1] * 20], SamplingParams(max_tokens=13, ignore_eos=True), use_tqdm=False)
        assert len(result.outputs[0].token_ids) == 13

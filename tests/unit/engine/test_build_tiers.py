"""The tier as the settings ask: what it is named after, which faults stop the start, the same bytes for every kind."""

from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest
from tests.checkpoints import TINY
from tests.tiny_gemma import write_tiny_gemma

from pinnate.core.config import EngineConfig
from pinnate.core.errors import ConfigError
from pinnate.core.messages import StepOutputs, TokenOutput
from pinnate.core.request import Request
from pinnate.core.sampling import SamplingParams
from pinnate.engine.build_tiers import kv_namespace
from pinnate.engine.inproc import InprocClient
from pinnate.kvcache.tiers import disk

KINDS = {
    "bfloat16": {},
    "float32": {"dtype": "float32"},
    "int8 weights": {"quantization": "int8"},
    "int8 KV": {"kv_cache_dtype": "int8"},
    "portable": {"isa": "portable"},
    "reference": {"executor": "reference"},
}
PROMPT = [1 + 7 * i % 90 for i in range(50)]
PARAMS = SamplingParams(max_tokens=10, temperature=0.8, seed=3, logprobs=2, ignore_eos=True)


def started(folder: Path | None, model: str = "llama3", **settings: object) -> InprocClient:
    disk = {} if folder is None else {"kv_disk": str(folder)}
    return InprocClient(EngineConfig(model=str(TINY / model), num_pages=16, **disk, **settings))


def answer(folder: Path | None, model: str = "llama3", **settings: object) -> tuple[bytes, int, int]:
    """Tokens and log-probabilities, the cached tokens, and what the tier stored."""
    client = started(folder, model, **settings)
    client.send(Request(request_id="r", prompt_token_ids=PROMPT, sampling=PARAMS))
    outputs: list[TokenOutput] = []
    client.core.step()
    while not client.core.is_idle:
        client.core.step()
    for message in client.step():
        assert isinstance(message, StepOutputs)
        outputs += message.outputs
    client.close()
    assert len(outputs) == PARAMS.max_tokens
    content = msgspec.msgpack.encode([(output.token_ids, output.logprobs) for output in outputs])
    return content, outputs[0].num_cached_tokens, client.core.scheduler.stats().tier_stored_pages


@pytest.mark.parametrize("kind", KINDS)
def test_a_hit_from_disk_gives_the_same_bytes(kind: str, tmp_path: Path) -> None:
    expected, _, _ = answer(None, **KINDS[kind])
    first = answer(tmp_path, **KINDS[kind])
    again = answer(tmp_path, **KINDS[kind])
    assert first == (expected, 0, 3)
    assert again[1] == 48
    if kind != "reference":  # whose last bits depend on how many rows are computed together
        assert again[0] == expected


def test_no_kind_reads_the_pages_of_another(tmp_path: Path) -> None:
    for model in ("llama3", "llama2"):
        for settings in (*KINDS.values(), {"page_size": 32}):
            assert answer(tmp_path, model, **settings)[1] == 0
    assert len([entry for entry in tmp_path.iterdir() if entry.is_dir()]) == 2 * (len(KINDS) + 1)


class Facts:
    page_bytes = 64

    def __init__(self, **facts: object) -> None:
        self.facts = facts

    def describe(self) -> dict[str, object]:
        return {"isa": "avx512", "dtype": "bfloat16", "threads": 4} | self.facts


def test_the_namespace_covers_what_the_bytes_depend_on_and_no_more() -> None:
    config = EngineConfig(model="m")

    def space(model: bytes = b"x", config: EngineConfig = config, **facts: object) -> bytes:
        return kv_namespace(config, model, Facts(**facts))

    assert space() == space(threads=1) == space(config=EngineConfig(model="elsewhere", max_num_seqs=2))
    others = [
        space(model=b"y"),
        space(isa="avx2"),
        space(dtype="float32"),
        space(quantization="int4"),
        space(kv_cache_dtype="int8"),
        space(config=EngineConfig(model="m", page_size=32)),
        space(config=EngineConfig(model="m", executor="reference")),
    ]
    assert len({space(), *others}) == len(others) + 1


def test_a_folder_that_cannot_be_written_is_done_without(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    (tmp_path / "file").write_text("")
    _, cached, stored = answer(tmp_path / "file" / "kv")
    assert (cached, stored) == (0, 0)
    assert [record.message for record in caplog.records] == [
        f"--kv-disk {tmp_path / 'file' / 'kv'} cannot be used (Not a directory): serving goes on without it"
    ]


def test_a_folder_in_use_and_a_size_for_nothing_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "LOCK_SECONDS", 0.1)
    client = started(tmp_path)
    with pytest.raises(ConfigError, match="in use by"):
        started(tmp_path)
    client.close()
    with pytest.raises(ConfigError, match="--kv-disk-size 100 holds no page"):
        answer(tmp_path, kv_disk_size=100)


def test_models_with_windowed_layer_groups_are_refused_by_name(tmp_path: Path) -> None:
    write_tiny_gemma(tmp_path / "gemma")
    config = EngineConfig(model=str(tmp_path / "gemma"), num_pages=64, kv_disk=str(tmp_path / "kv"))
    with pytest.raises(ConfigError, match="--kv-disk is not offered for models with sliding windows beside full"):
        InprocClient(config)
    assert not (tmp_path / "kv").exists()


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"kv_disk": "d", "enable_prefix_caching": False}, "--kv-disk needs prefix caching"),
        ({"kv_disk": " "}, "--kv-disk: the folder's name is empty"),
        ({"kv_disk": "d", "kv_disk_size": 0}, "--kv-disk-size must be at least 1"),
    ],
)
def test_settings_that_make_no_sense_name_the_flag(settings: dict[str, object], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        EngineConfig(model="m", **settings)

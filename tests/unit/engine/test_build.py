"""The wiring: plans of a tiny checkpoint, and a core that runs it with either executor."""

from __future__ import annotations

import io
from pathlib import Path

import msgspec
import pytest
from tests.fakes import make_request

from pinnate.core.config import EngineConfig
from pinnate.core.errors import ConfigError
from pinnate.core.machine import Machine
from pinnate.core.messages import StepOutputs
from pinnate.engine.build import build_engine, plan_engine
from pinnate.engine.child import LENGTH_BYTES, Startup
from pinnate.engine.mailbox import Mailbox
from pinnate.engine.process import read_startup
from pinnate.models.load import LoadedModel, load_model

TINY = Path(__file__).parents[2] / "data/tiny/llama2"
MACHINE = Machine(cpus=4, cores=3, cpu_quota=None, memory_available=1 << 30, memory_limit=None)


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(TINY)


def config(**fields: object) -> EngineConfig:
    return EngineConfig(model=str(TINY), **fields)


def test_plan(model: LoadedModel) -> None:
    plan = plan_engine(config(max_num_seqs=2), model, MACHINE)
    columns = model.config.num_layers * model.config.num_kv_heads * model.config.head_dim
    assert plan.page_bytes == 2 * columns * 16 * 2
    assert plan.max_model_len.value == model.config.max_position_embeddings
    assert plan.num_pages.value == 2 * -(-plan.max_model_len.value // 16)
    assert (plan.dtype.value, plan.threads.value) == ("bfloat16", 3)
    assert plan.reasons().keys() == {"dtype", "quantization", "threads", "KV type", "KV pool", "max_model_len"}


def test_what_may_be_pinned_is_promised_to_no_request(model: LoadedModel) -> None:
    plan = plan_engine(config(num_pages=10, pin_quota=0.35), model, MACHINE)
    assert plan.pinnable_pages == 3
    assert plan.max_model_len.value == min(7 * 16, model.config.max_position_embeddings)
    assert plan.memory.pinnable_tokens == 48
    assert plan.memory.weight_bytes == sum(group.bytes for group in plan.weights)
    assert plan.memory.kv_bytes == 10 * plan.page_bytes
    assert plan.memory.available == MACHINE.memory_available


def test_plan_with_int8_keys_and_values(model: LoadedModel) -> None:
    plan = plan_engine(config(kv_cache_dtype="int8"), model, MACHINE)
    heads = model.config.num_layers * model.config.num_kv_heads
    assert plan.kv_cache_dtype.value == "int8"
    assert plan.page_bytes == 2 * 16 * heads * (model.config.head_dim + 4)


def test_weights_are_taken_off_the_available_memory(model: LoadedModel) -> None:
    sizes = []
    for quantization in ("none", "int8", "int4"):
        asked = config(quantization=quantization)
        sizes.append(sum(group.bytes for group in plan_engine(asked, model, MACHINE).weights))
        with pytest.raises(ConfigError, match="no memory for the KV pool: 10 B"):
            plan_engine(asked, model, msgspec.structs.replace(MACHINE, memory_available=sizes[-1] + 10))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[2] > 0


def test_quantised_weights_are_refused_by_name(model: LoadedModel) -> None:
    for settings in ({"executor": "reference"}, {"dtype": "float32"}):
        with pytest.raises(ConfigError, match="--quantization int8"):
            plan_engine(config(quantization="int8", **settings), model, MACHINE)


@pytest.mark.parametrize(
    ("executor", "quantization"), [("native", "none"), ("reference", "none"), ("native", "int8"), ("native", "int4")]
)
def test_build_and_run(executor: str, quantization: str) -> None:
    mailbox = Mailbox()
    core, info = build_engine(config(executor=executor, quantization=quantization, num_pages=4), mailbox)
    assert (info["executor"], info["num_pages"], info["kv_tokens"]) == (executor, 4, 64)
    assert info["quantization"] == quantization
    assert sum(group["bytes"] for group in info["weights"]) == info["device"]["weight_bytes"]
    assert info["max_model_len"] == min(64, load_model(TINY).config.max_position_embeddings)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(info)) == info  # plain data, ready for the wire
    mailbox.inbox.append(make_request("r", [1, 2, 3]))
    core.step()
    while not core.is_idle:
        core.step()
    outputs = [output for m in mailbox.collect() if isinstance(m, StepOutputs) for output in m.outputs]
    assert sum(len(output.token_ids) for output in outputs) == 8
    assert outputs[-1].error is None
    core.close()


def test_int8_keys_and_values_take_what_was_planned() -> None:
    mailbox = Mailbox()
    core, info = build_engine(config(kv_cache_dtype="int8", num_pages=4), mailbox)
    assert info["kv_cache_dtype"] == info["device"]["kv_cache_dtype"] == "int8"
    assert info["device"]["kv_bytes"] == info["kv_bytes"] // 4 * 5  # the null page is extra
    core.close()


def test_the_reference_executor_refuses_int8_keys_and_values() -> None:
    mailbox = Mailbox()
    with pytest.raises(ConfigError, match="--kv-cache-dtype int8 is not offered by the reference executor"):
        build_engine(config(executor="reference", kv_cache_dtype="int8"), mailbox)


def test_a_context_that_the_pool_cannot_hold() -> None:
    mailbox = Mailbox()
    core, info = build_engine(config(num_pages=1, max_model_len=40), mailbox)
    assert info["max_model_len"] == 40
    assert "16 tokens" in info["reasons"]["max_model_len"]
    core.close()


class Trickle(io.BytesIO):
    """A pipe that gives one byte at a time."""

    def read(self, size: int | None = -1) -> bytes:
        return super().read(min(size or 0, 1))


def test_startup_frame() -> None:
    startup = Startup(config(threads=2), "ipc:///x")
    frame = msgspec.msgpack.encode(startup)
    data = len(frame).to_bytes(LENGTH_BYTES, "big") + frame
    assert read_startup(Trickle(data + b"more")) == startup
    with pytest.raises(EOFError, match="before the start-up frame"):
        read_startup(io.BytesIO(data[:-1]))

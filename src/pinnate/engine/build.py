"""build_engine: from an EngineConfig to a running core. The one place where all parts are wired together.

Knows: which part needs which narrow values. Must not know: how any of them works.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from time import perf_counter
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import msgspec

from pinnate.core.autoconfig import (
    Choice,
    choose_dtype,
    choose_kv_cache_dtype,
    choose_max_model_len,
    choose_num_pages,
    choose_quantization,
    choose_threads,
    fit_max_model_len,
    kv_shape,
)
from pinnate.core.config import EngineConfig
from pinnate.core.layer_groups import LayerGroups, LayerSize, PageNeeds, choose_layer_groups, slot_layers
from pinnate.core.machine import Machine, read_machine
from pinnate.core.memory_plan import MemoryPlan, plan_memory
from pinnate.engine.build_cache import build_cache
from pinnate.engine.build_tiers import open_tier, start_fingerprint
from pinnate.engine.engine_core import EngineCore
from pinnate.engine.grammar_intake import GrammarCache, GrammarIntake, LazyBackend
from pinnate.engine.mailbox import Port
from pinnate.engine.stop_finder import LazyStopFinder
from pinnate.executor.base import Executor, ExecutorSpec, WeightGroup
from pinnate.executor.native import NativeExecutor
from pinnate.executor.reference import ReferenceExecutor
from pinnate.executor.simulated import SimulatedExecutor
from pinnate.graph import Graph
from pinnate.models.load import LoadedModel, load_model
from pinnate.scheduler.scheduler import Scheduler

log = logging.getLogger(__name__)


class Plan(NamedTuple):
    """Every automatic choice of one engine, each with its reason."""

    dtype: Choice[str]
    quantization: Choice[str]
    weights: list[WeightGroup]
    threads: Choice[int]
    num_pages: Choice[int]
    max_model_len: Choice[int]
    page_bytes: int
    kv_cache_dtype: Choice[str]
    pinnable_pages: int
    memory: MemoryPlan
    groups: LayerGroups
    needs: PageNeeds

    def reasons(self) -> dict[str, str]:
        layers = {"KV layers": self.groups.reason} if self.needs.window_groups else {}
        return layers | {
            "dtype": self.dtype.reason,
            "quantization": self.quantization.reason,
            "threads": self.threads.reason,
            "KV type": self.kv_cache_dtype.reason,
            "KV pool": self.num_pages.reason,
            "max_model_len": self.max_model_len.reason,
        }


class ExecutorKind(Protocol):
    """How to weigh a model (dtype, quantization) and how to build an executor for it."""

    def weigh(self, graph: Graph, dtype: str, quantization: str) -> list[WeightGroup]: ...
    def build(self, graph: Graph, spec: ExecutorSpec, plan: Plan, config: EngineConfig) -> Executor: ...


class _Native:
    def weigh(self, graph: Graph, dtype: str, quantization: str) -> list[WeightGroup]:
        return NativeExecutor.weigh(graph, dtype, quantization)

    def build(self, graph: Graph, spec: ExecutorSpec, plan: Plan, config: EngineConfig) -> Executor:
        return NativeExecutor(
            graph,
            spec,
            dtype=plan.dtype.value,
            quantization=plan.quantization.value,
            kv_int8=plan.kv_cache_dtype.value == "int8",
            isa=config.isa,
            threads=plan.threads.value,
        )


class _Reference:
    def weigh(self, graph: Graph, dtype: str, quantization: str) -> list[WeightGroup]:  # noqa: ARG002
        return ReferenceExecutor.weigh(graph)

    def build(self, graph: Graph, spec: ExecutorSpec, plan: Plan, config: EngineConfig) -> Executor:  # noqa: ARG002
        return ReferenceExecutor(graph, spec)


class _Simulated:
    def weigh(self, graph: Graph, dtype: str, quantization: str) -> list[WeightGroup]:  # noqa: ARG002
        return SimulatedExecutor.weigh()

    def build(self, graph: Graph, spec: ExecutorSpec, plan: Plan, config: EngineConfig) -> Executor:  # noqa: ARG002
        return SimulatedExecutor(graph.vocab_size, config.simulated_step_ms / 1000)


EXECUTORS: Mapping[str, ExecutorKind] = MappingProxyType(
    {"native": _Native(), "reference": _Reference(), "simulated": _Simulated()}
)


def plan_engine(config: EngineConfig, model: LoadedModel, machine: Machine) -> Plan:
    """
    Raises:
        ConfigError: a setting that the model or the machine cannot honour.
    """
    graph = model.graph
    dtype = choose_dtype(config.dtype, config.executor)
    quantization = choose_quantization(config.quantization, config.executor, dtype.value)
    weights = EXECUTORS[config.executor].weigh(graph, dtype.value, quantization.value)
    weight_bytes = sum(group.bytes for group in weights)
    context = choose_max_model_len(config.max_model_len, model.config.max_position_embeddings)
    kv_dtype = choose_kv_cache_dtype(config.kv_cache_dtype, dtype.value, config.executor)
    groups = choose_layer_groups([LayerSize(k.num_kv_heads, k.head_dim, k.window) for k in graph.kv_layers])
    needs = groups.needs(config.page_size, config.max_num_batched_tokens)
    stored = slot_layers(groups, graph.kv_layers)
    columns = sum(layer.num_kv_heads * layer.head_dim for layer in stored)
    heads = sum(layer.num_kv_heads for layer in stored)
    shape = kv_shape(columns, heads, kv_dtype.value, needs)
    pages = choose_num_pages(
        shape,
        num_pages=config.num_pages,
        kv_cache_memory=config.kv_cache_memory,
        max_num_seqs=config.max_num_seqs,
        max_model_len=context.value,
        available=max(0, machine.memory_available - weight_bytes),
    )
    pinnable = int(pages.value * config.pin_quota)
    return Plan(
        dtype=dtype,
        quantization=quantization,
        weights=weights,
        threads=choose_threads(config.threads, machine),
        num_pages=pages,
        max_model_len=fit_max_model_len(context, config.max_model_len, pages.value - pinnable, needs),
        page_bytes=shape.page_bytes,
        kv_cache_dtype=kv_dtype,
        pinnable_pages=pinnable,
        memory=plan_memory(weight_bytes, shape.page_bytes, needs, pages, pinnable, machine.memory_available),
        groups=groups,
        needs=needs,
    )


def build_engine(config: EngineConfig, port: Port) -> tuple[EngineCore, dict[str, Any]]:
    """A core ready to step, and its `info`: sizes, choices with their reasons, start-up times (plain data).

    Raises:
        ModelError: the model cannot be read or is not supported.
        ConfigError: a setting that the model or the machine cannot honour.
    """
    started = perf_counter()
    model = load_model(config.model)
    for warning in model.warnings:
        log.warning("%s", warning)
    loaded = perf_counter()
    plan = plan_engine(config, model, read_machine())
    spec = ExecutorSpec(
        num_pages=plan.num_pages.value,
        page_size=config.page_size,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_model_len=plan.max_model_len.value,
        groups=plan.groups,
    )
    content = start_fingerprint(config, model.graph, plan.needs)
    executor = EXECUTORS[config.executor].build(model.graph, spec, plan, config)
    tier = open_tier(config, content(), executor) if content is not None else None
    parts = build_cache(config, spec.num_pages, plan.pinnable_pages, plan.needs, tier)
    scheduler = Scheduler(
        parts.cache,
        policy=config.schedule_policy,
        max_num_seqs=spec.max_num_seqs,
        max_num_batched_tokens=spec.max_num_batched_tokens,
        max_model_len=spec.max_model_len,
        # The facades keep the queue's limit; here it also covers sequences that lack memory to run.
        max_num_queued_reqs=config.max_num_seqs + config.max_num_queued_reqs,
        explainer=parts.explainer,
        find_stops=LazyStopFinder(config.model),
    )
    core = EngineCore(
        scheduler,
        executor,
        port,
        check_integrity=config.check_integrity,
        commands=parts.commands,
        events=parts.events,
        tiers=parts.cache.tiers,
        grammars=GrammarIntake(
            GrammarCache(LazyBackend(config.model, model.graph.vocab_size, model.config.eos_token_ids))
        ),
    )
    info = _info(config, model, plan, executor)
    info["startup"] = {"map the model": loaded - started, "build the executor": perf_counter() - loaded}
    return core, info


def _info(config: EngineConfig, model: LoadedModel, plan: Plan, executor: Executor) -> dict[str, Any]:
    return {
        "model": config.model,
        "family": model.config.family,
        "executor": config.executor,
        "dtype": plan.dtype.value,
        "quantization": plan.quantization.value,
        "weights": [group._asdict() for group in plan.weights],
        "kv_cache_dtype": plan.kv_cache_dtype.value,
        "threads": plan.threads.value,
        "max_model_len": plan.max_model_len.value,
        "vocab_size": model.graph.vocab_size,
        "eos_token_ids": list(model.config.eos_token_ids),
        "num_pages": plan.num_pages.value,
        "page_size": config.page_size,
        "enable_prefix_caching": config.enable_prefix_caching,
        "pinnable_pages": plan.pinnable_pages,
        "page_needs": msgspec.to_builtins(plan.needs),
        "kv_tokens": plan.needs.fitting_tokens(plan.num_pages.value),
        "kv_committed_bytes": executor.kv_committed_bytes,
        "kv_bytes": plan.num_pages.value * plan.page_bytes,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_num_queued_reqs": config.max_num_queued_reqs,
        "max_num_queued_tokens": config.max_num_queued_tokens,
        "cache_report": config.cache_report,
        "reasons": plan.reasons(),
        "memory_plan": plan.memory.lines(),
        "warnings": list(model.warnings),
        "device": executor.describe(),
    }

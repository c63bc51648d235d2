"""The Gemma 3 family (text): windowed and full layers in turn, norms before and after each block, GeGLU.

Knows: which tensors there are, their shapes, and how ops join them. Must not know: files, storage types, executors.
Source: Gemma 3 technical report (arXiv:2503.19786) and the published checkpoints.
"""

from __future__ import annotations

from pinnate.graph import Graph, GraphBuilder
from pinnate.graph.ops import RopeTable, Value
from pinnate.models.config import ModelConfig
from pinnate.models.gemma3_config import GemmaConfig
from pinnate.models.llama import output_matrix
from pinnate.models.rope import rope_table
from pinnate.weights.source import WeightSource


def build(config: ModelConfig, weights: WeightSource) -> Graph:
    """The graph of a model: embeddings scaled by sqrt(hidden), blocks, a soft cap on the logits where configured.

    Raises:
        ModelError: a tensor is missing or has the wrong shape; names file and tensor.
    """
    gemma = config.gemma
    assert gemma is not None
    graph = GraphBuilder()
    embedding = weights.take("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
    full = rope_table(config.head_dim, config.rope_theta, config.rope_scaling)
    local = rope_table(config.head_dim, gemma.local_theta, None)
    x = graph.embedding(embedding, config.hidden_size**0.5)
    for layer in range(config.num_layers):
        x = _Block(graph, config, gemma, weights, layer).build(x, local if config.windows[layer] else full)
    x = graph.gather_rows(x)
    norm = weights.take("model.norm.weight", (config.hidden_size,))
    x = graph.rms_norm(x, norm, config.norm_eps, gemma.norm_offset)
    logits = graph.linear(x, output_matrix(config, weights, embedding))
    return graph.finish(graph.softcap(logits, gemma.final_softcap) if gemma.final_softcap else logits)


class _Block:
    """One layer: x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    def __init__(
        self, graph: GraphBuilder, config: ModelConfig, gemma: GemmaConfig, weights: WeightSource, layer: int
    ) -> None:
        self._graph = graph
        self._config = config
        self._gemma = gemma
        self._weights = weights
        self._layer = layer

    def build(self, x: Value, table: RopeTable) -> Value:
        hidden = self._config.hidden_size
        attended = self._attention(self._norm(x, "input_layernorm", hidden), table)
        x = self._graph.add(x, self._norm(attended, "post_attention_layernorm", hidden))
        inner = self._mlp(self._norm(x, "pre_feedforward_layernorm", hidden))
        return self._graph.add(x, self._norm(inner, "post_feedforward_layernorm", hidden))

    def _attention(self, h: Value, table: RopeTable) -> Value:
        config, graph = self._config, self._graph
        hidden, dim = config.hidden_size, config.head_dim
        q_width, kv_width = config.num_heads * dim, config.num_kv_heads * dim
        q = self._norm(self._linear(h, "self_attn.q_proj", q_width, hidden), "self_attn.q_norm", dim)
        k = self._norm(self._linear(h, "self_attn.k_proj", kv_width, hidden), "self_attn.k_norm", dim)
        v = self._linear(h, "self_attn.v_proj", kv_width, hidden)
        attended = graph.attention(
            graph.rope(q, dim, table),
            graph.rope(k, dim, table),
            v,
            head_dim=dim,
            scale=self._gemma.query_size**-0.5,
            window=config.windows[self._layer],
            softcap=self._gemma.attention_softcap,
        )
        return self._linear(attended, "self_attn.o_proj", hidden, q_width)

    def _mlp(self, h: Value) -> Value:
        hidden, inner = self._config.hidden_size, self._config.intermediate_size
        gate = self._graph.gelu(self._linear(h, "mlp.gate_proj", inner, hidden))
        up = self._linear(h, "mlp.up_proj", inner, hidden)
        return self._linear(self._graph.mul(gate, up), "mlp.down_proj", hidden, inner)

    def _norm(self, x: Value, name: str, width: int) -> Value:
        weight = self._weights.take(f"model.layers.{self._layer}.{name}.weight", (width,))
        return self._graph.rms_norm(x, weight, self._config.norm_eps, self._gemma.norm_offset)

    def _linear(self, x: Value, name: str, rows: int, columns: int) -> Value:
        return self._graph.linear(x, self._weights.take(f"model.layers.{self._layer}.{name}.weight", (rows, columns)))

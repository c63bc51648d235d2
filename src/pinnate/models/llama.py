"""The llama family (Llama 2/3, SmolLM2, Mistral, Qwen2, Qwen3): one builder, driven by the config.

Knows: which tensors there are, their shapes, and how ops join them. Must not know: files, storage types, executors.
"""

from __future__ import annotations

from array import array

from pinnate.core.errors import ModelError
from pinnate.graph import Graph, GraphBuilder, Tensor, TensorType
from pinnate.graph.ops import RopeTable, Value
from pinnate.models.config import ModelConfig
from pinnate.models.rope import rope_table
from pinnate.weights.source import WeightSource

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_ROPE_DIVISORS = "rope_freqs.weight"  # GGUF only


def build(config: ModelConfig, weights: WeightSource) -> Graph:
    """The graph of a model: pre-norm blocks of attention and SwiGLU, each added to the residual.

    Raises:
        ModelError: a tensor is missing or has the wrong shape; names file and tensor.
    """
    graph = GraphBuilder()
    embedding = weights.take(_EMBEDDING, (config.vocab_size, config.hidden_size))
    table = rope_table(config.head_dim, config.rope_theta, config.rope_scaling, _rope_divisors(config, weights))
    x = graph.embedding(embedding)
    for layer in range(config.num_layers):
        x = _block(graph, config, weights, layer, x, table)
    x = graph.gather_rows(x)
    x = graph.rms_norm(x, weights.take("model.norm.weight", (config.hidden_size,)), config.norm_eps)
    return graph.finish(graph.linear(x, output_matrix(config, weights, embedding)))


def _block(
    graph: GraphBuilder, config: ModelConfig, weights: WeightSource, layer: int, x: Value, table: RopeTable
) -> Value:
    prefix = f"model.layers.{layer}."
    hidden, inner = config.hidden_size, config.intermediate_size

    def norm(value: Value, name: str, width: int) -> Value:
        return graph.rms_norm(value, weights.take(f"{prefix}{name}.weight", (width,)), config.norm_eps)

    def linear(value: Value, name: str, rows: int, columns: int, bias: bool | None) -> Value:
        weight = weights.take(f"{prefix}{name}.weight", (rows, columns))
        bias_name = f"{prefix}{name}.bias"
        with_bias = weights.has(bias_name) if bias is None else bias
        return graph.linear(value, weight, weights.take(bias_name, (rows,)) if with_bias else None)

    q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    h = norm(x, "input_layernorm", hidden)
    q = linear(h, "self_attn.q_proj", q_width, hidden, config.qkv_bias)
    k = linear(h, "self_attn.k_proj", kv_width, hidden, config.qkv_bias)
    v = linear(h, "self_attn.v_proj", kv_width, hidden, config.qkv_bias)
    if config.qk_norm:
        q = norm(q, "self_attn.q_norm", config.head_dim)
        k = norm(k, "self_attn.k_norm", config.head_dim)
    q = graph.rope(q, config.head_dim, table)
    k = graph.rope(k, config.head_dim, table)
    attended = graph.attention(q, k, v, head_dim=config.head_dim, window=config.windows[layer])
    x = graph.add(x, linear(attended, "self_attn.o_proj", hidden, q_width, config.o_bias))

    h = norm(x, "post_attention_layernorm", hidden)
    gate = linear(h, "mlp.gate_proj", inner, hidden, config.mlp_bias)
    up = linear(h, "mlp.up_proj", inner, hidden, config.mlp_bias)
    return graph.add(x, linear(graph.swiglu(gate, up), "mlp.down_proj", hidden, inner, config.mlp_bias))


def output_matrix(config: ModelConfig, weights: WeightSource, embedding: Tensor) -> Tensor:
    """The output matrix. Where the config ties it to the embedding, a file's own is ignored, as in transformers."""
    tied = not weights.has(_HEAD) if config.tie_word_embeddings is None else config.tie_word_embeddings
    if tied:
        weights.discard(_HEAD)
        return embedding
    return weights.take(_HEAD, (config.vocab_size, config.hidden_size))


def _rope_divisors(config: ModelConfig, weights: WeightSource) -> tuple[float, ...] | None:
    """GGUF writes Llama 3's rope scaling as a tensor that divides the frequencies."""
    if not weights.has(_ROPE_DIVISORS):
        return None
    tensor = weights.take(_ROPE_DIVISORS, (config.head_dim // 2,))
    if tensor.type is not TensorType.F32:
        raise ModelError(f"{weights.where}: tensor {_ROPE_DIVISORS} must be F32, it is {tensor.type.name}")
    values = array("f", bytes(tensor.data)).tolist()
    if not all(v > 0 for v in values):
        raise ModelError(f"{weights.where}: tensor {_ROPE_DIVISORS} must hold numbers above 0")
    return tuple(values)

"""The op vocabulary and the graphs made of it. Imports nothing but core."""

from pinnate.graph.graph import Graph, GraphBuilder, KVLayer
from pinnate.graph.tensor import BLOCK_SIZES, Tensor, TensorType

__all__ = ["BLOCK_SIZES", "Graph", "GraphBuilder", "KVLayer", "Tensor", "TensorType"]

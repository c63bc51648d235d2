"""The native executor: a Graph lowered to a flat program (lowering, plan, assemble) and run in one call a step."""

from pinnate.executor.native.executor import NativeExecutor

__all__ = ["NativeExecutor"]

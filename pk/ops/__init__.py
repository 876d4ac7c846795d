"""Finished operators for PyTorch: ordinary functions on torch tensors, the same on every backend."""

from pk.ops.matmul import matmul_reduce_scatter

__all__ = ["matmul_reduce_scatter"]

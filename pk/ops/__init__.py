"""Finished operators for PyTorch: ordinary functions on torch tensors, the same on every backend."""

from pk.ops.dense import explain, matmul
from pk.ops.tensor_parallel import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter

__all__ = ["all_gather_matmul", "explain", "matmul", "matmul_all_reduce", "matmul_reduce_scatter"]

"""Finished operators for PyTorch: ordinary functions on torch tensors, the same on every backend."""

from pk.ops import library as library  # torch.ops.pk
from pk.ops.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from pk.ops.dense import matmul
from pk.ops.explaining import explain
from pk.ops.tensor_parallel import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from pk.ops.tuning import tune

__all__ = [
    "all_gather",
    "all_gather_matmul",
    "all_reduce",
    "all_to_all",
    "explain",
    "matmul",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "reduce_scatter",
    "tune",
]

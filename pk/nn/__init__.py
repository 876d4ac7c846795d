"""Tensor-parallel layers for PyTorch: modules whose products communicate inside the kernels of :mod:`pk.ops`.

Two forms, chosen by ``sequence_parallel``:

========  =====================================  ==========================================
form      between a row and a column layer       the loss
========  =====================================  ==========================================
sequence  every rank holds its share of tokens   of a rank's own tokens: the sum over ranks
                                                 is what is differentiated
whole     every rank holds all tokens            the same on every rank
========  =====================================  ==========================================

Parameters are ordinary tensors that hold this rank's share, so optimizers, ``state_dict`` and data-parallel wrappers
work as they do for any module.  Making layers, and every forward and backward pass, is collective over the group.
"""

from pk.nn.functional import gather, split, sum_gradients
from pk.nn.linear import ColumnParallelLinear, RowParallelLinear
from pk.nn.mlp import ParallelMLP
from pk.nn.norm import clip_grad_norm_
from pk.nn.parallelize import parallelize
from pk.nn.replicated import Embedding, LayerNorm, Linear, RMSNorm
from pk.nn.shards import Shard, full_state_dict, load_full_state_dict
from pk.nn.styles import ColwiseParallel, RowwiseParallel, SequenceParallel

__all__ = [
    "ColumnParallelLinear",
    "ColwiseParallel",
    "Embedding",
    "LayerNorm",
    "Linear",
    "ParallelMLP",
    "RMSNorm",
    "RowParallelLinear",
    "RowwiseParallel",
    "SequenceParallel",
    "Shard",
    "clip_grad_norm_",
    "full_state_dict",
    "gather",
    "load_full_state_dict",
    "parallelize",
    "split",
    "sum_gradients",
]

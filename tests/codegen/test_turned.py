"""The tensor-parallel kernels with turned tiles, as cubins: what makes them as quick as the product alone."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import pk
from pk.ops import fused, parallel_kernels
from pk.ops.model import CONFIGS

TILE = CONFIGS["p128x192.t"]
BF16 = torch.bfloat16
SUMS: dict[str, Any] = {"OUTS": 2, "PARTS": fused.PARTS, "AHEAD": 3, "LAG": 132}


def made(operator: str, **more: Any) -> Any:
    """The kernel of ``operator`` with turned tiles, a bias and an activation, for two ranks' worth of SMs."""
    every = TILE.constants(2, 2)
    sizes = {c: every[c] for c in ("BK", "P", "STAGES", "OUTS", "WARPGROUPS", "PINGPONG")}
    sizes |= dict(zip(("BM", "BN"), TILE.result_tile, strict=True)) | {"TURNED": True, "ACTIVATION": "gelu"}
    bias = pk.spec(BF16, 2)
    if operator == "all_gather_matmul":
        x, c = pk.spec(BF16, 2), pk.spec(BF16, 3)
        return parallel_kernels.all_gather_matmul.specialise(
            x=x, b=pk.spec(BF16, 2), c=c, bias=bias, COMM=8, **sizes, **more
        )
    names = {"matmul_reduce_scatter": (3, "c"), "matmul_all_reduce": (2, "out")}
    ndim, result = names[operator]
    sizes |= SUMS | {"STAGES": 4}
    sizes |= {"PR": 8} if result == "out" else {}
    kernel = getattr(parallel_kernels, f"{operator}_ordered")
    return kernel.specialise(
        a=pk.spec(BF16, ndim), b=pk.spec(BF16, 2), bias=bias, **{result: pk.spec(BF16, 2)}, **sizes
    )


@pytest.mark.parametrize("operator", fused.OPERATORS)
def test_turned_tiles(operator: str) -> None:
    """Nothing spills, whole rows of 128 are stored, and the turn to multiply is given before the epilogue begins."""
    kernel = made(operator)
    resources = kernel.binary.resources
    assert (resources.spill_bytes, resources.local_bytes) == (0, 0)
    assert "C75" not in kernel.binary.log
    text = kernel.source.text
    consumer = text[text.index("void consumer(") :]
    steps = ["inputs_turn.take", "mma(acc", "inputs_turn.give", "finish_mma", "output_turn.take", "output_turn.give"]
    places = [consumer.index(step) for step in steps]
    assert places == sorted(places)
    assert re.search(r"shared_tile<bf16, 32, 128> c;", text)
    sums = operator != "all_gather_matmul"
    assert ("load<128>(transposed(s.c), role.warpgroup())" in text) == sums


def test_partial_sums_are_read_by_ldmatrix() -> None:
    lines = pk.runtime.compile.sass(made("matmul_reduce_scatter").binary.cubin)
    assert re.search(r"LDSM\.16\.MT88\.4", lines)
    assert re.search(r"STSM\.16\.MT88\.4", lines)

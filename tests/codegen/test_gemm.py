"""The kernel ``matmul`` as cubins: no configuration spills, keeps anything in local memory or serialises its mma."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pk
from pk.ops.kernels import matmul
from pk.ops.model import CONFIGS

VECTOR, SCALE, FP8 = pk.spec(torch.bfloat16, 2), pk.spec(torch.float32, 2), pk.spec(torch.float8_e4m3fn, 2)


def arguments(name: str, fp8: bool = False, bias: bool = False, transposed: bool = False) -> dict[str, Any]:
    """Of ``specialise``, for configuration ``name``."""
    c = CONFIGS[name]
    given: dict[str, Any] = {"B_T": transposed or fp8 or c.swap, "C_T": c.swap}
    if c.swap:
        given["A_T"] = not (transposed or fp8)
    if c.split > 1:
        given["parts"] = pk.spec(torch.float32, 3)
    if bias:
        given["row_bias" if c.swap else "col_bias"] = VECTOR
        given["ACTIVATION"] = "gelu"
    if fp8:
        given |= {"a": FP8, "b": FP8, "c": VECTOR, "row_scale": SCALE, "col_scale": SCALE}
    return {**c.constants(1 if fp8 else 2, 2, vectors=fp8 or bias), **given}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("c128x256", {"bias": True}),
        ("c128x256.b", {"transposed": True}),
        ("c128x256.s3", {}),
        ("c128x256.s3.g16", {"transposed": True}),
        ("p128x160", {"transposed": True}),
        ("t64x128.d128.a", {}),
        ("c256x192", {"fp8": True}),
        ("p128x192", {}),
        ("p128x192", {"fp8": True, "bias": True}),
        ("p128x128.b", {"transposed": True}),
        ("p128x192.t", {"transposed": True}),
        ("p128x192.t", {"fp8": True}),
        ("p64x256", {}),
        ("c64x128", {}),
        ("t64x16", {"bias": True}),
        ("t64x64.b", {"transposed": True}),
        ("t64x32.d128.k4", {"fp8": True}),
        ("t128x256.k2", {}),
    ],
    ids=str,
)
def test_no_spills(name: str, options: dict[str, bool]) -> None:
    program = matmul.specialise(**arguments(name, **options))
    assert program.binary.resources.spill_bytes == 0
    assert program.binary.resources.local_bytes == 0
    assert "C75" not in program.binary.log


def test_main_loop() -> None:
    """Four products and one remote arrival a step of K, and no fence of the whole GPU among them.

    The first step stands before the loop and overwrites the accumulator, which nothing clears.
    """
    lines = matmul.sass(**arguments("c128x256.b")).splitlines()
    products = [i for i, line in enumerate(lines) if "HGMMA.64x256x16" in line]
    assert len(products) == 8
    assert ["RZ, !UPT" in lines[i] for i in products] == [True] + 7 * [False]
    assert sum("CS2R" in line for line in lines) < 64
    inside = lines[products[4] : products[-1]]
    assert not any("MEMBAR" in line or "LDL" in line or "STL" in line for line in inside)
    assert len(inside) < 100


def test_launch_is_local() -> None:
    """Nobody waits to hear of a launch without counters; one with split sums has some."""
    assert "local_begin" in matmul.source(**arguments("c128x256"))
    assert "launch_begin" in matmul.source(**arguments("t64x16.d128.k2"))

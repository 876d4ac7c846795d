"""mma, private tiles and attention compile to what they are written for: no spills, no serialised wgmma."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import pk
from pk.runtime.compile import Binary, sass
from tests import tensor_core
from tests.codegen.test_compile import clean
from tests.tensor_core import FORMS, Form
from tests.test_attention import example

BF16, F32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn


def compiled(kernel: pk.Kernel, **arguments: Any) -> Binary:
    """The kernel for these dtypes and constants; it must be clean."""
    return clean(kernel.specialise(**arguments).source)


def product(form: Form, out: torch.dtype = F32) -> Binary:
    types = {"a": pk.spec(form.dtype, 2), "b": pk.spec(form.other or form.dtype, 2), "c": pk.spec(out, 2)}
    return compiled(tensor_core.product, **types, **form.constants)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_product(form: Form) -> None:
    product(form)


@pytest.mark.parametrize("out", [BF16, E4M3], ids=str)
def test_results_are_rounded(out: torch.dtype) -> None:
    product(FORMS[0], out)


@pytest.mark.parametrize(
    ("form", "instruction"),
    [
        (Form(BF16, REGISTERS=True), r"HGMMA\.64x64x16\.F32\.BF16 R\d+, R\d+, gdesc\[UR\d+\]\.tnspB"),
        (Form(BF16, TA=True), r"HGMMA\.64x64x16\.F32\.BF16 R\d+, gdesc\[UR\d+\]\.tnspA\.tnspB"),
        (Form(E4M3, TB=True), r"QGMMA\.64x64x32\.F32\.E4M3\.E4M3"),
        (Form(F32, TB=True, BK=32), r"HGMMA\.64x64x8\.F32\.TF32"),
    ],
    ids=["registers", "transposed", "e4m3", "tf32"],
)
def test_instructions(form: Form, instruction: str) -> None:
    code = sass(product(form).cubin)
    steps = form.BK // (32 // form.dtype.itemsize)
    assert len(re.findall(instruction, code)) == steps, re.findall(r".*GMMA.*", code)


@pytest.mark.parametrize("form", ["stored", "transposed", "loaded"])
@pytest.mark.parametrize("out", [BF16, F32], ids=str)
def test_private_tiles(form: str, out: torch.dtype) -> None:
    types = {name: pk.spec(BF16, 2) for name in ("a", "b")} | {name: pk.spec(out, 2) for name in ("c", "d")}
    compiled(tensor_core.private, **types, FORM=form)


def test_arithmetic_between_mmas() -> None:
    types = {name: pk.spec(BF16, 2) for name in ("x", "y", "z")}
    compiled(tensor_core.recurrence, **types, c=pk.spec(F32, 2))


def test_several_accumulators() -> None:
    types = {name: pk.spec(BF16, 2) for name in ("q", "k", "g")} | {name: pk.spec(F32, 2) for name in ("dk", "dq")}
    compiled(tensor_core.gradients, **types)


ATTENTION = [
    {"CAUSAL": True}, {"CAUSAL": False}, {"D": 64}, {"D": 64, "WG": 3, "BQ": 192}, {"KV": 176, "D": 64},
    {"WG": 1, "BQ": 64},
]  # fmt: skip


@pytest.mark.parametrize("constants", ATTENTION, ids=str)
def test_attention(constants: dict[str, Any]) -> None:
    types = {name: pk.spec(BF16, 4) for name in "qkvo"} | {"lse": pk.spec(F32, 4)}
    code = sass(compiled(example("06_attention").attention, **types, **constants).cubin)
    depth, keys = constants.get("D", 128), constants.get("KV", 128)
    scores = re.findall(rf"HGMMA\.64x{keys}x16\.F32\.BF16 R\d+, gdesc", code)
    values = re.findall(rf"HGMMA\.64x{depth}x16\.F32\.BF16 R\d+, R\d+, gdesc", code)
    assert (len(scores), len(values)) == (depth // 16, keys // 16)  # values: the probabilities come from registers


@pytest.mark.parametrize("causal", [False, True])
def test_ring_attention(causal: bool) -> None:
    compiled(example("07_ring_attention").ring_attention, **{name: pk.spec(BF16, 4) for name in "qkvo"}, CAUSAL=causal)

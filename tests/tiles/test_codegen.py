"""Register tiles as CUDA: no kernel spills, and the headers deal elements as ``ir.layout`` does."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch

import pk
from pk.codegen import readable
from pk.ir.layout import Layout, linear
from pk.runtime.compile import sass
from tests.codegen.test_compile import clean
from tests.tiles import kernels

F32, BF16, I32 = torch.float32, torch.bfloat16, torch.int32

CASES: dict[str, tuple[pk.Kernel, dict[str, Any]]] = {
    "softmax": (kernels.softmax, {"x": (BF16, 2), "y": (F32, 2)}),
    "softmax of fp8": (kernels.softmax, {"x": (torch.float8_e4m3fn, 2), "y": (torch.float8_e5m2, 2)}),
    "layernorm": (kernels.layernorm, {"x": (BF16, 2), "weight": (F32, 1), "bias": (F32, 1), "y": (BF16, 2)}),
    "weighted sum": (kernels.moe_weighted_sum, {"back": (BF16, 3), "weight": (F32, 2), "out": (BF16, 2)}),
    "prefix sum": (kernels.prefix_sum, {"x": (I32, 2), "y": (I32, 2)}),
    "scalars": (kernels.scalars, {"x": (BF16, 2), "table": (I32, 1), "y": (F32, 2)}),
    **{
        f"reductions {r}x{c} {str(t)[6:]}": (
            kernels.reductions,
            {"x": (t, 2), "rows": (t, 2), "cols": (t, 2), "R": r, "C": c},
        )
        for t, shapes in ((F32, [(1, 2048), (3, 96), (16, 33), (5, 1)]), (BF16, [(2, 512), (37, 40)]), (I32, [(8, 64)]))
        for r, c in shapes
    },
    **{
        f"moved {r}x{c} {str(t)[6:]}": (kernels.moved, {"x": (t, 2), "y": (t, 2), "R": r, "C": c})
        for t, r, c in ((I32, 1, 8192), (BF16, 64, 128), (torch.float8_e4m3fn, 3, 40), (F32, 5, 1))
    },
    **{
        f"fragment of {g}": (
            kernels.fragment_softmax,
            {"a": (BF16, 2), "b": (BF16, 2), "y": (BF16, 2), "rows": (F32, 2), "cols": (F32, 2), "G": g, "N": 128},
        )
        for g in (1, 2, 3)
    },
}


def specs(arguments: dict[str, Any]) -> dict[str, Any]:
    return {k: pk.spec(*v) if isinstance(v, tuple) else v for k, v in arguments.items()}


@pytest.mark.parametrize("name", CASES)
def test_compiles_without_a_spill(name: str) -> None:
    kernel, arguments = CASES[name]
    code = sass(clean(kernel.specialise(**specs(arguments)).source).cubin)
    assert not re.search(r"\b(LDL|STL)\b", code)
    assert "LDG.E.CONSTANT" not in code  # ld.global.nc does not see what others write


def text(name: str) -> str:
    kernel, arguments = CASES[name]
    return readable(kernel.specialise(**specs(arguments)).source.text)


def test_a_statement_is_one_loop() -> None:
    assert "PK_EACH(linear_tile<float, 16, 256, 8, 1>) e(ri, ci) = power_of_two((tile(ri, ci) - " in text("softmax")


def test_what_only_moves_is_copied() -> None:
    """As it lies in memory, dealt to all threads in pieces of up to 16 bytes; not if its dtype changes."""
    for kind, r, c in (("int", 1, 8192), ("bf16", 64, 128), ("e4m3", 3, 40), ("float", 5, 1)):
        name = next(n for n in CASES if n.startswith(f"moved {r}x{c} "))
        assert f"copied_tile<{kind}, {r}, {c}, 8> loaded;" in text(name)
    cast = kernels.moved.specialise(x=pk.spec(BF16, 2), y=pk.spec(F32, 2)).source.text
    assert "copied_tile" not in cast


def test_what_is_reduced_needs_no_tile() -> None:
    body = text("prefix sum")
    assert "PK_EACH(linear_tile<int, 256, 256, 8, 1>) total(ri, ci) = total(ri, ci) + (" in body
    assert "linear_tile<int, 256, 256, 8, 1> " not in body  # no variable of that type


def test_vectors_are_wide() -> None:
    kernel, arguments = CASES["weighted sum"]
    code = sass(clean(kernel.specialise(**specs(arguments)).source).cubin)
    assert "LDG.E.128" in code
    assert "STG.E.128" in code


def test_no_fused_multiply_add_but_the_one_that_is_asked_for() -> None:
    kernel, arguments = CASES["weighted sum"]
    assert "FFMA" not in sass(clean(kernel.specialise(**specs(arguments)).source).cubin)
    kernel, arguments = CASES["layernorm"]
    assert "FFMA" in sass(clean(kernel.specialise(**specs(arguments)).source).cubin)


def test_role_meets_between_a_store_and_a_load_of_one_tensor() -> None:
    body = text("scalars")
    storer = body[body.index("void storer(") :]
    assert "role.sync();" not in storer[: storer.index("\n}")]  # one warp needs no barrier
    once = pk.kernel(_write_and_read).specialise(x=pk.spec(F32, 2)).source.text
    write, meet, read = (once.index(word) for word in ("store(tensor_view", "role.sync();", "load(loaded"))
    assert meet < write or write < meet < read


def _write_and_read(x: pk.Global) -> None:
    for i in pk.tasks(x.rows):
        pk.store(x, pk.full((1, 64), 1.0), (i, 0))
        pk.store(x, pk.load(x, (i, 1), (1, 64)) + pk.load(x, (i, 0), (1, 64)), (i, 0))


# ------------------------------------------------------------------------------------- headers and ir.layout agree
SHAPES = [(1, 8), (1, 2048), (1, 8192), (2, 8192), (3, 96), (4, 1), (8, 64), (8, 33), (16, 512), (37, 40), (256, 256)]
LINEAR = [linear(warps, rows) for warps in (4, 8, 12) for rows in (1, 2, 3, 5, 8, 256)]


def _asserts(layout: Layout, rows: int, cols: int) -> str:
    slots = (layout.row_slots(rows), layout.col_slots(cols), layout.vector(cols) if cols > 1 else 1)
    kind = (
        f"linear_tile<float, {rows}, {cols}, {layout.warps}, {layout.share}>"
        if layout.kind == "linear"
        else f"register_tile<float, {rows * 4 // layout.warps if rows > 1 else 1}, {cols}>"
    )
    names = ("row_slots", "col_slots", "vector")
    return "\n".join(f"static_assert({kind}::{n} == {v});" for n, v in zip(names, slots, strict=True))


def test_headers_deal_elements_as_the_layout_says() -> None:
    lines = [_asserts(layout, r, c) for layout in LINEAR for r, c in SHAPES]
    fragments = [(64, 8), (64, 128), (64, 1), (1, 64), (1, 1), (128, 256)]
    lines += [_asserts(Layout("fragment", 4 * g), r * g if r > 1 else 1, c) for g in (1, 2, 3) for r, c in fragments]
    kernel, arguments = CASES["softmax"]
    source = kernel.specialise(**specs(arguments)).source
    clean(dataclasses.replace(source, text=source.text + "\n" + "\n".join(lines) + "\n"))

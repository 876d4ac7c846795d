"""``pk.reduce`` and ``pk.all_reduce``: what the front end makes of them, and what it refuses, with exact words."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pk import errors
from pk.ir.types import DType, float8_e4m3, float16, float32
from tests.dsl.reading import body, refusal

HEAD = (
    "@pk.kernel\ndef k(x: pk.Parallel, out: pk.Global, y: pk.Global):\n"
    "    part = pk.scratch((4, x.cols), x.dtype)\n    "
)
DTYPE: dict[str, DType] = {"y": float32}


def test_coordinates_count_windows_and_at_counts_elements() -> None:
    text = body(
        HEAD + "for i in pk.tasks(4):\n"
        "        pk.reduce(out, (0, i), x, (1, i + 1), shape=(1, 64))\n"
        "        pk.reduce(part[pk.rank()], pk.at(2, i), part, (0, i), shape=(8,), op='max')\n"
        "        pk.all_reduce(x, (i, 0), shape=(16, 32), op='min')\n"
    )
    assert text == (
        "for i in tasks(4, group=8):\n"
        "  reduce(out[0, i * 64], x@all[1, i * 64 + 64], shape=(1, 64), op='sum')\n"
        "  reduce(part@rank[2, i], part@all[0, i * 8], shape=(8,), op='max')\n"
        "  all_reduce(x@all[i * 16, 0], shape=(16, 32), op='min')\n"
    )


CASES: dict[str, tuple[type[errors.PkError], str]] = {
    "reduce_op": (errors.WrongOperand, "pk.reduce(out, (0, 0), x, (0, 0), shape=(1, 64), op='mean')"),
    "reduce_dtypes": (errors.WrongDType, "pk.reduce(y, (0, 0), x, (0, 0), shape=(1, 64))"),
    "reduce_of_a_global": (errors.WrongOperand, "pk.reduce(out, (0, 0), y, (0, 0), shape=(1, 64))"),
    "reduce_of_one_copy": (errors.WrongOperand, "pk.reduce(out, (0, 0), x[1], (0, 0), shape=(1, 64))"),
    "reduce_into_every_copy": (errors.WrongOperand, "pk.reduce(x, (0, 0), x, (0, 0), shape=(1, 64))"),
    "reduce_shape": (errors.WrongTileShape, "pk.reduce(out, (0, 0), x, (0, 0), shape=(1, 2, 64))"),
    "reduce_too_large": (errors.WrongTileShape, "pk.all_reduce(x, (0, 0), shape=(512, 512))"),
    "reduce_coordinate": (errors.WrongCoordinate, "pk.reduce(out, (0, 0), x, (0,), shape=(1, 64))"),
    "reduce_in_a_storer": (errors.WrongRole, "with pk.storer():\n        pk.all_reduce(x, (0, 0), shape=(1, 64))"),
    "reduce_in_shared_code": (
        errors.WrongRole, "pk.all_reduce(x, (0, 0), shape=(1, 64))\n    with pk.storer():\n        pass"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_refused(name: str, golden: Callable[[str, str], None]) -> None:
    kind, lines = CASES[name]
    golden(f"errors/{name}.txt", refusal(kind, HEAD + lines, dtype=DTYPE))


def test_a_window_lies_inside_its_tensor() -> None:
    text = refusal(errors.WrongCoordinate, HEAD + "pk.reduce(out, (0,), x, (0, 0), shape=(4, 64))", ndim={"out": 1})
    assert "a window (4, 64) cannot lie in `out`, which has 1 dimension" in text


@pytest.mark.parametrize("dtype", [float8_e4m3])
def test_dtype_of_adds(dtype: DType, golden: Callable[[str, str], None]) -> None:
    source = """
    @pk.kernel
    def k(c: pk.Global):
        output = pk.pipeline(2, c=pk.shared((128, 64), c.dtype))
        with pk.loader():
            with output.fill() as s:
                pk.load_async(s.c, c, (0, 0))
        with pk.storer():
            with output.drain() as s:
                pk.store_add_async(c, s.c, (0, 0))
    """
    golden("errors/dtype_of_add.txt", refusal(errors.WrongDType, source, dtype={"c": dtype}))


def test_the_group_of_tasks_may_be_computed() -> None:
    source = "@pk.kernel\ndef k(x: pk.Global):\n    G = pk.cdiv(8, pk.world_size())\n    "
    text = body(source + "for m, n in pk.tasks(x.rows, x.cols, group=G * 2):\n        pass")
    assert text == "for m, n in tasks(x.rows, x.cols, group=max(G * 2, 1)):\n  pass\n"
    said = refusal(errors.WrongOperand, source + "for m, n in pk.tasks(x.rows, x.cols, group=0):\n        pass")
    assert "group=0" in said
    refusal(errors.WrongOperand, source + "for m, n in pk.tasks(x.rows, x.cols, group=0.5):\n        pass")


def test_reduced_windows_take_the_narrow_floats() -> None:
    for dtype in (float16, float32):
        body(HEAD + "pk.all_reduce(x, (0, 0), shape=(1, 64))", dtype={"x": dtype, "out": dtype})
    refusal(errors.WrongDType, HEAD + "pk.all_reduce(x, (0, 0), shape=(1, 64))", dtype={"x": float8_e4m3})

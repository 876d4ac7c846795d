"""Operations that cannot work are refused with exact words: dtypes, shapes, roles, pipelines, shared memory."""

from __future__ import annotations

import textwrap
from collections.abc import Callable

import pytest

from pk import errors
from pk.ir.types import DType, float16, int32
from tests.dsl.reading import refusal

HEAD = """
@pk.kernel
def k(a: pk.Global, b: pk.Global, c: pk.Parallel, x: pk.Global, i: pk.Global):
    inputs = pk.pipeline(2, a=pk.shared((128, 64), a.dtype), b=pk.shared((64, 128), b.dtype),
                         h=pk.shared((128, 64), x.dtype))
    output = pk.pipeline(2, c=pk.shared((128, 64), c.dtype), i=pk.shared((128, 64), i.dtype))
    seen = pk.signals(4, 4)
"""
DTYPE: dict[str, DType] = {"x": float16, "i": int32}


def fill(*lines: str) -> str:
    return _stage("loader", "inputs.fill", lines)


def drain(*lines: str) -> str:
    return _stage("storer", "output.drain", lines)


def compute(*lines: str) -> str:
    text = _stage("consumer", "inputs.drain", lines)
    return text.replace("    with inputs", "    acc = pk.zeros((128, 128))\n    with inputs").replace(
        "consumer()", "consumer(2)"
    )


def _stage(role: str, stage: str, lines: tuple[str, ...]) -> str:
    return f"with pk.{role}():\n    with {stage}() as s:\n" + textwrap.indent("\n".join(lines), " " * 8)


CASES: dict[str, tuple[type[errors.PkError], str]] = {
    "dtype_of_load": (errors.WrongDType, fill("pk.load_async(s.h, a, (0, 0))")),
    "dtype_of_store": (errors.WrongDType, drain("pk.store_async(c, s.i, (0, 0))")),
    "dtype_of_mma": (errors.WrongDType, compute("pk.mma(acc, s.h, s.b)")),
    "dtype_of_accumulator": (errors.WrongDType, compute("low = pk.cast(acc, pk.bfloat16)", "pk.mma(low, s.a, s.b)")),
    "dtype_of_arithmetic": (errors.WrongDType, compute("x = pk.cast(acc, pk.bfloat16) + 1.0")),
    "shape_of_mma": (errors.ShapeMismatch, compute("pk.mma(acc, s.a, s.b.T)")),
    "shape_of_arithmetic": (errors.ShapeMismatch, compute("x = acc + acc[:, 0:64]")),
    "shape_of_store": (errors.ShapeMismatch, """
        with pk.consumer(2):
            acc = pk.zeros((128, 128))
            with output.fill() as s:
                pk.store(s.c, acc)
        """),
    "rows_of_warpgroups": (
        errors.ShapeMismatch,
        compute("pk.mma(acc, s.a, s.b)", "x = pk.sum(acc, axis=0) + pk.zeros((32, 128))"),
    ),
    "columns_of_eight": (errors.ShapeMismatch, compute("x = acc[:, 0:12]")),
    "columns_outside": (errors.ShapeMismatch, compute("x = acc[:, 64:256]")),
    "mma_n": (errors.ShapeMismatch, """
        p = pk.pipeline(1, a=pk.shared((64, 64), a.dtype), b=pk.shared((64, 512), b.dtype))
        with pk.consumer():
            acc = pk.zeros((64, 512))
            with p.drain() as s:
                pk.mma(acc, s.a, s.b)
        """),
    "mma_k": (errors.ShapeMismatch, """
        p = pk.pipeline(1, a=pk.shared((64, 24), a.dtype), b=pk.shared((24, 64), b.dtype))
        with pk.consumer():
            acc = pk.zeros((64, 64))
            with p.drain() as s:
                pk.mma(acc, s.a, s.b)
        """),
    "mma_rows_of_32_bytes": (errors.ShapeMismatch, """
        p = pk.pipeline(1, a=pk.shared((64, 16), a.dtype), b=pk.shared((16, 24), b.dtype))
        with pk.consumer():
            acc = pk.zeros((64, 24))
            with p.drain() as s:
                pk.mma(acc, s.a, s.b)
        """),
    "tile_rows_of_16_bytes": (errors.WrongTileShape, "p = pk.pipeline(2, x=pk.shared((64, 12), a.dtype))"),
    "tile_of_three_dimensions": (errors.WrongTileShape, "p = pk.pipeline(2, x=pk.shared((2, 64, 64), a.dtype))"),
    "tile_too_large_for_tma": (errors.TileTooLarge, "p = pk.pipeline(2, x=pk.shared((64, 264), a.dtype))"),
    "role_of_mma": (errors.WrongRole, fill("pk.mma(3, s.a, s.b)")),
    "role_of_load_async": (errors.WrongRole, compute("pk.load_async(s.a, a, (0, 0))")),
    "role_of_shared_code": (errors.WrongRole, "pk.signal(seen, (0, 0), 0)\n" + fill("pk.load_async(s.a, a, (0, 0))")),
    "signal_of_loader": (errors.WrongRole, "with pk.loader():\n    pk.signal(seen, (0, 0), 0)"),
    "role_in_role": (errors.WrongRole, "with pk.loader():\n    with pk.storer():\n        pass"),
    "tasks_in_role": (errors.WrongRole, "with pk.loader():\n    for m in pk.tasks(3):\n        pass"),
    "tasks_in_tasks": (errors.WrongRole, "for m in pk.tasks(3):\n    for n in pk.tasks(3):\n        pass"),
    "store_of_storer": (
        errors.WrongRole, "with pk.storer():\n    with output.fill() as s:\n        pk.store(s.c, 0.0)"
    ),
    "stage_of_shared_code": (errors.WrongRole, "with output.fill() as s:\n    pass"),
    "communicator_in_communicator": (
        errors.WrongRole, "with pk.communicator(sms=1):\n    with pk.communicator(sms=1):\n        pass"
    ),
    "warpgroups_differ": (errors.WrongRole, "with pk.consumer(1):\n    pass\nwith pk.consumer(2):\n    pass"),
    "stage_released": (errors.WrongStage, fill("pass") + "\n    pk.load_async(s.a, a, (0, 0))"),
    "store_into_drain": (errors.WrongStage, compute("pk.store(s.a, acc[:, 0:64])")),
    "nested_stage": (errors.PipelineMisused, fill("with inputs.fill() as t:", "    pass")),
    "two_fillers": (errors.PipelineMisused, """
        with pk.loader():
            with output.fill() as s:
                pass
        with pk.consumer():
            with output.fill() as s:
                pass
        with pk.storer():
            for j in pk.range(2):
                with output.drain() as s:
                    pass
        """),
    "one_role_fills_and_drains": (errors.PipelineMisused, """
        with pk.consumer():
            with output.fill() as s:
                pass
            with output.drain() as s:
                pass
        """),
    "two_classes": (errors.PipelineMisused, """
        with pk.communicator(sms=1):
            with pk.loader():
                with inputs.fill() as s:
                    pass
        with pk.consumer():
            with inputs.drain() as s:
                pass
        """),
    "coordinate_too_short": (errors.WrongCoordinate, fill("pk.load_async(s.a, a, (0,))")),
    "index_too_long": (errors.WrongCoordinate, "with pk.storer():\n    pk.signal_all(seen, (0, 0, 0))"),
    "coordinate_of_floats": (errors.WrongOperand, fill("pk.load_async(s.a, a, (0.5, 0))")),
    "parallel_without_rank": (errors.WrongOperand, fill("pk.load_async(s.a, c, (0, 0))")),
    "transposed_copy": (errors.WrongOperand, fill("pk.load_async(s.a.T, a, (0, 0))")),
    "load_of_one_dimension": (errors.WrongOperand, """
        v = pk.pipeline(1, t=pk.shared((64,), a.dtype))
        for m in pk.tasks(4):
            with pk.loader():
                with v.fill() as s:
                    pk.load_async(s.t, a, (m, 0))
            with pk.consumer(1):
                with v.drain() as s:
                    r = pk.load(s.t)
    """),
    "other_of_a_stage": (errors.WrongOperand, compute("x = pk.load(s.a, other=1)")),
    "transpose_of_registers": (errors.UnknownName, compute("x = pk.load(s.a).T")),
    "transpose_of_a_stage": (errors.UnknownName, compute("x = pk.load(s.T)")),
    "tile_of_no_stage": (errors.WrongOperand, fill("pk.load_async(a, a, (0, 0))")),
    "accumulator_without_name": (errors.WrongOperand, compute("pk.mma(pk.zeros((128, 128)), s.a, s.b)")),
    "arithmetic_on_shared": (errors.WrongOperand, compute("x = acc + s.a")),
    "and_of_numbers": (errors.WrongDType, compute("x = acc & (acc < 1)")),
    "condition_on_tile": (errors.WrongOperand, compute("if acc:", "    pass")),
    "signals_that_are_none": (errors.WrongOperand, "with pk.storer():\n    pk.wait(a, (0, 0), 1)"),
    "fill_drain_unbalanced": (errors.Unbalanced, """
        for m in pk.tasks(a.rows):
            with pk.loader():
                for j in pk.range(pk.cdiv(a.cols, 64)):
                    with inputs.fill() as s:
                        pk.load_async(s.a, a, (m, j))
            with pk.consumer(2):
                for j in pk.range(a.cols // 64):
                    with inputs.drain() as s:
                        y = pk.load(s.a)
        """),
    "fill_drain_condition": (errors.Unbalanced, """
        for m in pk.tasks(a.rows):
            with pk.loader():
                if m != pk.rank():
                    with inputs.fill() as s:
                        pk.load_async(s.a, a, (m, 0))
            with pk.consumer(2):
                with inputs.drain() as s:
                    y = pk.load(s.a)
        """),
    "never_drained": (errors.Unbalanced, fill("pk.load_async(s.a, a, (0, 0))")),
    "helper_is_named": (errors.WrongCoordinate, fill("bring(s, a)")),
}  # fmt: skip

HELPER = """
@pk.function
def bring(s, x):
    pk.load_async(s.a, x, (0,))
"""


@pytest.mark.parametrize("name", CASES)
def test_refused(name: str, golden: Callable[[str, str], None]) -> None:
    kind, lines = CASES[name]
    source = HELPER + HEAD + textwrap.indent(textwrap.dedent(lines).strip("\n"), "    ")
    golden(f"errors/{name}.txt", refusal(kind, source, dtype=DTYPE))


BIG = """
@pk.kernel
def k(a: pk.Global, c: pk.Global, STAGES: pk.constexpr = 4, ROWS: pk.constexpr = 128):
    inputs = pk.pipeline(STAGES, a=pk.shared((ROWS, 64), a.dtype), b=pk.shared((64, 256), a.dtype))
    output = pk.pipeline(1, c=pk.shared((ROWS, 256), c.dtype))
    with pk.loader():
        with inputs.fill() as s:
            pass
    with pk.consumer():
        with inputs.drain() as s:
            pass
        with output.fill() as t:
            pass
    with pk.storer():
        with output.drain() as t:
            pass
"""


def test_shared_memory(golden: Callable[[str, str], None]) -> None:
    golden("errors/shared_memory.txt", refusal(errors.SharedMemoryExceeded, BIG))
    golden("errors/shared_memory_of_tiles.txt", refusal(errors.SharedMemoryExceeded, BIG, STAGES=1, ROWS=512))


def test_a_tile_lies_inside_its_tensor(golden: Callable[[str, str], None]) -> None:
    source = HEAD + textwrap.indent(fill("pk.load_async(s.a, a, (0,))"), "    ")
    golden("errors/tile_in_a_vector.txt", refusal(errors.WrongCoordinate, source, dtype=DTYPE, ndim={"a": 1}))

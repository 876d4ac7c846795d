"""Refused uses of mma and of private shared tiles: the class of the error, what it names and what it advises."""

from __future__ import annotations

import textwrap

import pytest

from pk import errors
from pk.ir.types import DType, float8_e4m3, float32
from tests.dsl.reading import read, refusal

TYPES: dict[str, DType] = {"f": float32, "e": float8_e4m3}


def kernel(*consumer: str, warpgroups: int = 1, top: tuple[str, ...] = ()) -> str:
    """A kernel with tiles of every kind whose consumer runs ``consumer`` while it holds stage ``s``."""
    body = textwrap.indent("\n".join(consumer), " " * 12)
    return f"""
@pk.kernel
def k(a: pk.Global, f: pk.Global, e: pk.Global):
    p = pk.pipeline(1, a=pk.shared((64, 64), a.dtype), f=pk.shared((64, 64), f.dtype), e=pk.shared((64, 64), e.dtype),
                    n=pk.shared((64, 8), a.dtype))
    tile = pk.shared((64, 64), a.dtype)
{textwrap.indent(chr(10).join(top), "    ")}
    for i in pk.tasks(a.rows):
        with pk.loader():
            with p.fill() as s:
                pk.load_async(s.a, a, (i, 0))
        with pk.consumer(warpgroups={warpgroups}):
            acc = pk.zeros(({64 * warpgroups}, 64))
            with p.drain() as s:
{textwrap.indent(body, "    ")}
"""


CASES: dict[str, tuple[type[errors.PkError], str, tuple[str, ...]]] = {
    "registers of 32 bits": (
        errors.WrongDType, kernel("pk.mma(acc, pk.load(s.a), s.a)"),
        ("pk.mma of a register tile of float32", "pk.cast(r, pk.bfloat16), or store it to a shared tile"),
    ),
    "mixed types": (errors.WrongDType, kernel("pk.mma(acc, s.a, s.e.T)"), ("multiplies bfloat16 by float8_e4m3",)),
    "registers of another type": (
        errors.WrongDType, kernel("pk.mma(acc, pk.cast(pk.load(s.a), pk.float16), s.a)"),
        ("multiplies float16 by bfloat16",),
    ),
    "8 bits across K on the right": (
        errors.WrongOperand, kernel("pk.mma(acc, s.e, s.e)"),
        ("reads `p.e` of float8_e4m3 across K", "Operands of 8 bits", "declare b as (N, K) and pass `s.b.T`"),
    ),
    "32 bits across K on the left": (
        errors.WrongOperand, kernel("pk.mma(acc, s.f.T, s.f.T)"),
        ("reads `p.f.T` of float32 across K", "declare a as (M, K) and pass `s.a`"),
    ),
    "short rows": (
        errors.ShapeMismatch, kernel("small = pk.zeros((64, 8))", "pk.mma(small, s.a, s.n)"),
        ("cannot read `p.n` of shape (64, 8)", "multiple of 16"),
    ),
    "accumulate at run time": (
        errors.NotConstant, kernel("pk.mma(acc, s.a, s.a, accumulate=i > 0)"), ("accumulate= is a run-time bool",),
    ),
    "too many registers": (
        errors.ShapeMismatch,
        kernel("big = pk.zeros((128, 256))", "pk.mma(big, wide, broad)",
               top=("wide = pk.shared((128, 64), a.dtype)", "broad = pk.shared((64, 256), a.dtype)")),
        ("an accumulator (128, 256) takes 256 registers a thread in 1 warpgroup", "use more warpgroups"),
    ),
    "N of three warpgroups": (
        errors.ShapeMismatch,
        kernel("big = pk.zeros((192, 200))", "pk.mma(big, wide, broad.T)", warpgroups=3,
               top=("wide = pk.shared((192, 64), a.dtype)", "broad = pk.shared((200, 64), a.dtype)")),
        ("N = 200 takes more registers than a block of 3 warpgroups begins with", "Make N at most 192"),
    ),
    "private tile of a loader": (
        errors.WrongRole, kernel("pass").replace("pk.load_async(s.a,", "pk.load_async(tile,"),
        ("the shared tile `tile` is used in a loader", "private to the consumer"),
    ),
    "declared in a role": (
        errors.WrongDeclaration, kernel("own = pk.shared((64, 64), a.dtype)"), ("pk.shared inside a role",),
    ),
    "private tile and ping-pong": (
        errors.WrongRole,
        kernel("pk.store(tile, acc)").replace("warpgroups=1", "warpgroups=2, pingpong=True"),
        ("a pingpong consumer uses a shared tile outside a pipeline", "drop pingpong="),
    ),
    "shared memory": (
        errors.SharedMemoryExceeded,
        kernel("pk.mma(acc, s.a, wide)", "pk.mma(acc, s.a, more)",
               top=("wide = pk.shared((64, 64), a.dtype)", "more = pk.shared((64, 64), a.dtype)"))
        .replace("pk.pipeline(1,", "pk.pipeline(8,"),
        ("the pipelines and tiles of the compute class need", "wide: 8,192 bytes", "Give `p` 7 stages"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_refused(name: str) -> None:
    kind, source, parts = CASES[name]
    message = refusal(kind, source, dtype=TYPES)
    for part in parts:
        assert part in message, message


def test_unused_private_tiles_take_no_memory() -> None:
    assert read(kernel("pk.mma(acc, s.a, s.a)"), dtype=TYPES).shared == ()
    used = read(kernel("pk.store(tile, acc)", "pk.mma(acc, tile, s.a.T)"), dtype=TYPES)
    assert [(t.name, t.owner) for t in used.shared] == [("tile", "compute")]

"""Mistakes with index vectors are refused in the user's words, by the front end and by the checks of the IR."""

from __future__ import annotations

import re
import textwrap
from dataclasses import replace

import pytest

from pk import errors
from pk.ir import nodes as ir
from pk.ir.check import check
from pk.ir.types import float32, int32
from tests.dsl.reading import read, refusal

HEAD = """
@pk.kernel
def k(x: pk.Global, p: pk.Parallel, i: pk.Global, f: pk.Global, c: pk.Parallel):
    ring = pk.pipeline(2, x=pk.shared((32, 64), x.dtype), wide=pk.shared((64, 64), x.dtype),
                       n=pk.shared((32, 64), f.dtype))
    seen = pk.signals(4, 4)
    me = pk.rank()
"""
DTYPES = {"i": int32, "f": float32, "c": int32}
NDIM = {"i": 1, "f": 1, "c": 1}


def _with(lines: str) -> str:
    return HEAD + textwrap.indent(textwrap.dedent(lines).strip("\n"), "    ")


def gather(line: str) -> str:
    return f"v = pk.load(i, 0, (32,))\nwith pk.loader():\n    with ring.fill() as s:\n        {line}\n"


def scatter(line: str) -> str:
    return (
        "with pk.loader():\n    with ring.fill() as s:\n        pass\n"
        f"v = pk.load(i, 0, (32,))\nwith pk.storer():\n    with ring.drain() as s:\n        {line}\n"
    )


CASES: dict[str, tuple[type[errors.PkError], str, str]] = {
    "rows_of_the_tile": (errors.ShapeMismatch, gather("pk.gather_async(s.wide, x, v)"), "64 rows with .* 32 elements"),
    "dtype_of_the_tile": (errors.WrongDType, gather("pk.gather_async(s.n, x, v)"), "does not convert"),
    "rows_are_one_number": (errors.WrongOperand, gather("pk.gather_async(s.x, x, 3)"), "index vector"),
    "whose_copy": (errors.WrongOperand, gather("pk.gather_async(s.x, p, v)"), "which rank's copy of `p`"),
    "whose_copy_twice": (errors.WrongOperand, scatter("pk.scatter_async(p[me], s.x, v, rank=v)"), "names a rank twice"),
    "rank_of_a_global": (
        errors.WrongOperand,
        scatter("pk.scatter_async(x, s.x, v, rank=v)"),
        "exists on this rank only",
    ),
    "one_dimension": (errors.WrongCoordinate, gather("pk.gather_async(s.x, i, v)"), "a view of two"),
    "gather_in_a_storer": (errors.WrongRole, scatter("pk.gather_async(s.x, x, v)"), "pk.gather_async may not stand"),
    "too_many_lanes": (errors.WrongTileShape, "v = pk.load(i, 0, (129,))", "1 to 128"),
    "floats_in_a_vector": (errors.WrongDType, "v = pk.load(f, 0, (32,))", "int32"),
    "masks_as_rows": (errors.WrongDType, gather("pk.gather_async(s.x, x, v < 3)"), "pk.where"),
    "vectors_of_two_lengths": (
        errors.ShapeMismatch,
        "with pk.storer():\n    pk.signal(seen, (pk.iota((8,)), pk.iota((16,))), me)",
        "8 and of 16",
    ),
    "signal_in_a_loader": (
        errors.WrongRole,
        "with pk.loader():\n    pk.signal(seen, (pk.iota((8,)), 0), me)",
        "drains",
    ),
    "fetch_add_in_shared_code": (
        errors.WrongRole,
        "n = pk.fetch_add(seen, (0, 0), 1)\nwith pk.loader():\n    pk.wait(seen, (0, 0), n)",
        "shared code",
    ),
    "tile_of_two_kinds": (
        errors.WrongOperand,
        gather("pk.gather_async(s.x, x, v)\n        pk.load_async(s.x, x, (0, 0))"),
        "another layout",
    ),
    "entries_of_a_coordinate": (errors.WrongCoordinate, "v = pk.load(i, (0, pk.iota((8,))))", "2 entries"),
    "elements_of_every_rank": (errors.WrongOperand, "v = pk.load(c, 0, (32,))", "which rank's copy"),
}


@pytest.mark.parametrize("name", CASES)
def test_refused(name: str) -> None:
    kind, lines, words = CASES[name]
    message = refusal(kind, _with(lines), ndim=NDIM, dtype=DTYPES)
    assert re.search(words, message), message
    assert "^" in message or "line" in message  # shows the place


def test_a_gathered_tile_may_not_feed_the_tensor_core() -> None:
    lines = """
    with pk.loader():
        with ring.fill() as s:
            pk.gather_async(s.wide, x, pk.iota((64,)))
    with pk.consumer():
        acc = pk.zeros((64, 64))
        with ring.drain() as s:
            pk.mma(acc, s.wide, s.wide)
    """
    message = refusal(errors.WrongOperand, _with(lines), ndim=NDIM, dtype=DTYPES)
    assert "`ring.wide` is used by pk.mma, and by pk.gather_async at line" in message


def test_the_checks_know_the_rules_too() -> None:
    drained = "with pk.storer():\n    with ring.drain() as s:\n        pass"
    kernel = read(_with(gather("pk.gather_async(s.x, x, v)") + drained), ndim=NDIM, dtype=DTYPES)
    ring = kernel.pipelines[0]
    assert ring.by_rows == {"x"}
    with pytest.raises(errors.WrongDeclaration, match="copied by rows"):
        check(replace(kernel, pipelines=(replace(ring, by_rows=frozenset()),)))


def test_vectors_stay_vectors_in_the_text() -> None:
    kernel = read(
        _with(scatter("pk.scatter_async(p, s.x, pk.where(v < 0, -1, v // 2), rank=v % 2)")), ndim=NDIM, dtype=DTYPES
    )
    do = next(s for s in _all(kernel.compute) if isinstance(s, ir.Do))
    window = do.operands[0]
    assert isinstance(window, ir.Memory) and window.rank is not None
    assert str(window.coord[0].type) == str(window.rank.type) == "register[32 int32]"


def _all(block: ir.Block) -> list[ir.Statement]:
    from pk.ir.split import statements

    return list(statements(block))

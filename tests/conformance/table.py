"""The table of coverage, ``docs/conformance.md``: from ``ir.ops.TABLE`` and what the kernels of the cases contain.

``SENSIBLE`` says which cells make sense.  An operation that it does not know, and a cell that makes sense and is empty,
fail the tests.
"""

from __future__ import annotations

import functools
import inspect
from collections import defaultdict
from collections.abc import Iterable

import pk.dsl.language as language
from pk.ir import ops
from tests.conformance.case import WORLDS, Within
from tests.conformance.cases import CASES
from tests.conformance.coverage import COUNTERS, Use, called, uses
from tests.conformance.random_programs import COUNT

FLOATS = ("bfloat16", "float16", "float8_e4m3", "float8_e5m2", "float32")
DTYPES = (*FLOATS, "int32")
COLUMNS = (*DTYPES, "bool")
NARROW = ("bfloat16", "float16")
REAL = ("float32",)
ADDED = (*NARROW, "float32")
ANY = ("float32", "int32")
INT = (COUNTERS,)
BOOL = ("bool",)

# Which dtypes an operation is for.  Operations on register tiles compute in float32 and int32.
SENSIBLE: dict[str, tuple[str, ...]] = {
    "load_async": DTYPES, "store_async": DTYPES, "store_add_async": ADDED,
    "load": DTYPES, "store": DTYPES, "full": ANY, "columns": ANY, "cast": DTYPES,
    "mma": (*NARROW, "float8_e4m3", "float8_e5m2", "float32"),
    "signal": INT, "signal_all": INT, "wait": INT, "barrier": INT,
    "gather_async": DTYPES, "scatter_async": DTYPES, "load_elements": INT, "store_elements": INT, "signal_each": INT,
    "wait_each": INT, "fetch_add": INT,
    "iota": INT, "where": ANY, "fma": REAL, "exp2": REAL, "exp": REAL, "log2": REAL, "log": REAL, "sqrt": REAL,
    "rsqrt": REAL, "tanh": REAL, "sigmoid": REAL, "silu": REAL, "gelu": REAL, "sum": ANY, "max": ANY, "min": ANY,
    "load_global": DTYPES, "store_global": DTYPES, "load_scalar": DTYPES, "store_scalar": DTYPES,
    "reduce": ADDED, "all_reduce": ADDED, "while": INT,
    "tile +": ANY, "tile -": ANY, "tile *": ANY, "tile /": REAL, "tile //": INT, "tile %": INT, "tile min": ANY,
    "tile max": ANY, "tile abs": ANY, "tile <": ANY, "tile <=": ANY, "tile >": ANY, "tile >=": ANY, "tile ==": ANY,
    "tile !=": ANY, "tile and": BOOL, "tile or": BOOL, "tile not": BOOL,
}  # fmt: skip

# Operations that reach other ranks: every world size has to be there.
REMOTE = ("load_async", "store_async", "store_add_async", "signal", "signal_all", "wait", "barrier", "gather_async",
          "scatter_async", "store_elements", "signal_each", "wait_each", "load_scalar", "store_scalar", "reduce",
          "all_reduce")  # fmt: skip

# Dimensions of the tensor and whose copy it is, for operations on tensors.
LOADS, STORES = ("own", "one rank"), ("own", "one rank", "everyone")
WINDOWS: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "load_async": ((1, 2, 3, 4), LOADS),
    "store_async": ((1, 2, 3, 4), STORES),
    "store_add_async": ((1, 2, 3, 4), STORES),
    "load_global": ((2, 3, 4), LOADS),
    "store_global": ((2, 3, 4), STORES),
    "load_scalar": ((1, 2, 3, 4), LOADS),
    "store_scalar": ((1, 2, 3, 4), STORES),
    "reduce": ((1, 2, 3, 4), STORES),
    "all_reduce": ((1, 2, 3, 4), ("everyone",)),
    "gather_async": ((2,), LOADS),
    "scatter_async": ((2,), LOADS),
}

# Tiles that operations of shared tiles and windows are tried with, at least.
TILES: dict[str, tuple[tuple[int, ...], ...]] = {
    "load_async": ((16, 16), (64, 64), (128, 128), (256, 256), (256, 16), (16, 256), (64,), (256,)),
    "store_async": ((16, 16), (64, 64), (128, 128), (256, 256), (256, 16), (16, 256), (64,), (256,)),
    "store_add_async": ((16, 16), (32, 64), (256, 128), (128,)),
    "load_global": ((16, 16), (64, 64), (128, 128), (256, 16), (1, 256)),
    "store_global": ((16, 16), (64, 64), (128, 128), (256, 16), (1, 256)),
    "reduce": ((16, 16), (64, 64), (128, 128), (256, 256), (1, 2048), (256,)),
    "all_reduce": ((16, 16), (64, 64), (128, 128), (256, 256), (1, 2048), (256,)),
}

ROLES = ("loader", "consumer", "storer", "team", "shared")
NOT_CALLED = ("Function", "Global", "Parallel", "constexpr")  # annotations and classes


@functools.cache
def by_case() -> dict[str, frozenset[Use]]:
    """What each case uses."""
    return {name: uses(case.ir()) for name, case in CASES.items()}


@functools.cache
def cases_of_functions() -> dict[str, int]:
    """How many cases call each documented function of the language."""
    count: dict[str, int] = dict.fromkeys(functions(), 0)
    for case in CASES.values():
        for name in called(case.kernel.fn) & count.keys():
            count[name] += 1
    return count


def functions() -> list[str]:
    """The documented functions of ``pk.dsl.language``."""
    names = [n for n in language.__all__ if n not in NOT_CALLED]
    return sorted(n for n in names if inspect.isfunction(getattr(language, n)))


def operations() -> list[str]:
    """Rows of the table: those of ``ir.ops.TABLE``, then arithmetic on tiles."""
    seen = {use.op for used in by_case().values() for use in used}
    return [*ops.TABLE, *sorted(op for op in seen | SENSIBLE.keys() if op not in ops.TABLE)]


def _worlds(op: str, dtype: str) -> tuple[int, list[int]]:
    """How many cases have ``op`` on ``dtype``, and in which worlds they run."""
    names = [n for n, used in by_case().items() if any((u.op, u.dtype) == (op, dtype) for u in used)]
    return len(names), sorted({w for n in names for w in CASES[n].worlds})


def _count(**wanted: object) -> int:
    """Cases with a use that has these fields."""
    return sum(any(all(getattr(use, k) == v for k, v in wanted.items()) for use in used) for used in by_case().values())


# ------------------------------------------------------------------------------------------------------ what is missing
def unknown() -> list[str]:
    """Operations that ``SENSIBLE`` does not say anything about."""
    return [op for op in operations() if op not in SENSIBLE]


def empty() -> list[str]:
    """Cells that make sense and have no case."""
    missing = []
    for op, dtypes in SENSIBLE.items():
        for dtype in dtypes:
            count, worlds = _worlds(op, dtype)
            absent = [w for w in WORLDS if w not in worlds] if op in REMOTE else []
            missing += [f"{op} of {dtype}"] if not count else [f"{op} of {dtype}, world {w}" for w in absent]
    for op, row in ops.TABLE.items():
        missing += [f"{op} in {role}" for role in ROLES if role in row.roles and not _count(op=op, role=role)]
    for op, (ndims, places) in WINDOWS.items():
        missing += [f"{op} in {n} dimensions" for n in ndims if not _count(op=op, ndim=n)]
        missing += [f"{op} of the copy of {where}" for where in places if not _count(op=op, where=where)]
    for op, tiles in TILES.items():
        missing += [f"{op} of a tile {tile}" for tile in tiles if not _count(op=op, tile=tile)]
    return missing + [f"pk.{name}" for name, count in cases_of_functions().items() if not count]


# ------------------------------------------------------------------------------------------------------------ text
def _row(cells: Iterable[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _table(head: list[str], rows: list[list[object]]) -> list[str]:
    return [_row(head), _row("---" for _ in head), *map(_row, rows), ""]


def _cell(op: str, dtype: str) -> str:
    count, worlds = _worlds(op, dtype)
    if not count:
        return "**empty**" if dtype in SENSIBLE.get(op, ()) else ""
    return f"{count} ({' '.join(map(str, worlds))})"


def _or_empty(count: int, sensible: bool) -> object:
    return count or ("**empty**" if sensible else "")


def text() -> str:
    """``docs/conformance.md``."""
    lines = [
        "# Conformance",
        "",
        "Generated from `pk/ir/ops.py` and the cases of `tests/conformance`; do not edit.  "
        "Rewrite it with `pytest tests/conformance/test_table.py --update-golden`.",
        "",
        f"{len(CASES)} cases, each a small kernel with its meaning in NumPy.  What a case covers is read from the IR "
        "of its kernel.  `./check` runs all of them on the simulator under several schedules; `./check gpu` runs the "
        "same cases on a GPU, against NumPy and against the simulator: bit for bit where the order of operations is "
        "defined, within a stated bound elsewhere.  How many of them are exact: see the end.",
        "",
        f"Beside the cases there are {COUNT} random programs (`tests/conformance/random_programs.py`): one to four "
        "phases that compute, multiply, copy, exchange, fold and reduce, with signals and waits between ranks, each "
        "with its meaning in NumPy, all exact.  The default test run takes a sample of them, `CONFORMANCE=full` and "
        "the GPU run all.",
        "",
        "## Operations and dtypes",
        "",
        "Number of cases, and in brackets the world sizes they run in.  A blank cell makes no sense: the operation "
        "does not take the dtype.  `tile +` and its like are arithmetic on register tiles.",
        "",
        *_table(["operation", *COLUMNS], [[f"`{op}`", *(_cell(op, d) for d in COLUMNS)] for op in operations()]),
        "## Operations and roles",
        "",
        "Number of cases.  `shared` is code outside role blocks, `team` a class of blocks without role blocks.",
        "",
        *_table(
            ["operation", *ROLES],
            [
                [f"`{op}`", *(_or_empty(_count(op=op, role=r), r in row.roles) for r in ROLES)]
                for op, row in ops.TABLE.items()
            ],
        ),
        "## Tensors",
        "",
        "Cases by the number of dimensions of the tensor, and by whose copy of it is read or written.",
        "",
        *_table(
            ["operation", "1-D", "2-D", "3-D", "4-D", "own", "one rank", "everyone"],
            [
                [
                    f"`{op}`",
                    *(_or_empty(_count(op=op, ndim=n), n in ndims) for n in (1, 2, 3, 4)),
                    *(_or_empty(_count(op=op, where=w), w in places) for w in STORES),
                ]
                for op, (ndims, places) in WINDOWS.items()
            ],
        ),
        "## Tiles",
        "",
        *_table(["operation", "tiles"], [[f"`{op}`", _tiles(op)] for op in operations() if _tiles(op)]),
        "## Functions of the language",
        "",
        "Cases whose kernels, or the helpers they call, use the function.",
        "",
        *_table(["function", "cases"], [[f"`pk.{n}`", c or "**empty**"] for n, c in cases_of_functions().items()]),
        "## Exactness",
        "",
        _exactness(),
        "",
    ]
    return "\n".join(lines)


def _tiles(op: str) -> str:
    shapes = sorted({u.tile for used in by_case().values() for u in used if u.op == op and u.tile})
    return ", ".join("x".join(map(str, shape)) for shape in shapes)


def _exactness() -> str:
    groups: dict[bool, set[str]] = defaultdict(set)
    for name, case in CASES.items():
        wanted = case.meaning(case.arguments(case.worlds[0]))[0]
        groups[not any(isinstance(w, Within) for w in wanted.values())].add(name)
    bounded = sorted({name.split(".")[0] for name in groups[False]})
    return (
        f"{len(groups[True])} cases are exact: simulator and GPU must give NumPy's bits.  {len(groups[False])} have a "
        f"bound, because the order of their additions is not defined or a function is approximated: cases of "
        f"{', '.join(f'`{b}`' for b in bounded)}."
    )

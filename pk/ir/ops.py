"""The op table: one row an operation.  Imports nothing of pk but the types.

Two more tables have exactly these keys, and ``tests/test_op_table.py`` holds them together:
``pk.sim.ops.MEANING`` (one function a row: what the op does to arrays; that is the definition) and the
macros of ``pk/codegen/templates/ops/*.j2`` (the CUDA it becomes).  To add an operation: one row here,
one function there, one macro, one conformance test, and the documented function of ``pk.dsl.language`` that the user
calls.

Operand kinds: ``shared`` a shared tile, ``register`` a register-tile expression, ``memory`` a window of a
tensor, ``signal`` one counter, ``scalar`` a scalar expression.
"""

from __future__ import annotations

from dataclasses import dataclass

ALL = frozenset({"loader", "consumer", "storer", "team", "shared"})


@dataclass(frozen=True, slots=True)
class Op:
    """A row.

    ``roles``: where the op may stand (``shared`` is code outside role blocks).  ``within``: the kind of
    stage it must stand in, if any.  ``reads``, ``writes``: positions of the operands it reads and
    writes.  ``asynchronous``: its effect on memory completes later.  ``result``: it yields a value.
    """

    name: str
    operands: tuple[str, ...]
    roles: frozenset[str]
    summary: str
    within: str | None = None
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    asynchronous: bool = False
    result: bool = False
    attrs: tuple[str, ...] = ()


def _rows(*rows: Op) -> dict[str, Op]:
    return {row.name: row for row in rows}


LOADER, CONSUMER, STORER = frozenset({"loader"}), frozenset({"consumer"}), frozenset({"storer"})

TABLE: dict[str, Op] = _rows(
    # -- moving tiles ---------------------------------------------------------------------------------
    Op(
        "load_async",
        ("shared", "memory"),
        LOADER,
        "tensor -> stage; outside the tensor reads 0",
        within="fill",
        reads=(1,),
        writes=(0,),
        asynchronous=True,
    ),
    Op(
        "store_async",
        ("memory", "shared"),
        STORER,
        "stage -> tensor of one rank or of all; outside the tensor drops",
        within="drain",
        reads=(1,),
        writes=(0,),
        asynchronous=True,
    ),
    Op(
        "store_add_async",
        ("memory", "shared"),
        STORER,
        "stage added to the tensor, element by element, atomically",
        within="drain",
        reads=(1,),
        writes=(0,),
        asynchronous=True,
    ),
    Op("load", ("shared",), CONSUMER, "stage -> registers; 16-bit types widen to float32", reads=(0,), result=True),
    Op(
        "store",
        ("shared", "register"),
        CONSUMER,
        "registers -> stage, cast to the stage's dtype",
        within="fill",
        reads=(1,),
        writes=(0,),
    ),
    # -- register tiles -------------------------------------------------------------------------------
    Op("full", (), CONSUMER, "a register tile of one value", result=True, attrs=("value",)),
    Op(
        "columns",
        ("register",),
        CONSUMER,
        "columns start..stop of a register tile",
        reads=(0,),
        result=True,
        attrs=("start", "stop"),
    ),
    Op("cast", ("register",), CONSUMER, "the same values in another dtype", reads=(0,), result=True),
    Op(
        "mma",
        ("register", "shared", "shared"),
        CONSUMER,
        "acc += a @ b, float32 accumulation, in place",
        reads=(0, 1, 2),
        writes=(0,),
    ),
    # -- signals --------------------------------------------------------------------------------------
    Op(
        "signal",
        ("signal", "scalar", "scalar"),
        frozenset({"consumer", "storer", "team"}),
        "add operand 2 to the counter of rank operand 1, after every earlier store of this role",
        reads=(1, 2),
        writes=(0,),
    ),
    Op(
        "signal_all",
        ("signal", "scalar"),
        frozenset({"consumer", "storer", "team"}),
        "add operand 1 to the counter of every rank, after every earlier store of this role",
        reads=(1,),
        writes=(0,),
    ),
    Op(
        "wait",
        ("signal", "scalar"),
        ALL,
        "until my counter is at least operand 1; acquires for all that follows",
        reads=(0, 1),
    ),
    Op(
        "barrier",
        ("signal",),
        frozenset({"consumer", "storer", "team"}),
        "signal_all, then wait for world_size",
        reads=(0,),
        writes=(0,),
    ),
)

"""The op table: one row an operation.  Imports nothing of pk but the types.

Two more tables have exactly these keys, and ``tests/test_op_table.py`` holds them together:
``pk.sim.ops.MEANING`` (one function a row: what the op does to arrays; that is the definition) and the
macros of ``pk/codegen/templates/ops/*.j2`` (the CUDA it becomes).  To add an operation: one row here,
one function there, one macro, one conformance test, and the documented function of ``pk.dsl.language`` that the user
calls.

Operand kinds: ``shared`` a shared tile, ``register`` a register-tile expression, ``memory`` a window of a
tensor, ``signal`` one counter, ``factor`` a shared tile or a register-tile expression, ``scalar`` a scalar expression.
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
COMPUTE = frozenset({"consumer", "team"})  # roles of several warps: they hold register tiles

TABLE: dict[str, Op] = _rows(
    # -- moving tiles ---------------------------------------------------------------------------------
    Op(
        "load_async",
        ("shared", "memory"),
        LOADER | STORER,
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
    Op("full", (), COMPUTE, "a register tile of one value", result=True, attrs=("value",)),
    Op("iota", (), COMPUTE, "0, 1, ... along the vector (R, 1) or (1, C), int32", result=True),
    Op(
        "columns",
        ("register",),
        COMPUTE,
        "columns start..stop of a register tile",
        reads=(0,),
        result=True,
        attrs=("start", "stop"),
    ),
    Op("cast", ("register",), COMPUTE, "the same values in another dtype", reads=(0,), result=True),
    Op(
        "where",
        ("register", "value", "value"),
        COMPUTE,
        "operand 1 where operand 0 holds, else operand 2",
        reads=(0, 1, 2),
        result=True,
    ),
    Op("fma", ("value", "value", "value"), COMPUTE, "x * y + z, rounded once", reads=(0, 1, 2), result=True),
    Op("exp2", ("value",), ALL, "2 ** x", reads=(0,), result=True),
    Op("exp", ("value",), ALL, "e ** x", reads=(0,), result=True),
    Op("log2", ("value",), ALL, "logarithm to base 2", reads=(0,), result=True),
    Op("log", ("value",), ALL, "natural logarithm", reads=(0,), result=True),
    Op("sqrt", ("value",), ALL, "square root", reads=(0,), result=True),
    Op("rsqrt", ("value",), ALL, "1 / square root", reads=(0,), result=True),
    Op("tanh", ("value",), ALL, "hyperbolic tangent", reads=(0,), result=True),
    Op("sigmoid", ("value",), ALL, "1 / (1 + e ** -x)", reads=(0,), result=True),
    Op("silu", ("value",), ALL, "x * sigmoid(x)", reads=(0,), result=True),
    Op("gelu", ("value",), ALL, "x * Phi(x), exact or by tanh", reads=(0,), result=True, attrs=("approximate",)),
    Op(
        "sum",
        ("register",),
        COMPUTE,
        "sum along an axis, which stays with extent 1",
        reads=(0,),
        result=True,
        attrs=("axis",),
    ),
    Op(
        "max",
        ("register",),
        COMPUTE,
        "greatest along an axis, which stays with extent 1",
        reads=(0,),
        result=True,
        attrs=("axis",),
    ),
    Op(
        "min",
        ("register",),
        COMPUTE,
        "least along an axis, which stays with extent 1",
        reads=(0,),
        result=True,
        attrs=("axis",),
    ),
    # -- registers <-> tensors ------------------------------------------------------------------------
    Op(
        "load_global",
        ("memory", "scalar"),
        COMPUTE,
        "tensor -> register tile; operand 1 outside the tensor; narrow floats widen to float32",
        reads=(0, 1),
        result=True,
    ),
    Op(
        "store_global",
        ("memory", "register", "scalar"),
        COMPUTE,
        "the first (operand 2) rows of a register tile -> tensor of one rank or of all, cast to its dtype",
        reads=(1, 2),
        writes=(0,),
    ),
    Op(
        "load_scalar",
        ("memory",),
        ALL,
        "one element; narrow floats widen to float32; 0 outside",
        reads=(0,),
        result=True,
    ),
    Op(
        "store_scalar",
        ("memory", "scalar"),
        frozenset({"consumer", "storer", "team"}),
        "one element of the tensor of one rank or of all := the scalar, cast to its dtype",
        reads=(1,),
        writes=(0,),
    ),
    # -- all ranks' copies of a window ----------------------------------------------------------------
    Op(
        "reduce",
        ("memory", "memory"),
        COMPUTE,
        "the sum (min, max) of every rank's window of operand 1, in rank order in float32 -> one window",
        reads=(1,),
        writes=(0,),
        attrs=("shape", "op"),
    ),
    Op(
        "all_reduce",
        ("memory",),
        COMPUTE,
        "every rank's window := the sum (min, max) of all of them, in rank order in float32",
        reads=(0,),
        writes=(0,),
        attrs=("shape", "op"),
    ),
    # -- the tensor core ------------------------------------------------------------------------------
    Op(
        "mma",
        ("register", "factor", "shared"),
        CONSUMER,
        "acc += a @ b (accumulate=False: acc = a @ b), float32 accumulation, in place",
        reads=(0, 1, 2),
        writes=(0,),
        attrs=("accumulate",),
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
    # -- index vectors: one row, element or counter a lane ---------------------------------------------
    Op(
        "gather_async",
        ("shared", "memory"),
        LOADER,
        "rows of a tensor, each from where its lane says -> stage; outside the tensor reads 0",
        within="fill",
        reads=(1,),
        writes=(0,),
        asynchronous=True,
    ),
    Op(
        "scatter_async",
        ("memory", "shared"),
        STORER,
        "stage -> rows of a tensor, each to where its lane says; outside the tensor drops",
        within="drain",
        reads=(1,),
        writes=(0,),
        asynchronous=True,
    ),
    Op(
        "load_elements",
        ("memory",),
        ALL,
        "an index vector: one element a lane, `other` outside the tensor",
        reads=(0,),
        result=True,
        attrs=("other",),
    ),
    Op(
        "store_elements",
        ("memory", "value"),
        frozenset({"consumer", "storer", "team"}),
        "one element a lane; outside the tensor drops",
        reads=(1,),
        writes=(0,),
    ),
    Op(
        "signal_each",
        ("signal", "value", "value"),
        frozenset({"consumer", "storer", "team"}),
        "add operand 2 to the counter of rank operand 1, one a lane, after every earlier store of this role",
        reads=(1, 2),
        writes=(0,),
    ),
    Op(
        "wait_each",
        ("signal", "value"),
        ALL,
        "until each of my counters is at least operand 1, one a lane",
        reads=(0, 1),
    ),
    Op(
        "fetch_add",
        ("signal", "scalar"),
        ALL - {"shared"},
        "add operand 1 to my counter, after every earlier store of this role: the value before",
        reads=(0, 1),
        writes=(0,),
        result=True,
    ),
)

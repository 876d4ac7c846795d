"""The checks stand on their own: kernels built by hand that break a rule are refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pk import errors
from pk.ir import nodes as ir
from pk.ir.check import check
from pk.ir.text import text
from pk.ir.types import BOOL, FLOAT, INT, Tile, bfloat16, float32, int32

M, ZERO, ONE = ir.Var("m", INT), ir.const(0), ir.const(1)
STAGE = Tile((128, 64), bfloat16, "shared")
WIDE = Tile((64, 128), bfloat16, "shared")
ACC = ir.Var("acc", Tile((128, 128), float32, "register"))
S_A, S_B, S_C = ir.Shared("p", "a", STAGE), ir.Shared("p", "b", WIDE), ir.Shared("q", "c", STAGE)
LOAD = ir.Do("load_async", (S_A, ir.Memory("x", (ZERO, M))))
MMA = ir.Do("mma", (ACC, S_A, S_B))
FULL = ir.Call("full", (), ACC.type, (("value", 0.0),))
PIECE = ir.Call("columns", (ACC,), Tile((128, 64), float32, "register"), (("start", 0), ("stop", 64)))
STORE = ir.Do("store_async", (ir.Memory("y", (M, ZERO), ir.Rank()), S_C))
SIGNAL = ir.Do("signal", (ir.Signal("s", (M,)), ir.Rank(), ONE))


def kernel(
    fill: ir.Block = (LOAD,),
    drain: ir.Block = (MMA,),
    output: ir.Block = (STORE,),
    before: ir.Block = (),
    role: ir.RoleKind = "consumer",
    warpgroups: int = 2,
    end: ir.Block = (SIGNAL,),
) -> ir.Kernel:
    """A kernel that is right as it stands: load, mma, store a piece, signal."""
    body: ir.Block = (
        *before,
        ir.Role("loader", (ir.Stage("p", "fill", fill),)),
        ir.Role(
            role,
            (
                ir.Assign(ACC, FULL),
                ir.Stage("p", "drain", drain),
                ir.Stage("q", "fill", (ir.Do("store", (S_C, PIECE)),)),
            ),
            warpgroups,
        ),
        ir.Role("storer", (ir.Stage("q", "drain", output), *end)),
    )
    return ir.Kernel(
        "hand", (ir.Tensor("x", "global", bfloat16, 2), ir.Tensor("y", "parallel", bfloat16, 2)),
        (ir.Param("n", INT),), (ir.Signals("s", (ir.World(),)),), (),
        (ir.Pipeline("p", 2, (("a", STAGE), ("b", WIDE))), ir.Pipeline("q", 1, (("c", STAGE),))),
        (ir.Assign(ir.Var("half", INT), ir.Binary("//", ir.Dim("x", 0), ir.const(2), INT)),),
        (ir.Tasks((M,), (ir.Var("half", INT),), body),),
    )  # fmt: skip


def test_the_kernel_is_right() -> None:
    check(kernel())
    assert text(kernel()) == (
        "kernel hand(x: global bfloat16 2-d, y: parallel bfloat16 2-d, n: int32)\n"
        "  pipeline p = 2 x (a=128x64 bfloat16, b=64x128 bfloat16), compute\n"
        "  pipeline q = 1 x (c=128x64 bfloat16), compute\n"
        "  signals s[world]\n"
        "  half: int32 = x.rows // 2\n"
        "  compute:\n"
        "    for m in tasks(half, group=8):\n"
        "      with loader():\n"
        "        with p.fill():\n"
        "          load_async(p.a, x[0, m])\n"
        "      with consumer(warpgroups=2):\n"
        "        acc: register[128x128 float32] = full(value=0.0)\n"
        "        with p.drain():\n"
        "          mma(acc, p.a, p.b)\n"
        "        with q.fill():\n"
        "          store(q.c, columns(acc, start=0, stop=64))\n"
        "      with storer():\n"
        "        with q.drain():\n"
        "          store_async(y@rank[m, 0], q.c)\n"
        "        signal(s[m], rank, 1)\n"
    )


def load(**changes: object) -> ir.Kernel:
    """The kernel with another window loaded."""
    return kernel(fill=(ir.Do("load_async", (S_A, replace(LOAD.operands[1], **changes))),))  # type: ignore[type-var,arg-type]


BAD: list[tuple[str, type[errors.CompileError], ir.Kernel, str]] = [
    ("undefined name", errors.NameOutOfScope, load(coord=(ZERO, ir.Var("k", INT))), "`k` has no value here"),
    ("float coordinate", errors.WrongOperand, load(coord=(ZERO, ir.const(0.5))),
     "an entry of the coordinate of `x` is float32"),
    ("coordinate too short", errors.WrongCoordinate, load(coord=(ZERO,)),
     "the coordinate of `x` has 1 entries, and it has 2 dimensions"),
    ("rank of a Global", errors.WrongOperand, load(rank=ZERO), "`x` is a Global: it exists on this rank only"),
    ("no rank of a Parallel", errors.WrongOperand, load(tensor="y"),
     "pk.load_async does not say which rank's copy of `y`"),
    ("unknown tensor", errors.UnknownName, load(tensor="z"), "unknown tensor `z`"),
    ("wrong dtype", errors.WrongDType, replace(kernel(), tensors=(
        ir.Tensor("x", "global", float32, 2), ir.Tensor("y", "parallel", bfloat16, 2))),
     "pk.load_async between `p.a` of bfloat16 and `x` of float32"),
    ("mma in a loader", errors.WrongRole, kernel(fill=(MMA,)), "pk.mma may not stand in a loader"),
    ("load in a consumer", errors.WrongRole, kernel(drain=(LOAD,)), "pk.load_async may not stand in a consumer"),
    ("signal in shared code", errors.WrongRole, kernel(before=(SIGNAL,)),
     "pk.signal may not stand in shared code (outside role blocks)"),
    ("drain in a loader", errors.WrongRole, kernel(role="loader"), "pk.full may not stand in a loader"),
    ("M and warpgroups", errors.ShapeMismatch, kernel(warpgroups=3),
     "the tensor core cannot do acc (128, 128) += a (128, 64) @ b (64, 128): M = 128 is no multiple of 192 "
     "(64 rows for each of 3 warpgroups)"),
    ("no warpgroups", errors.WrongOperand, kernel(warpgroups=0), "pk.consumer(warpgroups=0)"),
    ("mma shapes", errors.ShapeMismatch, kernel(drain=(ir.Do("mma", (ACC, S_B, S_A)),)),
     "shapes do not fit in pk.mma: acc (128, 128) += a (64, 128) @ b (128, 64)"),
    ("tile of another stage", errors.WrongStage, kernel(drain=(ir.Do("mma", (ACC, S_C, S_B)),)),
     "`q.c` is used outside `with q.fill()` or `with q.drain()`"),
    ("tile not declared", errors.UnknownName, kernel(drain=(ir.Do("mma", (ACC, ir.Shared("p", "z", STAGE), S_B)),)),
     "`p.z` is not declared as shared[128x64 bfloat16]"),
    ("stage in itself", errors.PipelineMisused, kernel(fill=(ir.Stage("p", "fill", (LOAD,)),)),
     "a stage of `p` inside a stage of `p`"),
    ("pipeline not declared", errors.UnknownName, kernel(fill=(ir.Stage("z", "fill", ()),)), "unknown pipeline `z`"),
    ("two drains", errors.Unbalanced, kernel(end=(ir.Stage("q", "drain", ()),)),
     "in a task `q` is filled once, and drained 2 times: the two must be equal"),
    ("index too long", errors.WrongCoordinate, kernel(end=(ir.Do("wait", (ir.Signal("s", (M, M)), ONE)),)),
     "`s` is indexed by 2 entries and has 1 dimensions"),
    ("unknown signals", errors.UnknownName, kernel(end=(ir.Do("wait", (ir.Signal("t", (M,)), ONE)),)),
     "unknown signals `t`"),
    ("unknown operation", errors.UnknownName, kernel(end=(ir.Do("copy", ()),)), "unknown operation `copy`"),
    ("value used as effect", errors.UnknownName, kernel(end=(ir.Do("load", (S_C,)),)), "unknown operation `load`"),
    ("operands missing", errors.WrongOperand, kernel(end=(ir.Do("wait", (ir.Signal("s", (M,)),)),)),
     "pk.wait of 1 operands"),
    ("condition of int", errors.WrongOperand, kernel(before=(ir.If(M, ()),)), "a condition of type int32"),
    ("int32 overflow", errors.WrongOperand, kernel(before=(ir.Assign(ir.Var("z", INT), ir.const(2**31)),)),
     "2147483648 does not fit int32"),
    ("type marked wrong", errors.WrongDType,
     kernel(before=(ir.Assign(ir.Var("z", FLOAT), ir.Binary("+", M, ONE, FLOAT)),)),
     "an expression of type int32 is marked float32"),
    ("type changes", errors.NameChangesType, kernel(before=(
        ir.Assign(ir.Var("z", INT), ONE), ir.Assign(ir.Var("z", BOOL), ir.const(True)))),
     "`z` is int32 and is assigned bool"),
    ("tasks in tasks", errors.WrongRole, kernel(before=(ir.Tasks((ir.Var("j", INT),), (ONE,), ()),)),
     "pk.tasks inside another task loop"),
    ("tile in shared code", errors.WrongRole, kernel(before=(ir.Assign(ACC, FULL),)),
     "pk.full may not stand in shared code (outside role blocks)"),
    ("declared twice", errors.WrongDeclaration, replace(kernel(), scalars=(ir.Param("x", INT),)),
     "`x` is declared twice"),
    ("counters of floats", errors.WrongOperand, replace(kernel(), signals=(ir.Signals("s", (ir.const(0.5),)),)),
     "an extent of `s` is float32"),
    ("pipeline of the other class", errors.PipelineMisused,
     replace(kernel(), pipelines=(*kernel().pipelines[:1], replace(kernel().pipelines[1], owner="communicator"))),
     "`q` is used by the communicator class and by the compute class"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "bad", "what"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_refused(kind: type[errors.CompileError], bad: ir.Kernel, what: str) -> None:
    with pytest.raises(errors.CompileError) as caught:
        check(bad)
    assert type(caught.value) is kind
    assert caught.value.what == what


def test_mma_rows_must_fill_the_warpgroups() -> None:
    small = Tile((64, 64), bfloat16, "shared")
    acc = ir.Var("acc", Tile((64, 128), float32, "register"))
    made = kernel()
    stages = made.pipelines[0]
    tiles = tuple((name, small if name == "a" else tile) for name, tile in stages.tiles)
    fill = ir.Assign(acc, ir.Call("full", (), acc.type, (("value", 0.0),)))
    stage = ir.Stage("p", "drain", (fill, ir.Do("mma", (acc, ir.Shared("p", "a", small), S_B))))
    role = ir.Role("consumer", (stage,), 2)
    with pytest.raises(
        errors.ShapeMismatch, match=r"M = 64 is no multiple of 128 \(64 rows for each of 2 warpgroups\)"
    ):
        check(replace(made, compute=(role,), pipelines=(replace(stages, tiles=tiles), *made.pipelines[1:])))


def test_integers_are_not_stored_as_floats() -> None:
    numbers = Tile((128, 64), int32, "shared")
    made = kernel()
    pipelines = (made.pipelines[0], ir.Pipeline("q", 1, (("c", numbers),)))
    with pytest.raises(errors.CompileError):
        check(replace(made, pipelines=pipelines))

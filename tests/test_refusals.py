"""What a call refuses in the simulator as on a GPU, and the errors of operators and host functions, word by word."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pk
from pk import env, errors
from pk.kernel import Call
from pk.ops.kernels import matmul
from pk.runtime import dump, tensors


@pk.kernel
def copied(x: pk.Global, y: pk.Parallel):
    pipe = pk.pipeline(1, t=pk.shared((64, 64), x.dtype))
    for m, n in pk.tasks(pk.cdiv(x.rows, 64), pk.cdiv(x.cols, 64)):
        with pk.loader(), pipe.fill() as s:
            pk.load_async(s.t, x, (m, n))
        with pk.storer(), pipe.drain() as s:
            pk.store_async(y[pk.rank()], s.t, (m, n))


@pk.kernel
def scalars(x: pk.Global, n: int, d: int):
    for m in pk.tasks(1):
        with pk.consumer():
            s = 0
            for j in pk.range(n):
                s = s + j // d
            pk.store(x, s, (0,))


@pk.kernel
def declared(x: pk.Global, n: int):
    flags = pk.signals(n, n)
    for m in pk.tasks(1):
        with pk.consumer():
            pk.store(x, 1, (0,))
            pk.signal(flags, (0, 0), pk.rank())


@pk.kernel
def scratched(x: pk.Global, n: int):
    room = pk.scratch((n, n, 64), pk.int32)
    for m in pk.tasks(1):
        with pk.consumer():
            pk.store(room[pk.rank()], 1, (0, 0, 0))
            pk.store(x, 1, (0,))


def refused(fn: Any, world: int, error: type[BaseException]) -> str:
    with pytest.raises(errors.RankError) as caught:
        pk.spawn(fn, world, "sim")
    assert isinstance(caught.value.__cause__, error), caught.value
    return str(caught.value.__cause__)


def bf16(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, dtype=torch.bfloat16)


# ------------------------------------------------------------------------------------------------ ranks that disagree
def test_different_symmetric_tensors() -> None:
    def run(rank: int) -> None:
        pair = [pk.empty((64, 64), torch.bfloat16) for _ in range(2)]
        copied(bf16(64, 64), pair[rank])

    assert refused(run, 2, errors.RanksDisagree) == (
        "the ranks call kernel `copied` with different tensors as `y`:\n"
        "  rank 0: symmetric memory 0, byte 0\n"
        "  rank 1: symmetric memory 1, byte 0\n"
        "  A Parallel argument is the same pk.empty tensor, or the same view of it, on every rank."
    )


def test_different_views_of_one_symmetric_tensor() -> None:
    def run(rank: int) -> None:
        y = pk.empty((80, 64), torch.bfloat16)
        copied(bf16(64, 64), y[8 * rank :][:64])

    assert "  rank 1: symmetric memory 0, byte 1024\n" in refused(run, 2, errors.RanksDisagree)


def test_different_dtypes() -> None:
    def run(rank: int) -> None:
        kind = torch.float16 if rank else torch.bfloat16
        copied(torch.ones(64, 64, dtype=kind), pk.empty((64, 64), torch.bfloat16).view(kind))

    assert refused(run, 2, errors.RanksDisagree) == (
        "the ranks call kernel `copied` with tensors of different types:\n"
        "  rank 0: x bfloat16[2], y bfloat16[2]\n"
        "  rank 1: x float16[2], y float16[2]\n"
        "  Pass tensors of the same dtype and number of dimensions on every rank."
    )


def test_operators_whose_dtypes_differ() -> None:
    def run(rank: int) -> None:
        kind = torch.float16 if rank == 2 else torch.bfloat16
        pk.ops.matmul_reduce_scatter(torch.ones(24, 8, dtype=kind), torch.ones(8, 8, dtype=kind))

    text = refused(run, 3, errors.RanksDisagree)
    assert "ranks 0 and 1: pk.ops.matmul_reduce_scatter(a (24, 8) bfloat16, b (8, 8) bfloat16) at " in text
    assert "rank 2: pk.ops.matmul_reduce_scatter(a (24, 8) float16, b (8, 8) float16) at " in text


def test_dtypes_are_part_of_what_ranks_agree_on() -> None:
    texts = set()
    for dtype in (torch.bfloat16, torch.float16):
        program = copied.specialise(pk.spec(dtype, 2), pk.spec(dtype, 2))
        t = torch.ones(8, 8, dtype=dtype)
        texts.add(copied._identity(program, Call({"x": t, "y": t}, {}), {}, {}))
    assert len(texts) == 2


# ------------------------------------------------------------------------------------------------------------ tensors
@pytest.mark.parametrize("at", ["x", "y"])
def test_base_addresses_that_tma_cannot_use(at: str) -> None:
    whole = bf16(65 * 64)
    odd = whole[1 : 1 + 64 * 64].view(64, 64)
    call = {"x": bf16(64, 64), "y": bf16(64, 64), at: odd}
    with pytest.raises(errors.ArgumentError) as caught:
        copied(**call)
    assert str(caught.value) == (
        f"`{at}` of shape (64, 64) and strides (64, 1) (bfloat16) begins at address {odd.data_ptr():#x}, 2 bytes past "
        "a multiple of 16; TMA needs a 16-byte aligned base.\n"
        f"  Slice at multiples of 8 elements, or pass a copy: `{at}.clone()`."
    )


def test_outputs_that_overlap_themselves() -> None:
    memory = bf16(8 * 80 + 64)
    with pytest.raises(errors.ArgumentError) as caught:
        copied(bf16(80, 64), memory.as_strided((80, 64), (8, 1)))
    assert str(caught.value) == (
        "`y` of shape (80, 64) and strides (8, 1) overlaps itself, and kernel `copied` writes it: one step along "
        "dimension 0 is 8 elements, and what lies inside it spans 64.\n"
        "  Pass memory of its own for every element: `torch.empty((80, 64), ...)`."
    )
    y = bf16(80, 64) * 0
    copied(memory.as_strided((80, 64), (8, 1)), y)  # to read one is fine
    assert torch.equal(y, bf16(80, 64))


@pytest.mark.parametrize(
    ("shape", "strides", "fine"),
    [
        ((4, 8), (8, 1), True), ((4, 8), (16, 1), True), ((4, 8), (1, 4), True), ((1, 8), (0, 1), True),
        ((0, 8), (0, 0), True), ((2, 3, 4), (1, 2, 6), True), ((1, 1), (0, 0), True), ((4, 8), (7, 1), False),
        ((4, 8), (0, 1), False), ((4, 8), (1, 1), False), ((2, 3, 4), (4, 4, 1), False),
    ],
)  # fmt: skip
def test_overlap(shape: tuple[int, ...], strides: tuple[int, ...], fine: bool) -> None:
    t = torch.zeros(256).as_strided(shape, strides)
    if fine:
        tensors.separate(t, "t", "k")
    else:
        with pytest.raises(errors.ArgumentError, match="overlaps itself"):
            tensors.separate(t, "t", "k")


STRANGE = {
    "sparse": (lambda: bf16(64, 64).to_sparse(), "is a tensor of layout torch.sparse_coo"),
    "meta": (lambda: torch.empty(64, 64, dtype=torch.bfloat16, device="meta"), "is on meta"),
    "negated": (lambda: torch._neg_view(bf16(64, 64)), r"is lazily negated: .*\n  Pass `x.resolve_neg\(\)`"),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_tensors_without_plain_memory(kind: str) -> None:
    make, text = STRANGE[kind]
    with pytest.raises(errors.ArgumentError, match=f"`x` of kernel `copied` {text}"):
        copied(make(), bf16(64, 64))


# ---------------------------------------------------------------------------------------------------------- operators
@pytest.mark.parametrize("kind", ["sparse", "meta"])
def test_operators_refuse_tensors_without_plain_memory(kind: str) -> None:
    make, text = STRANGE[kind]
    with pytest.raises(errors.ArgumentError, match=f"`b` of pk.ops.matmul_reduce_scatter {text}"):
        pk.ops.matmul_reduce_scatter(bf16(64, 64), make())


def test_operators_write_lazy_tensors_out() -> None:
    a, b = bf16(64, 64), bf16(64, 64)
    assert torch.equal(pk.ops.matmul_reduce_scatter(torch._neg_view(a), b), -pk.ops.matmul_reduce_scatter(a, b))


def test_operators_want_tensors() -> None:
    with pytest.raises(errors.ArgumentError) as caught:
        pk.ops.matmul_reduce_scatter(np.ones((8, 8), np.float16), bf16(8, 8))
    assert str(caught.value) == (
        "`a` of pk.ops.matmul_reduce_scatter is ndarray, and must be a torch.Tensor.\n  Pass `torch.from_numpy(a)`."
    )


def test_float8_operators_have_no_backward() -> None:
    a, b = bf16(16, 16).to(torch.float8_e4m3fn), bf16(16, 16).to(torch.float8_e4m3fn).T.requires_grad_()
    with pytest.raises(errors.ArgumentError) as caught:
        pk.ops.matmul_reduce_scatter(a, b)
    assert str(caught.value) == (
        "pk.ops.matmul_reduce_scatter of torch.float8_e4m3fn has no backward pass, and an argument requires a "
        "gradient.\n  Call it under torch.no_grad(), or with bfloat16 operands."
    )
    with torch.no_grad():
        assert torch.equal(pk.ops.matmul_reduce_scatter(a, b), pk.ops.matmul_reduce_scatter(a, b.detach()))


# --------------------------------------------------------------------------------------------------- run-time numbers
def test_division_by_zero_names_who() -> None:
    x = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(errors.SimulationError) as caught:
        scalars(x, 3, 0)
    assert str(caught.value).startswith("division by zero\n")
    assert "s = s + j // d" in str(caught.value)
    assert str(caught.value).endswith("  in rank 0, block 0, consumer at task m=0")


def test_endless_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(errors.SimulationError) as caught:
        scalars(x, 2_000_000_000, 1)
    assert str(caught.value).startswith(
        "this loop has 2,000,000,000 turns (from 0 to 2000000000), which takes the loops of its role past 100,000,000 "
        "(PK_SIM_STEPS); correct its bounds, or set PK_SIM_STEPS higher\n"
    )
    scalars(x, 10, 1)
    assert int(x[0]) == 45
    monkeypatch.setenv("PK_SIM_STEPS", "9")
    with pytest.raises(errors.SimulationError, match="past 9 "):
        scalars(x, 10, 1)


@pk.kernel
def counted(x: pk.Global, n: int):
    """Counts to n by a `while`."""
    for m in pk.tasks(1):
        k = 0
        while k < n:
            k = k + 1
        pk.store(x, k, (m,))


def test_the_limit_of_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(4, dtype=torch.int32)
    counted(x, 100_000)
    assert int(x[0]) == 100_000
    with pytest.raises(errors.SimulationError) as caught:
        counted(x, 100_001)
    assert str(caught.value).startswith(
        "a `while` has not ended after 100,000 turns; correct its condition, or set PK_SIM_STEPS higher (such as "
        "PK_SIM_STEPS=100000000)\n"
    )
    assert "\n    while k < n:\n          ^^^^^\n" in str(caught.value)
    assert str(caught.value).endswith("\n  in rank 0, block 0, team at task m=0")
    monkeypatch.setattr("pk.sim.loops.WHILE_TURNS", 50)
    counted(x, 50)
    with pytest.raises(errors.SimulationError) as caught:
        counted(x, 51)
    assert str(caught.value).startswith(
        "a `while` has not ended after 50 turns; correct its condition, or set PK_SIM_STEPS higher (such as "
        "PK_SIM_STEPS=100000000)\n"
    )
    monkeypatch.setenv("PK_SIM_STEPS", "51")
    counted(x, 51)
    assert pk.check(counted, x, 51, world_size=1, schedules=1, exhaustive=True).ok
    with pytest.raises(errors.SimulationError, match=r"after 51 turns.*PK_SIM_STEPS=510"):
        counted(x, 52)
    found = pk.check(counted, x, 52, world_size=1, schedules=1, exhaustive=True)
    assert not found.ok
    assert "after 51 turns" in str(found)
    found = pk.check(counted, x, 52, world_size=1, schedules=20, shrink=False)
    assert found.schedules == 1
    assert found.notes == ("no other schedule was run, because a loop did not end in this one",)


def test_variables_of_the_device_are_read_on_the_simulator_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("9", "x"):
        monkeypatch.setenv("PK_DEBUG", text)
        with pytest.raises(errors.EnvError, match="whole number from 0 to 7"):
            counted(torch.zeros(4, dtype=torch.int32), 1)


@pk.kernel
def doubled(x: pk.Global, y: pk.Global):
    """Any strides: direct reads and writes."""
    for m in pk.tasks(1):
        pk.store(y, pk.load(x, (m, 0), (4, 8)) * 2.0, (m, 0))


@pk.kernel
def moved(x: pk.Global, y: pk.Global):
    """The same by TMA."""
    p = pk.pipeline(2, t=pk.shared((4, 8), x.dtype))
    for m in pk.tasks(1):
        with pk.loader():
            with p.fill() as s:
                pk.load_async(s.t, x, (m, 0))
        with pk.consumer():
            with p.drain() as s:
                t = pk.load(s.t)
            pk.store(y, t, (m, 0))


def test_direct_reads_and_writes_take_any_strides() -> None:
    x = torch.arange(64.0).view(8, 8)
    for a, b in ((x[::2], torch.zeros(8, 8).t()[::2]), (x.t()[:4], torch.zeros(4, 16)[:, ::2])):
        doubled(a, b)
        assert torch.equal(b, 2 * a)
    with pytest.raises(errors.ArgumentError, match="not contiguous in its last dimension"):
        moved(x.t()[:4], torch.zeros(4, 8))
    # On the device the same operations compute addresses from strides that are parameters, the last one too.
    assert "x_stride_cols" in doubled.source(x=pk.float32, y=pk.float32)


@pk.kernel
def unwritten(x: pk.Global):
    for m in pk.tasks(1):
        with pk.consumer():
            ...


@pk.kernel
def summed(x: pk.Global):
    """A deep expression: 77 sums."""
    for m in pk.tasks(1):
        t = pk.load(x, (0, 0), (1, 64))
        t = (
            t + t + t + t + t + t + t + t + t + t + t + t + t + t + t + t + t + t + t + t + t + t + t + t + t + t
            + t + t + t + t + t + t + t + t + t + t + t + t + t + t + t + t + t + t + t + t + t + t + t + t + t + t
            + t + t + t + t + t + t + t + t + t + t + t + t + t + t + t + t + t + t + t + t + t + t + t + t + t + t
        )  # fmt: skip
        pk.store(x, t, (0, 0))


def test_dots_are_an_empty_body() -> None:
    unwritten(torch.zeros(4))


def test_a_deep_expression_is_simulated_and_emitted() -> None:
    x = torch.ones(1, 64)
    summed(x)
    assert torch.equal(x, torch.full((1, 64), 78.0))
    assert "store" in summed.source(x=pk.float32)


def test_shapes_of_signals() -> None:
    x = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(errors.ArgumentError) as caught:
        declared(x, -4)
    text = str(caught.value)
    assert text.startswith("`flags` of kernel `declared` has shape (-4, -4), and an extent is negative.\n")
    assert "flags = pk.signals(n, n)" in text
    assert text.endswith("  pk.signals takes extents of 0 or more.")
    with pytest.raises(errors.ArgumentError) as caught:
        declared(x, 2**16)
    assert str(caught.value) == (
        "kernel `declared` declares 4294967296 counters (flags (65536, 65536)), and a launch has at most 2147483647.\n"
        "  Declare fewer: one for each tile, not for each element."
    )
    declared(x, 4)


def test_shapes_of_scratch() -> None:
    x = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(errors.ArgumentError, match=r"`room` of kernel `scratched` has shape \(-1, -1, 64\)"):
        scratched(x, -1)
    with pytest.raises(errors.ArgumentError, match=r"bytes of scratch \(room \d+ bytes\), more than a GPU has"):
        scratched(x, 2**21)
    with pytest.raises(errors.BackendError) as caught:
        scratched(x, 2**19)
    assert str(caught.value) == (
        "scratch `room` of kernel `scratched` has shape (524288, 524288, 64) (int32) and needs 70368744177664 "
        "bytes, which this host cannot give to simulated rank 0.\n  Simulate with smaller shapes or fewer ranks."
    )


# ---------------------------------------------------------------------------------------------------------- variables
@pytest.mark.parametrize("name", ["PK_TIMEOUT_S", "PK_ENTRY_TIMEOUT_S"])
def test_time_limits_are_read_in_the_simulator_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "-1")
    with pytest.raises(errors.EnvError, match=f"{name}='-1' is not seconds"):
        copied(bf16(64, 64), bf16(64, 64))


def test_unknown_variables_are_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env, "_told", [])
    monkeypatch.setenv("PK_TIMEOUT", "5")
    with pytest.warns(UserWarning, match=r"^PK_TIMEOUT is set") as found:
        pk.spawn(int, 1, "sim")
    assert [str(w.message) for w in found] == [
        "PK_TIMEOUT is set, but pk has no such variable.  Did you mean PK_TIMEOUT_S?"
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pk.spawn(int, 1, "sim")


def test_override_of_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = str(tmp_path / "nowhere")
    monkeypatch.setenv("PK_OVERRIDE", place)
    source = copied.specialise(pk.spec("bfloat16", 2), pk.spec("bfloat16", 2)).source
    with pytest.raises(errors.BackendError) as caught:
        dump.override(source, "name")
    assert str(caught.value) == (
        f"PK_OVERRIDE={place!r} is not a folder.\n"
        "  Set it to the folder that PK_DUMP wrote and you edited, or unset PK_OVERRIDE."
    )


# ----------------------------------------------------------------------------------------------------- host functions
def test_shapes_and_dtypes_of_empty() -> None:
    assert pk.empty(3, torch.float32).shape == (3,)
    assert pk.empty(np.int64(3), torch.float32).shape == (3,)
    assert pk.empty(torch.Size((2, 3)), pk.bfloat16).dtype == torch.bfloat16
    assert pk.empty([2], "float8_e4m3").dtype == torch.float8_e4m3fn
    assert pk.empty([2], torch.int64).dtype == torch.int64


@pytest.mark.parametrize(
    ("shape", "dtype", "error", "text"),
    [
        ((3.5,), torch.float32, errors.ArgumentError, "pk.empty: shape (3.5,) has an extent that is not a whole "
         "number.\n  Pass integers, such as `pk.empty((rows, cols), torch.bfloat16)`."),
        (2.0, torch.float32, errors.ArgumentError, "pk.empty: shape 2.0 has an extent that is not a whole number."),
        ("ab", torch.float32, errors.ArgumentError, "pk.empty: shape 'ab' has an extent that is not a whole number."),
        ((True,), torch.float32, errors.ArgumentError, "pk.empty: shape (True,) has an extent that"),
        ((-1,), torch.float32, errors.ArgumentError, "pk.empty((-1,)): an extent is negative."),
        ((3,), "int3", errors.ArgumentError, "'int3' is no dtype that pk can move.\n  Use one of bfloat16, float16"),
        ((3,), None, errors.ArgumentError, "None is no dtype that pk can move."),
        ((1 << 50,), torch.bfloat16, errors.BackendError, "pk.empty((1125899906842624,), torch.bfloat16) needs "
         "2251799813685248 bytes, which this host cannot give to simulated rank 0.\n"),
        ((1 << 40, 1 << 40), torch.bfloat16, errors.ArgumentError, "more than any address space"),
    ],
)  # fmt: skip
def test_empty_refuses(shape: Any, dtype: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        pk.empty(shape, dtype)


def test_symmetric_wants_a_tensor() -> None:
    with pytest.raises(errors.ArgumentError, match=r"pk\.symmetric: `tensor` is list \[1\], and must be a"):
        pk.symmetric([1])
    with pytest.raises(errors.ArgumentError, match=r"`tensor` of pk\.symmetric is a tensor of layout torch"):
        pk.symmetric(bf16(2, 2).to_sparse())


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((int, "2"), "world_size='2' is str, and must be a whole number from 1 to 8.\n"
         "  Pass the number of ranks, such as 2."),
        ((int, True), "world_size=True is bool, and must be a whole number"),
        ((int, 2.0), "world_size=2.0 is float, and must be a whole number"),
        ((int, 2, "sim", 5), "pk.spawn: args=5 is int, and must be a tuple.\n"
         "  Pass the arguments after the rank as a tuple, such as `args=(x,)`."),
        ((int, 2, "sim", "ab"), "pk.spawn: args='ab' is str, and must be a tuple."),
        (("f", 2), "pk.spawn: 'f' is str, and must be a function."),
    ],
)  # fmt: skip
def test_spawn_refuses(args: tuple[Any, ...], text: str) -> None:
    with pytest.raises(errors.ArgumentError, match=re.escape(text)):
        pk.spawn(*args)


def test_ragged_rows_of_tma_stores() -> None:
    """TMA stores clip at whole chunks of 16 bytes: what lies behind a ragged row would be overwritten."""
    a, b = torch.ones(16, 16).bfloat16(), torch.ones(16, 24).bfloat16()
    whole = torch.full((16, 24), 7.0).bfloat16()
    with pytest.raises(pk.ArgumentError) as error:
        matmul(a, b[:, :20], whole[:, :20])
    assert str(error.value) == (
        "`c` of shape (16, 20) (bfloat16) has rows of 40 bytes, and TMA stores write whole chunks of 16 bytes: "
        "8 bytes behind every row would be overwritten.\n"
        "  Make the last dimension a multiple of 8 elements, and slice the result."
    )
    assert (whole == 7).all()
    matmul(a, b[:, :20], whole)  # a ragged operand is fine: loads clip at every element
    assert (whole[:, :20] == 16).all()
    assert (whole[:, 20:] == 0).all()

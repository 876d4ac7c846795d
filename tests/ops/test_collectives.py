"""The collectives in the simulator: any shape, dtype and dimension, against what torch makes of all ranks' tensors."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from collective_calls import Call, make

import pk
import pk.ops
from pk import errors
from pk.checking import checking
from pk.ops import collective_kernels, collective_plans, collectives, library
from pk.runtime.group import current
from tests.ops.choose_jobs import numbers

BF16, F16, F32, I32 = torch.bfloat16, torch.float16, torch.float32, torch.int32
OPERATORS = tuple(collectives.DIMENSIONS)


# ---------------------------------------------------------------------------------------------------- random problems
@pytest.mark.parametrize("world", range(1, 9))
@pytest.mark.parametrize("senders", [0, 1])
@pytest.mark.parametrize("hops", [1, 2])
def test_random_calls(world: int, hops: int, senders: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective_plans, "HOP_US", {1: 1e9, 2: -1.0}[hops])
    monkeypatch.setattr(collective_plans, "MOVED_INSIDE", {1: collective_plans.MOVED_INSIDE, 2: 0}[hops])
    monkeypatch.setattr(collective_plans, "TILES", (128, 64))  # several tiles, and several to a signal
    monkeypatch.setattr(collective_plans, "LEAST", 16)
    monkeypatch.setattr(collective_plans, "BLOCKS", {1: 0, 2: 2}[hops])  # which then send a round ahead
    monkeypatch.setattr(collective_plans, "SENDERS_BYTES", 0)
    monkeypatch.setattr(collective_plans, "SENDERS", senders)
    rng = random.Random(f"{world} {hops} {senders}")
    calls = [make(rng, world, 2000) for _ in range(40 // world + 8)]
    calls += [make(rng, world, 2000, "all_reduce") for _ in range(4)]

    def run(rank: int) -> list[torch.Tensor]:
        return [call.run(rank, world, seed) for seed, call in enumerate(calls)]

    ranks = pk.spawn(run, world, "sim")
    for seed, call in enumerate(calls):
        call.check({rank: results[seed] for rank, results in enumerate(ranks)}, world, seed)


def test_large_tiles() -> None:
    """As they are on GPUs: whole tiles, a part of one, less than one."""
    for count in (2 * 8192, 3 * 8192 + 5, 300):
        for operator in OPERATORS:
            call = Call(operator, (2, count), (0,) * len(collectives.DIMENSIONS[operator]), F32)
            ranks = pk.spawn(lambda rank, call=call: call.run(rank, 2, 1), 2, "sim")
            call.check(dict(enumerate(ranks)), 2, 1)


@pytest.mark.parametrize("operator", OPERATORS)
def test_layouts(operator: str) -> None:
    """x with gaps, transposed, expanded, negated and at odd addresses; a result at an odd address."""

    def run(rank: int) -> None:
        whole = numbers(rank, 12, 20)
        strange = [
            whole[:, 2:14],
            whole[1:7].T,
            whole[:1].expand(6, 20),
            torch.view_as_complex(whole.float().view(12, 10, 2)).imag,
        ]
        odd = torch.empty(121, dtype=BF16)[1:].view(6, 20).copy_(whole[:6])
        for x in (*strange, odd, torch.conj(torch.complex(whole.float(), whole.float())).imag):
            x = x[: x.shape[0] // 2 * 2]
            want = getattr(pk.ops, operator)(x.clone(memory_format=torch.contiguous_format).resolve_neg())
            assert torch.equal(getattr(pk.ops, operator)(x), want)
            out = x.new_empty(want.numel() + 1)[1:].view(want.shape)
            assert getattr(pk.ops, operator)(x, out=out) is out
            assert torch.equal(out, want)

    pk.spawn(run, 2, "sim")


@pytest.mark.parametrize("operator", OPERATORS)
def test_layouts_of_one_rank(operator: str) -> None:
    """Where its tensors lie is each rank's own business."""

    def run(rank: int) -> None:
        x, shift = numbers(rank, 6, 20), int(rank == 1)
        mine = torch.empty(x.numel() + shift, dtype=BF16)[shift:].view(x.shape).copy_(x)
        want = getattr(pk.ops, operator)(x)
        out = torch.empty(want.numel() + shift, dtype=BF16)[shift:].view(want.shape)
        assert torch.equal(getattr(pk.ops, operator)(mine, out=out), want)

    pk.spawn(run, 2, "sim")


def test_all_bits_move() -> None:
    """NaN with whatever payload, and what no float is."""

    def run(rank: int) -> None:
        raw = torch.randint(-(2**31), 2**31 - 1, (3, 64), generator=torch.Generator().manual_seed(rank)).int()
        every = torch.stack(
            [
                torch.randint(-(2**31), 2**31 - 1, (3, 64), generator=torch.Generator().manual_seed(r)).int()
                for r in range(3)
            ]
        )
        for dtype in (F32, BF16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64):
            got = pk.ops.all_gather(raw.view(dtype) if dtype != torch.bool else raw.view(torch.uint8).view(dtype))
            assert got.dtype == dtype
            assert torch.equal(got.view(torch.uint8).view(I32).view(3, 3, 64), every)

    pk.spawn(run, 3, "sim")


def test_in_place() -> None:
    """Over itself, with one hop and with two, in ordinary and in symmetric memory."""

    def run(rank: int) -> list[torch.Tensor]:
        found = []
        for hop_us in (1e9, -1.0):
            current().calls.clear()
            current().barrier("all have forgotten")
            collective_plans.HOP_US = hop_us
            current().barrier("and decide in another way")
            for x in (numbers(rank, 30, 1001), pk.empty((30, 1001), BF16).copy_(numbers(rank, 30, 1001))):
                want = pk.ops.all_reduce(x)
                assert pk.ops.all_reduce(x, out=x) is x
                assert torch.equal(x, want)
                found.append(x.clone())
        return found

    kept = collective_plans.HOP_US
    try:
        ranks = pk.spawn(run, 3, "sim")
    finally:
        collective_plans.HOP_US = kept
    assert all(torch.equal(x, ranks[0][0]) for found in ranks for x in found), "one order of sums"


def test_nothing_to_move() -> None:
    def run(rank: int) -> None:
        for operator in OPERATORS:
            for shape in ((0,), (0, 4), (2, 0), (4, 0, 6)):
                x = torch.empty(shape, dtype=BF16)
                got = getattr(pk.ops, operator)(x)
                assert got.numel() == 0
                assert got.ndim == x.ndim
        assert pk.ops.all_gather(torch.empty(3, 0), 1).shape == (3, 0)
        assert pk.ops.all_reduce(torch.tensor(rank + 1.0)).item() == 3.0

    pk.spawn(run, 2, "sim")


def test_one_element_with_any_stride() -> None:
    """Which torch calls contiguous, and does not view as words."""

    def run(rank: int) -> None:
        odd = torch.full((1, 5), rank, dtype=torch.int64)[:, 0] if rank else torch.zeros(1, dtype=torch.int64)
        assert pk.ops.all_gather(odd).tolist() == [0, 1]
        out = torch.zeros(20, dtype=torch.int64).as_strided((2, 1), (1, 9))
        assert pk.ops.all_to_all(torch.tensor([[rank], [rank]]), out=out).tolist() == [[0], [1]]

    pk.spawn(run, 2, "sim")


def test_autograd_notices_what_is_overwritten() -> None:
    def run(rank: int) -> None:
        w, z = torch.ones(4, requires_grad=True), torch.ones(4)
        y = (w * z).sum()
        pk.ops.all_reduce(z, out=z)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()

    pk.spawn(run, 2, "sim")


@pytest.mark.parametrize("world", [1, 2])
def test_a_result_with_a_gradient_may_be_changed(world: int) -> None:
    pk.spawn(
        lambda rank: pk.ops.all_reduce(torch.ones(2, 3, requires_grad=True)).add_(1).sum().backward(), world, "sim"
    )


# ------------------------------------------------------------------------------------------------------------- kernels
SPECS = {
    "exchange": [{"x": (I32, 4), there: (I32, 4), "BN": cols} for there in ("out", "whole") for cols in (8192, 16384)],
    "sum_parts": [
        {"x": (dtype, 3), "out": (dtype, 2), "BM": rows, "BN": cols, "PER": 2}
        for dtype, rows, cols in ((BF16, 1, 8192), (F32, 1, 8192), (BF16, 256, 8), (F32, 32, 256), (F16, 128, 64))
    ]
    + [{"x": (BF16, 3), "out": (BF16, 2), "BM": 1, "BN": 8192, "PER": 8, "COMM": 66}],
    "sum_and_share": [
        {"x": (BF16, 2), there: (BF16, 2), "COMM": senders} for there in ("out", "whole") for senders in (0, 66)
    ],
}


@pytest.mark.parametrize(
    ("name", "given"), [(name, given) for name, every in SPECS.items() for given in every], ids=str
)
def test_nothing_spills(name: str, given: dict[str, Any]) -> None:
    """Tiles of 32 KiB, in cubins; what moves is copied, 16 bytes a thread."""
    specs = {k: pk.spec(*v) if isinstance(v, tuple) else v for k, v in given.items()}
    made = getattr(collective_kernels, name).specialise(**specs)
    assert "copied_tile<" in made.source.text
    assert (made.binary.resources.spill_bytes, made.binary.resources.local_bytes) == (0, 0)


@pytest.mark.parametrize("senders", [0, 1])
@pytest.mark.parametrize("world", [2, 3])
def test_launches_are_clean(world: int, senders: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under unkind schedules, each as the operator launches it."""
    monkeypatch.setattr(collective_plans, "TILES", (64,))
    monkeypatch.setattr(collective_plans, "LEAST", 16)
    monkeypatch.setattr(collective_plans, "HOP_US", 1e9)
    monkeypatch.setattr(collective_plans, "MOVED_INSIDE", 0)
    monkeypatch.setattr(collective_plans, "BLOCKS", 3)
    monkeypatch.setattr(collective_plans, "SENDERS_BYTES", 0)
    monkeypatch.setattr(collective_plans, "SENDERS", senders)

    def run(rank: int) -> None:
        x = numbers(rank, 4 * world, 6 * world)
        there = pk.empty((4 * world * world, 6 * world), BF16)
        pk.ops.all_gather(x)
        pk.ops.all_gather(x, out=there)
        pk.ops.reduce_scatter(x, 1)
        pk.ops.all_reduce(x, out=x)
        pk.ops.all_to_all(x, 1, 0)
        current().calls.clear()
        current().barrier("two hops from here")
        collective_plans.HOP_US = -1.0
        pk.ops.all_reduce(x, out=x)
        pk.ops.all_reduce(there, out=there)

    with checking(schedules=3) as checks:
        pk.spawn(run, world, "sim")
    for made in checks.done:
        made.raise_if_found()
    moved, summed, shared = "exchange", "sum_parts", "sum_and_share"
    assert [made.kernel for made in checks.done] == [moved, moved, summed, summed, moved, shared, shared]


# ----------------------------------------------------------------------------------------------------------- gradients
BACKWARD: dict[str, Callable[..., torch.Tensor]] = {
    "all_gather": lambda x, g, dim: sum(g).chunk(len(g), dim),
    "reduce_scatter": lambda x, g, dim: [torch.cat(g, dim)] * len(g),
    "all_reduce": lambda x, g: [sum(g)] * len(g),
    "all_to_all": lambda x, g, split, concat: [
        torch.cat([part.chunk(len(g), concat)[r] for part in g], split) for r in range(len(g))
    ],
}


@pytest.mark.parametrize("operator", OPERATORS)
def test_gradients(operator: str) -> None:
    dims = {"all_reduce": (), "all_to_all": (-1, 0)}.get(operator, (-1,))

    def run(rank: int) -> list[torch.Tensor]:
        x = numbers(rank, 6, 12).float().requires_grad_()
        y = getattr(pk.ops, operator)(x, *dims)
        g = numbers(10 + rank, *y.shape).float()
        y.backward(g, retain_graph=True)
        assert x.grad is not None
        (twice,) = torch.autograd.grad(getattr(pk.ops, operator)(x, *dims).pow(3).sum(), x, create_graph=True)
        assert torch.autograd.grad(twice.sum(), x)[0].shape == x.shape
        return [x.detach(), g, x.grad]

    ranks = pk.spawn(run, 3, "sim")
    want = BACKWARD[operator]([x for x, *_ in ranks], [g for _, g, _ in ranks], *dims)
    for (*_, grad), expected in zip(ranks, want, strict=True):
        torch.testing.assert_close(grad, expected)


def test_compiled() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = pk.ops.all_to_all(pk.ops.all_gather(x * 2, 1), 1, 0)
        return pk.ops.reduce_scatter(pk.ops.all_reduce(y), dim=-1).sum()

    def run(rank: int) -> bool:
        found = []
        for call in (fn, compiled):
            x = numbers(rank, 4, 6).float().requires_grad_()
            call(x).backward()
            found.append(x.grad)
        return torch.equal(*found)

    torch._dynamo.reset()
    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
    assert run(0), "one rank"
    out = torch.empty(8, 6)
    torch.compile(lambda x, o: pk.ops.all_gather(x, out=o), fullgraph=True, backend="aot_eager")(
        x := torch.rand(8, 6), out
    )
    assert torch.equal(out, x)


def test_opcheck_on_ranks() -> None:
    from tests.ops.library_jobs import opchecks

    assert pk.spawn(opchecks, 2, "sim-processes", (OPERATORS,)) == [[], []]
    assert set(OPERATORS) <= set(library.SCHEMAS)


# ------------------------------------------------------------------------------------------------------------ mistakes
def x32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "a list": (
        lambda: pk.ops.all_reduce([1.0]),
        "`x` of pk.ops.all_reduce is list, and must be a torch.Tensor.\n  Pass a tensor, such as `torch.as_tensor(x)`.",
    ),
    "a dimension": (
        lambda: pk.ops.all_gather(x32(4, 6), 2),
        "pk.ops.all_gather got dim=2 and a tensor of shape (4, 6).\n  Pass one of its dimensions, from -2 to 1.",
    ),
    "a dimension's name": (
        lambda: pk.ops.all_to_all(x32(4, 6), 0, "rows"),
        "pk.ops.all_to_all got concat_dim='rows', which is str.\n  Pass the number of a dimension.",
    ),
    "a number": (
        lambda: pk.ops.reduce_scatter(torch.tensor(1.0)),
        "pk.ops.reduce_scatter got a tensor without dimensions, and works along one.\n  Pass `x.view(1)`.",
    ),
    "integers": (
        lambda: pk.ops.all_reduce(x32(4).long()),
        "`x` of pk.ops.all_reduce is torch.int64, and sums are of torch.bfloat16, torch.float16, torch.float32.\n"
        "  Cast it to one of them.",
    ),
    "shares": (
        lambda: pk.ops.reduce_scatter(x32(4, 7), 1),
        "`x` of pk.ops.reduce_scatter has 7 elements along dim=1, which 2 ranks cannot share equally.\n"
        "  Pad them to 8.",
    ),
    "split": (
        lambda: pk.ops.all_to_all(x32(4, 7), -1, 0),
        "`x` of pk.ops.all_to_all has 7 elements along split_dim=1, which 2 ranks cannot share equally.\n"
        "  Pad them to 8.",
    ),
    "out of a shape": (
        lambda: pk.ops.all_gather(x32(4, 6), out=x32(4, 6)),
        "`out` is (4, 6) torch.float32, and the result is (8, 6) torch.float32.\n"
        "  Pass `torch.empty((8, 6), dtype=torch.float32, ...)`, or leave it away.",
    ),
    "out of a dtype": (
        lambda: pk.ops.all_reduce(x32(4), out=x32(4).half()),
        "`out` is (4,) torch.float16, and the result is (4,) torch.float32.\n"
        "  Pass `torch.empty((4,), dtype=torch.float32, ...)`, or leave it away.",
    ),
    "out by columns": (
        lambda: pk.ops.all_gather(x32(4, 6), out=x32(6, 8).T),
        "`out` has strides (1, 8), and must be contiguous.\n"
        "  Pass `torch.empty((8, 6), dtype=torch.float32, ...)`, or leave it away.",
    ),
    "out over x": (
        lambda: pk.ops.all_to_all(a := x32(4), out=a),
        "`out` of pk.ops.all_to_all shares memory with an operand of shape (4,), which is read while `out` is "
        "written.\n  Pass memory of its own, or leave it away.",
    ),
    "out over half of x": (
        lambda: pk.ops.all_reduce((a := x32(6))[:4], out=a[2:]),
        "`out` of pk.ops.all_reduce shares memory with an operand of shape (4,), which is read while `out` is "
        "written.\n  Pass memory of its own, or leave it away.",
    ),
    "out and a gradient": (
        lambda: pk.ops.all_reduce(x32(4).requires_grad_(), out=x32(4)),
        "pk.ops.all_reduce with `out` has no backward pass, and an argument requires a gradient.\n"
        "  Leave `out` away, or call it under torch.no_grad().",
    ),
    "a gradient in float64": (
        lambda: pk.ops.all_gather(x32(4).double().requires_grad_()),
        "`x` of pk.ops.all_gather requires a gradient and is torch.float64: its gradient is a sum over the ranks, and "
        "sums are of torch.bfloat16, torch.float16, torch.float32.\n"
        "  Cast it to one of them, or pass `x.detach()`.",
    ),
    "a nested tensor": (
        lambda: pk.ops.all_reduce(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
        "`x` of pk.ops.all_reduce is a nested tensor, and pk reads plain memory.\n  Pass `x.to_padded_tensor(0)`.",
    ),
    "a quantised tensor": (
        lambda: pk.ops.all_gather(torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)),
        "`x` of pk.ops.all_gather is a quantized tensor, and pk reads plain memory.\n  Pass `x.int_repr()`.",
    ),
    "a bool for a dimension": (
        lambda: pk.ops.all_gather(x32(4, 4), True),
        "pk.ops.all_gather got dim=True, which is bool.\n  Pass the number of a dimension.",
    ),
    "vmap": (
        lambda: torch.vmap(pk.ops.all_gather)(x32(3, 4)),
        "pk.ops.all_gather cannot be batched by torch.vmap: it is one launch on all ranks.\n"
        "  Pass the whole batch: x has any number of dimensions.",
    ),
    "meta": (
        lambda: pk.ops.all_reduce(x32(4).to("meta")),
        "`x` of pk.ops.all_reduce is on meta: a tensor of shape (4,) without memory.\n"
        "  Pass a tensor with contents, such as `torch.empty_like(x, device=pk.device())`.",
    ),
    "group": (
        lambda: pk.ops.all_reduce(x32(4), group=7),
        "group=7 is neither a pk group nor a process group of an initialised torch.distributed.\n"
        "  Pass a torch.distributed.ProcessGroup, or nothing.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name: str) -> None:
    call, text = MISTAKES[name]

    def run(rank: int) -> str:
        with pytest.raises(errors.ArgumentError) as caught:
            call()
        return str(caught.value)

    assert pk.spawn(run, 2, "sim") == [text] * 2


DIFFERENT: dict[str, Callable[[int], Any]] = {
    "pk.ops.all_gather(x (4, 6) float32, dim=0)": lambda: pk.ops.all_gather(x32(4, 6)),
    "pk.ops.all_gather(x (4, 6) float32, dim=1)": lambda: pk.ops.all_gather(x32(4, 6), -1),
    "pk.ops.all_gather(x (4, 8) float32, dim=0)": lambda: pk.ops.all_gather(x32(4, 8)),
    "pk.ops.all_gather(x (4, 6) bfloat16, dim=0)": lambda: pk.ops.all_gather(x32(4, 6).bfloat16()),
    "pk.ops.all_gather(x (4, 6) float32, dim=0, out in symmetric memory)": lambda: pk.ops.all_gather(
        x32(4, 6), out=pk.empty((8, 6), F32)
    ),
    "pk.ops.all_gather(x (0, 6) float32, dim=0)": lambda: pk.ops.all_gather(x32(0, 6)),
    "pk.ops.all_reduce(x (4, 6) float32)": lambda: pk.ops.all_reduce(x32(4, 6)),
    "pk.ops.all_to_all(x (4, 6) float32, split_dim=1, concat_dim=0)": lambda: pk.ops.all_to_all(x32(4, 6), 1, 0),
}


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("text", list(DIFFERENT)[1:])
def test_ranks_that_differ(text: str, known: bool) -> None:
    (first, usual), other = next(iter(DIFFERENT.items())), DIFFERENT[text]

    def run(rank: int) -> str:
        if "symmetric" in text:
            pk.empty((8, 6), F32)
            if rank == 0:
                pk.empty((8, 6), F32)  # the other rank makes one for its call
        for call in (usual, other) if known and "symmetric" not in text else ():
            call()
        with pytest.raises(errors.RanksDisagree) as caught:
            (other if rank else usual)()
        return re.sub(r" at \S+:\d+", "", str(caught.value))

    want = (
        f"the ranks make different calls at the same point:\n  rank 0: {first}\n  rank 1: {text}\n"
        "  Pass the same shapes, dtypes, layouts and options on every rank."
    )
    for told in pk.spawn(run, 2, "sim"):
        if not known:
            assert told == want
        else:
            assert f"rank 0: {first}\n" in told
            assert f"rank 1: {text}\n" in told

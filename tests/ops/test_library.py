"""The operators inside PyTorch: opcheck, compile, export, autocast, groups by name, and what is refused."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.checkpoint import checkpoint

import pk
import pk.ops
from pk import errors
from pk.ops import library, route
from pk.runtime.group import Group, current
from tests.ops.library_jobs import alike, arguments, block, numbers, opchecks, under_torchrun, with_gradients

PARALLEL = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
PUBLIC = ("matmul", *PARALLEL)
FP8 = torch.float8_e4m3fn


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    return numbers(1, 40, 64), numbers(2, 64, 48)


@pytest.fixture
def passed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators whose calls went through torch."""
    seen: list[str] = []

    def told(operator: str, *args: Any, _inner: Callable[..., Any] = route.through_torch, **options: Any) -> Any:
        seen.append(operator)
        return _inner(operator, *args, **options)

    monkeypatch.setattr(route, "through_torch", told)
    return seen


# ------------------------------------------------------------------------------------------------------ torch.library
def test_opcheck() -> None:
    assert opchecks(0, tuple(library.SCHEMAS)) == []


def test_opcheck_on_two_ranks() -> None:
    assert pk.spawn(opchecks, 2, "sim-processes", (PARALLEL,)) == [[], []]


@pytest.mark.parametrize("operator", PUBLIC)
def test_operators_compute_what_functions_do(operator: str) -> None:
    a, b = operands()
    for options in ({}, {"activation": "silu", "out_dtype": torch.float32, "config": "c128x64"}):
        want = getattr(pk.ops, operator)(a, b, **options)
        assert torch.equal(getattr(torch.ops.pk, operator)(a, b, **options), want)
    a8, b8, row, col = a.to(FP8), b.T.contiguous().to(FP8).T, torch.rand(40, 1), torch.rand(1, 48)
    scales = {"scale_a": row, "scale_b": col}
    want = getattr(pk.ops, operator)(a8, b8, **scales)
    assert torch.equal(getattr(torch.ops.pk, operator)(a8, b8, **scales), want)


def test_gathered_rows() -> None:
    a, b = operands()
    for config in (None, "c64x128"):
        result, rows = torch.ops.pk.all_gather_matmul_saving(a, b, config=config)
        assert torch.equal(rows, a)
        assert torch.equal(result, pk.ops.all_gather_matmul(a, b, config=config))
    with pytest.raises(errors.ArgumentError, match="is no configuration"):
        torch.ops.pk.all_gather_matmul_saving(a, b, config="fast")


# ------------------------------------------------------------------------------------------------------- which way
def test_nobody_looks_on(passed: list[str]) -> None:
    a, b = operands()
    w = torch.nn.Parameter(b)
    pk.ops.matmul(a, b)
    with torch.no_grad():
        pk.ops.matmul(a, w)
    with torch.inference_mode():
        pk.ops.matmul(a, w)
        pk.ops.all_gather_matmul(a * 1, w)
    assert passed == []
    assert pk.ops.matmul(a, w).requires_grad
    assert passed == ["matmul"]


def test_fake_tensors() -> None:
    a, b = operands()
    mode = FakeTensorMode()
    x, y = mode.from_tensor(a), mode.from_tensor(b)
    for inside in (mode, contextlib.nullcontext()):
        with inside:
            found = pk.ops.matmul_reduce_scatter(x, y, out_dtype=torch.float32)
        assert isinstance(found, FakeTensor)
        assert (found.shape, found.dtype) == ((40, 48), torch.float32)
    assert torch.ops.pk.matmul(a.to("meta"), b.to("meta")).device.type == "meta"


# ----------------------------------------------------------------------------------------------------------- compile
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(backend: str, dynamic: bool) -> None:
    def fn(a: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        x = pk.ops.matmul(a, w.T, bias=bias, activation="gelu")
        y = pk.ops.all_gather_matmul(x, w, activation="relu", comm_sms=2)
        return pk.ops.matmul_all_reduce(pk.ops.matmul_reduce_scatter(y, w.T, bias=bias), w, out_dtype=torch.float32)

    torch._dynamo.reset()
    values = [numbers(s, *shape).requires_grad_() for s, shape in enumerate(((40, 64), (48, 64), (48,)))]
    compiled = torch.compile(fn, fullgraph=True, backend=backend, dynamic=dynamic)
    assert alike(with_gradients(compiled, values), with_gradients(fn, values))
    values[0] = numbers(9, 24, 64).requires_grad_()
    with torch.compiler.set_stance("fail_on_recompile" if dynamic else "default"):
        assert alike(with_gradients(compiled, values), with_gradients(fn, values))
    with torch.no_grad():
        assert alike([compiled(*values)], [fn(*values)])


def test_compile_with_out() -> None:
    a, b = operands()
    out = torch.zeros(40, 48, dtype=torch.bfloat16)
    compiled = torch.compile(lambda x, y, o: pk.ops.matmul(x, y, out=o), fullgraph=True, backend="aot_eager")
    compiled(a, b, out)
    assert torch.equal(out, pk.ops.matmul(a, b))


def test_compile_says_what_is_wrong() -> None:
    a, b = operands()
    compiled = torch.compile(pk.ops.matmul, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"`a` is torch.float32, and must be torch.bfloat16"):
        compiled(a.float(), b.float())


def _compiled_rank(rank: int, backend: str) -> tuple[bool, bool, bool]:
    values, group = arguments(rank), current()
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    want = with_gradients(block, values)
    by_object = with_gradients(lambda *v: compiled(*v, group=group), values)
    name = torch.ops.pk.all_gather_matmul(values[0], values[1].T, group=group.group_name)
    return (
        alike(with_gradients(compiled, values), want), alike(by_object, want),
        torch.equal(name, pk.ops.all_gather_matmul(values[0], values[1].T)),
    )  # fmt: skip


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_on_rank_threads(backend: str) -> None:
    torch._dynamo.reset()
    assert pk.spawn(_compiled_rank, 2, "sim", (backend,)) == [(True, True, True)] * 2


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(operands()[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return pk.ops.matmul(x, self.weight, activation="gelu")


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool) -> None:
    a, b = operands()
    program = torch.export.export(Layer(), (a,), strict=strict)
    assert "pk.matmul" in str(program.graph)
    with torch.no_grad():
        assert alike([program.module()(a)], [pk.ops.matmul(a, b, activation="gelu")])


def test_checkpoint() -> None:
    a, b = operands()
    a.requires_grad_()
    checkpoint(lambda x: pk.ops.matmul(x, b, activation="gelu"), a, use_reentrant=False).sum().backward()
    again = a.detach().clone().requires_grad_()
    pk.ops.matmul(again, b, activation="gelu").sum().backward()
    assert a.grad is not None
    assert torch.equal(a.grad, again.grad)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------------- autocast
@pytest.mark.parametrize("operator", PUBLIC)
def test_autocast(operator: str) -> None:
    a, b = (x.float().requires_grad_() for x in operands())
    bias = numbers(3, 48).float().requires_grad_()
    want = getattr(pk.ops, operator)(a.detach().bfloat16(), b.detach().bfloat16(), bias=bias.detach().bfloat16())

    def fn(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return getattr(pk.ops, operator)(a, b, bias=bias)

    for call in (fn, torch.compile(fn, fullgraph=True, backend="aot_eager"), getattr(torch.ops.pk, operator)):
        with torch.autocast("cpu", torch.bfloat16):
            y = call(a, b, bias)
        assert torch.equal(y, want)
        for x, grad in zip((a, b, bias), torch.autograd.grad(y.float().sum(), (a, b, bias)), strict=True):
            assert grad.dtype == x.dtype == torch.float32
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(fn(a, b, bias), want)


def test_autocast_leaves_float8_and_scales_alone() -> None:
    a, b = numbers(1, 16, 64).to(FP8), numbers(2, 48, 64).to(FP8).T
    scale = torch.rand(1, 48)
    with torch.autocast("cpu", torch.bfloat16):
        found = pk.ops.matmul(a, b, scale_b=scale)
    assert torch.equal(found, pk.ops.matmul(a, b, scale_b=scale))


# ------------------------------------------------------------------------------------------------------------ groups
@pytest.mark.timeout(240)
def test_process_groups(tmp_path: Path) -> None:
    """Gloo processes: the world and a sub-group alive at once, eager and compiled, by object and by name."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    jobs = [context.Process(target=under_torchrun, args=(r, 3, str(tmp_path / "s"), results)) for r in range(3)]
    for job in jobs:
        job.start()
    found = dict(results.get(timeout=200) for _ in jobs)
    for job in jobs:
        job.join(30)
    world = pk.spawn(_loss, 3, "sim")
    assert found[0] == [True, world[0]]
    for rank in (1, 2):
        assert found[rank][:3] == [True, world[rank], True]
        assert found[rank][4] == (48, 48)


def _loss(rank: int) -> float:
    return float(with_gradients(block, arguments(rank))[0].float().pow(2).sum())


def test_group_names() -> None:
    a, b = operands()
    group = Group(0, 1, "sim")
    assert torch.equal(torch.ops.pk.matmul(a, b, group=group.group_name), pk.ops.matmul(a, b))
    name = group.group_name
    del group
    with pytest.raises(errors.ArgumentError, match="there is no such group any more"):
        torch.ops.pk.matmul(a, b, group=name)
    with pytest.raises(errors.ArgumentError, match="neither a pk group nor a process group's name"):
        torch.ops.pk.matmul(a, b, group="tp")
    with pytest.raises(errors.ArgumentError, match="neither a pk group nor a process group"):
        pk.ops.matmul(a, b.requires_grad_(), group=7)


# ----------------------------------------------------------------------------------------------------------- refused
@pytest.mark.parametrize("operator", PUBLIC)
def test_transforms_are_refused(operator: str) -> None:
    a, b = operands()
    fn = getattr(pk.ops, operator)
    with pytest.raises(errors.ArgumentError, match=rf"pk.ops.{operator} cannot be batched by torch.vmap"):
        torch.vmap(lambda x: fn(x, b))(a.expand(3, *a.shape))
    with pytest.raises(errors.ArgumentError, match=r"neither forward-mode derivatives nor those of torch.func"):
        torch.func.grad(lambda x: fn(x, b).float().sum())(a)
    with pytest.raises(errors.ArgumentError, match=r"neither forward-mode derivatives nor those of torch.func"):
        torch.func.jvp(lambda x: fn(x, b), (a,), (a,))


@pytest.mark.parametrize("operator", PUBLIC)
def test_gradients_are_refused(operator: str) -> None:
    a, b = operands()
    fn, w = getattr(pk.ops, operator), b.clone().requires_grad_()
    a8, b8 = a.to(FP8), b.T.contiguous().to(FP8).T
    with pytest.raises(errors.ArgumentError, match=r"of torch.float8_e4m3fn has no backward pass"):
        fn(a8, b8, bias=numbers(3, 48).requires_grad_())
    with pytest.raises(errors.ArgumentError, match=r"with `scale_b` has no backward pass"):
        fn(a, w, scale_b=torch.ones(1))
    with pytest.raises(errors.ArgumentError, match=r"with `out` has no backward pass"):
        fn(a, w, out=torch.empty(40, 48, dtype=torch.bfloat16))
    with pytest.raises(errors.ArgumentError, match=r"`a` is torch.float32"):
        fn(a.float(), w.float())
    with pytest.raises(errors.ArgumentError, match="inner extents"):
        fn(a, w[:32])

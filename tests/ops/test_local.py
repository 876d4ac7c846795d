"""``pk.ops.matmul`` is one rank's: it meets no other rank, forward and backward, on any backend."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import pk
import pk.ops
from pk import errors
from pk.ops import kernels
from pk.runtime import group as groups
from pk.runtime import launch, retired
from pk.runtime.group import Group
from tests.ops.choose_jobs import numbers, operands
from tests.runtime.fake import FakeDriver, Machine
from tests.runtime.ranks import as_processes
from tests.runtime.test_launch import threads


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert float((got.detach().double() - want.detach()).norm() / want.detach().norm()) < 0.02


def _one_rank(rank: int, compiled: bool) -> None:
    """Only rank 1 multiplies, before any other call of the group, and every way that a call can go."""
    if rank != 1:
        return
    a, b = (x.requires_grad_() for x in operands(0))
    ways = [pk.ops.matmul, torch.ops.pk.matmul]
    ways += [torch.compile(pk.ops.matmul, fullgraph=True, backend="aot_eager")] * compiled
    for call in ways:
        y = call(a, b)
        da, db = torch.autograd.grad(y.float().pow(2).sum(), (a, b))
        A, B = (x.detach().double().requires_grad_() for x in (a, b))
        dA, dB = torch.autograd.grad((A @ B).pow(2).sum(), (A, B))
        for got, want in ((y, A @ B), (da, dA), (db, dB)):
            close(got, want)


@pytest.mark.parametrize("backend", ["sim", "sim-processes"])
def test_one_rank_multiplies(backend: str) -> None:
    torch._dynamo.reset()
    pk.spawn(_one_rank, 2, backend, (backend == "sim",))


def _own_shapes(rank: int) -> torch.Tensor:
    """As often as a rank likes, with shapes of its own, between calls that meet."""
    found = torch.zeros(())
    a, b = operands(rank)
    for i in range(1 + rank):
        found = pk.ops.matmul(numbers(rank, 8 + 8 * rank + i, 32), b)
    y = pk.ops.matmul_all_reduce(a, b)
    if rank == 0:
        assert torch.equal(pk.ops.matmul(a, b, group=groups.current()), pk.ops.matmul(a, b))
    assert torch.equal(y, pk.ops.matmul_all_reduce(a, b))
    return found


def test_shapes_of_its_own() -> None:
    for rank, found in enumerate(pk.spawn(_own_shapes, 3, "sim")):
        close(found, numbers(rank, 8 + 9 * rank, 32).double() @ operands(rank)[1].double())


def _backward(rank: int) -> None:
    """The local products of a backward pass are local: here each rank asks for other gradients."""
    a, b = operands(0)
    a.requires_grad_(rank == 0)
    b.requires_grad_(rank == 1)
    y = pk.ops.matmul_all_reduce(a, b)
    y.sum().backward()
    got, want = (a.grad, torch.ones(16, 48).double() @ b.double().T) if rank == 0 else (
        b.grad, a.double().T @ torch.ones(16, 48).double()
    )  # fmt: skip
    assert got is not None
    close(got, want)


def test_gradients_that_only_some_ranks_want() -> None:
    pk.spawn(_backward, 2, "sim")


# ------------------------------------------------------------------------------------------------ the group of one
def test_the_group_of_one_is_made_once_and_closed_with_its_group(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        group = groups.current()
        alone = group.alone()
        assert (alone.rank, alone.world_size, alone.team) == (0, 1, 3)
        assert (alone.device, alone.sms, alone.driver) == (0, group.sms, group.driver)
        assert group.alone() is alone is groups.alone() is groups.alone(group) is groups.alone(group.group_name)
        assert alone.alone() is alone
        x = torch.zeros(64, 128, dtype=torch.bfloat16)
        with pytest.raises(errors.BackendError, match="legacy default stream"):  # it waits for the other ranks'
            _launched(alone, x, stream=0)
        _launched(alone, x, stream=7 + rank)
        assert alone.context is not None
        launch.synchronize(group)
        made.append(alone)

    made: list[Group] = []
    driver = FakeDriver(Machine(sms=132))
    threads(run, 3, driver)
    assert all(group.closed and group.context is None for group in made)
    assert sorted((shape[0], stream) for _, shape, stream, _ in driver.launches) == [(44, 7), (44, 8), (44, 9)]
    waited = [entry[1] for entry in driver.machine.log if entry[0] == "synchronize stream"]
    assert {7, 8, 9} <= set(waited)


def _launched(group: Group, x: torch.Tensor, stream: int) -> None:
    import threading

    from tests.runtime.test_launch import call

    group.driver.current_stream[threading.get_ident()] = stream  # type: ignore[attr-defined]
    call(group, c=x)


def test_it_is_left_with_its_group(tmp_path: Path) -> None:
    driver = FakeDriver()
    group = groups.threads(2, "cuda", [0, 0], driver)[0]
    _launched(group.alone(), torch.zeros(64, 128, dtype=torch.bfloat16), stream=7)
    alone = group.alone()
    context = alone.context
    assert context is not None
    context.hang = errors.HangError("gave up")
    with pytest.raises(errors.HangError):
        launch.synchronize(group)
    group.reset()
    launch.synchronize(group)
    retired.leave(group, "has ended")
    assert alone.closed
    assert alone.context is None
    assert not driver.machine.freed_while_mapped()


def test_a_closed_group_has_none() -> None:
    group = groups.threads(2, "sim")[0]
    alone = group.alone()
    group.closed = True
    with pytest.raises(errors.BackendError):
        group.alone()
    assert Group(0, 1, "sim").alone().world_size == 1
    assert not alone.closed


def test_processes_that_have_met_share_as_their_group_does(tmp_path: Path) -> None:
    found = as_processes(lambda g: (g.alone().sms, groups.alone().sms, g.alone().shared), tmp_path, 3, Machine(),
                         devices=[0, 0, 0])  # fmt: skip
    assert found == [(44, 44, True)] * 3


def test_tracing_goes_with_the_group() -> None:
    group = groups.threads(2, "cuda", [0, 0], FakeDriver())[0]
    alone = group.alone()
    group.tracer = tracer = object()  # type: ignore[assignment]
    assert group.alone().tracer is tracer
    group.tracer = None
    assert group.alone() is alone
    assert alone.tracer is None


def test_what_is_no_group() -> None:
    for group in (7, "tp"):
        with pytest.raises(errors.ArgumentError, match=r"is neither a pk group nor a"):
            groups.alone(group)


# ------------------------------------------------------------------------------------------------------- in a check
def test_checked_rank_by_rank() -> None:
    def run(rank: int) -> None:
        a, b = operands(rank)
        if rank:
            kernels.matmul(**_arguments(a, b), group=groups.alone())
        pk.ops.matmul(a, b)

    with pk.checking.checking(2) as checks:
        pk.spawn(run, 3, "sim")
    assert [made.world_size for made in checks.done] == [1] * 5
    assert checks.teams == {3}
    assert all(made.ok for made in checks.done)


def _arguments(a: torch.Tensor, b: torch.Tensor) -> dict[str, Any]:
    from pk.ops import dense
    from pk.ops.model import CONFIGS

    c = torch.empty(16, 48, dtype=torch.bfloat16)
    return functools.partial(dense.arguments, a, b, c, {}, "none")(CONFIGS["c64x128"])

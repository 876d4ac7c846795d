"""The order of a role's signals, who is named for signals that nobody hears, barriers used twice, and amounts."""

from __future__ import annotations

import pytest
import torch

import pk
from pk import errors


@pk.kernel
def two(out: pk.Global):
    a, b = pk.signals(1), pk.signals(1)
    for _ in pk.tasks(1):
        pk.signal(a, 0, pk.rank())
        pk.signal(b, 0, pk.rank())
        pk.wait(b, 0, 1)
        pk.store(out, pk.fetch_add(a, 0, 0), 0)


@pk.kernel
def to_neighbour(x: pk.Global):
    told = pk.signals(1)
    for _ in pk.tasks(1):
        if pk.rank() == 0:
            pk.signal(told, 0, 1)  # 0 tells 1


@pk.kernel
def twice(x: pk.Global):
    met = pk.signals(1)
    for _ in pk.tasks(1):
        pk.barrier(met, 0)
        pk.barrier(met, 0)


@pk.kernel
def early(x: pk.Global, y: pk.Global):
    slot, here = pk.scratch((1, x.cols), x.dtype), pk.signals(1)
    for _ in pk.tasks(1):
        if pk.rank() == 0:
            pk.signal(here, 0, 1)
            pk.store(slot[1], pk.load(x, (0, 0), (1, 64)), (0, 0))  # [write]
        else:
            pk.wait(here, 0, 1)
            t = pk.load(slot[pk.rank()], (0, 0), (1, 64))  # [read]
            pk.store(y, t, (0, 0))


@pk.kernel
def amounts(x: pk.Global, n: int, V: pk.constexpr = 1, N: pk.constexpr = 0, T: pk.constexpr = 1):
    s = pk.signals(1)
    for _ in pk.tasks(T):
        pk.signal(s, 0, pk.rank(), V)
        pk.signal(s, 0, pk.rank(), n)
        pk.wait(s, 0, N)


def test_a_signal_comes_after_those_of_earlier_statements() -> None:
    for _ in range(20):
        out = torch.zeros(1, dtype=torch.int32)
        two(out)
        assert out.item() == 1


def test_who_signals_in_vain_is_named() -> None:
    result = pk.check(to_neighbour, torch.zeros(1, 64), world_size=2, schedules=2)
    (found,) = result.findings
    assert (found.kind, found.places[0].rank) == ("lost-signal", 0)
    assert found.places[0].what == "adds 1 to told[0] of rank 1"


def test_a_barrier_used_twice() -> None:
    (found,) = pk.check(twice, torch.zeros(1, 64), world_size=2, schedules=2).findings
    assert "arrives twice at the barrier met[0]" in found.message
    assert len({p.span.line for p in found.places}) == 2


def test_explored_race_is_the_one_that_schedules_showed() -> None:
    x, y = torch.zeros(1, 64), torch.zeros(1, 64)
    result = pk.check(early, x, y, world_size=2, sms=1, schedules=1, exhaustive=True)
    (found,) = result.findings
    assert found.trace
    assert all("[write]" in p.span.text or "[read]" in p.span.text for p in found.places)


@pytest.mark.parametrize(
    ("given", "text"),
    [({"V": 0}, "pk.signal with value 0"), ({"V": -1}, "value -1"),
     ({"T": -4}, "pk.tasks with extent -4")],
)  # fmt: skip
def test_amounts_that_make_no_sense(given: dict[str, int], text: str) -> None:
    with pytest.raises(errors.WrongOperand, match=text) as caught:
        amounts.specialise(x=pk.spec(torch.float32, 2), **given)
    assert "^" in str(caught.value)


def test_a_negative_signal_at_run_time() -> None:
    amounts(torch.zeros(1, 64), 0)
    with pytest.raises(errors.SimulationError, match="a signal adds -1 to `s`"):
        amounts(torch.zeros(1, 64), -1)

"""PK_SANITIZE on the host's side: memory whose contents mean nothing is NaN when a launch begins."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from pk.runtime import group as groups
from pk.runtime import symm
from pk.runtime.group import Group
from pk.runtime.launch import Call, launch, prepare
from pk.runtime.packed import Prepared
from pk.runtime.spawn import run_threads
from tests.runtime.fake import FakeDriver, FakeModule, source
from tests.runtime.test_launch import SIGNALS, A

PARTS = ((8, 64), torch.float32)


def request(group: Group, level: int, c: torch.Tensor) -> Call:
    made = dataclasses.replace(source(), sanitize=level, only_written=("c",))
    return Call(
        group, made, FakeModule(made), {"a": A, "c": c}, {"n": 1, "x": 0.5}, SIGNALS, {"parts": PARTS}, f"g {level}"
    )


def driver_of(group: Group) -> FakeDriver:
    assert isinstance(group.driver, FakeDriver)
    return group.driver


def poisons(group: Group) -> list[tuple[Any, ...]]:
    return [entry[1:] for entry in driver_of(group).machine.log if entry[0] == "poison"]


def test_scratch_is_poisoned_before_every_launch(solo: Group, twin: str) -> None:
    c = symm.empty((64, 128), torch.bfloat16, solo)
    c.zero_()
    packed = launch(request(solo, 1, c))
    assert solo.context is not None and solo.context.scratch is not None
    piece = (solo.context.scratch.base, 2048)
    assert poisons(solo) == [piece]
    assert packed.submit((2, 0.5))
    assert poisons(solo) == [piece] * 2
    assert driver_of(solo).read(0, piece[0], 2048) == b"\xff" * 2048
    assert len(driver_of(solo).launches) == 2
    assert not c.isnan().any()  # it may be half of an output that another kernel began


def test_prepared_launches_do_it_too(solo: Group) -> None:
    c = symm.empty((64, 128), torch.bfloat16, solo)
    call = request(solo, 1, c)
    again = Prepared(prepare(call), call.values, lambda: prepare(call))
    assert not poisons(solo)
    again()
    again()
    assert len(poisons(solo)) == 2


def test_level_2_poisons_outputs_that_nothing_reads(solo: Group) -> None:
    c = symm.empty((64, 128), torch.bfloat16, solo)
    c.zero_()
    launch(request(solo, 2, c))
    assert c.isnan().all()


@pytest.mark.parametrize("view", [lambda c: c[:, :64], lambda c: c[::2]])
def test_an_output_in_several_pieces_is_left_alone(solo: Group, view: Any) -> None:
    c = symm.empty((64, 128), torch.bfloat16, solo)
    c.zero_()
    launch(request(solo, 2, view(c)))
    assert not c.isnan().any()
    launch(request(solo, 2, c.T))  # one piece, in another order
    assert c.isnan().all()


def test_nothing_is_poisoned_when_it_is_off(solo: Group) -> None:
    launch(request(solo, 0, symm.empty((64, 128), torch.bfloat16, solo)))
    assert not poisons(solo)


def test_ranks_that_are_threads_poison_their_own() -> None:
    driver = FakeDriver()

    def run(rank: int) -> int:
        group = groups.current()
        launch(request(group, 1, symm.empty((64, 128), torch.bfloat16, group)))
        assert group.context is not None and group.context.scratch is not None
        return group.context.scratch.base

    bases = run_threads(run, (), groups.threads(2, "cuda", [0, 0], driver))
    log = [entry for entry in driver.machine.log if entry[0] == "poison"]
    assert {entry[1] for entry in log} == set(bases) and len(log) == 2

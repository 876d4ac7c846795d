"""Launches whose ranks need not see each other begin: where their scratch lies; and how launches are submitted."""

from __future__ import annotations

import struct
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pk
from pk.artifact import Field
from pk.runtime import context as contexts
from pk.runtime import group as groups
from pk.runtime.launch import Call, launch
from tests.runtime.fake import FakeDriver, FakeModule, source
from tests.runtime.test_launch import SIGNALS, A, solo, threads

FULL = source()
CONTEXT = next(f for f in FULL.fields if f.kind == "context")
SETS = Field("slots", "sets", FULL.params_size, 128, "slots")
KEPT = tuple(f for f in FULL.fields if f.key not in ("c", "c.1") and (f.map is None or f.map.tensor == "a"))
EARLY = replace(FULL, remote=False, early=True, params_size=FULL.params_size + 128, fields=(*KEPT, SETS))


def call(rows: int = 8) -> None:
    scratch = {"pad": ((100,), torch.bfloat16), "slots": ((rows, 64), torch.float32)}
    launch(
        Call(
            groups.current(), EARLY, FakeModule(EARLY), {"a": A}, {"n": 0, "x": 0.0}, SIGNALS, scratch, f"early {rows}"
        )
    )


def launched(driver: FakeDriver) -> list[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """Of each launch: how ranks meet, and addresses of scratch on two ranks in even and in odd launches."""
    found = []
    for _, _, _, data in driver.launches:
        sets = struct.unpack_from("<16Q", data, SETS.offset)
        found.append((struct.unpack_from("<I", data, CONTEXT.offset + 64 + 24 + 24)[0], sets[:2], sets[8:10]))
    return found


def test_scratch_lies_behind_the_counters_in_two_sets() -> None:
    driver = FakeDriver()
    threads(lambda rank: call(), 2, driver)
    headers = [struct.unpack_from("<2Q", data, CONTEXT.offset) for _, _, _, data in driver.launches]
    for (meeting, even, odd), header in zip(launched(driver), headers, strict=True):
        assert meeting == contexts.EARLY
        behind = contexts.HEADER_BYTES + 16 * contexts.CAPACITY + contexts.PAD_BYTES + 1024  # and the scratch in front
        assert even == tuple(h + behind for h in header)
        assert odd == tuple(at + contexts.EARLY_BYTES for at in even)


def test_much_scratch_waits_until_all_have_begun() -> None:
    driver = FakeDriver()

    def run(rank: int) -> Any:
        call(1 << 16)
        return groups.current().context.scratch.reach.peers  # type: ignore[union-attr]

    arenas = threads(run, 2, driver)
    for (meeting, even, odd), arena in zip(launched(driver), arenas, strict=True):
        assert meeting == 0
        assert even == odd == tuple(base + 1024 for base in arena)


def test_one_rank_meets_nobody() -> None:
    driver = FakeDriver()
    group = solo(driver)
    scratch = {"slots": ((8, 64), torch.float32)}
    launch(Call(group, EARLY, FakeModule(EARLY), {"a": A}, {"n": 0, "x": 0.0}, SIGNALS, scratch, "alone"))
    ((meeting, even, odd),) = launched(driver)
    assert meeting == 0
    assert even[0] == odd[0]


@pytest.mark.parametrize(
    ("world", "local", "attributes"), [(1, False, (True, True)), (1, True, (False, True)), (2, False, (True, False))]
)
def test_how_a_launch_is_submitted(world: int, local: bool, attributes: tuple[bool, bool]) -> None:
    """Blocks that wait for each other begin together; where no other rank is met, right behind the launch before."""
    driver, made = FakeDriver(), replace(EARLY, local=local)

    def run(rank: int) -> None:
        scratch = {"slots": ((8, 64), torch.float32)}
        launch(Call(groups.current(), made, FakeModule(made), {"a": A}, {"n": 0, "x": 0.0}, SIGNALS, scratch, "some"))

    threads(run, world, driver)
    assert driver.attributes == [attributes] * world


@pk.kernel
def either(x: pk.Global, MAPPED: pk.constexpr):
    """Through a tensor map or by pointer."""
    ring = pk.pipeline(2, t=pk.shared((8, 64), x.dtype))
    box, _ = pk.scratch((pk.world_size(), 8, 64), x.dtype), pk.signals(1)
    for i in pk.tasks(1):
        with pk.storer():
            if MAPPED:
                with ring.fill() as s:
                    pk.load_async(s.t, box[pk.rank()], (0, 0, 0))
        with pk.consumer(warpgroups=1):
            if MAPPED:
                with ring.drain() as s:
                    pk.store(x, pk.load(s.t), (0, 0))
            else:
                pk.store(box[pk.rank()], pk.load(x, (0, 0), (8, 64)), (0, 0, 0))


def test_ranks_agree_on_whether_a_launch_is_early() -> None:
    """What a captured constant decides, which may differ between ranks, is in no shape and no argument."""
    programs = [either.specialise(x=pk.spec(torch.float32, 2), MAPPED=mapped) for mapped in (False, True)]
    assert [p.source.early for p in programs] == [True, False]
    texts = [either._identity(p, SimpleNamespace(tensors={}), {}, {}) for p in programs]
    assert [text.count("; early") for text in texts] == [1, 0]

"""From a device's bytes to the text of a HangError."""

from __future__ import annotations

import dataclasses
import struct
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from pk.artifact import Site
from pk.errors import ArgumentError, HangError
from pk.runtime import launch as launching
from pk.runtime import records, symm
from pk.runtime.group import Group
from pk.runtime.records import Finding, Launched, describe, explain, read, unflatten
from tests.runtime.fake import FakeDriver, FakeModule, Machine, source
from tests.runtime.ranks import as_processes
from tests.runtime.test_launch import TEXT, call, hanging, record

KERNELS = [Launched(source(), {"begun": (2, 3, 5)}, "gather() symmetric: c (64, 128)")]
LIMITS = (30.0, 600.0)


def page(*which: bytes) -> bytes:
    return b"".join(which).ljust(records.PAGE_BYTES, b"\0")


def finding(data: bytes) -> Finding:
    return describe(read(page(data))[0], KERNELS)


def text(*which: bytes, notes: tuple[str, ...] = ()) -> str:
    return explain([finding(r) for r in which], notes, LIMITS)


TAIL = (
    "  Limits: PK_TIMEOUT_S=30, PK_ENTRY_TIMEOUT_S=600 (a late rank).  Outputs of this launch are NaN.\n"
    "  The group launches nothing until every rank calls pk.reset()."
)


def test_fields_are_where_the_device_writes_them() -> None:
    data = bytearray(128)
    for at, value in (
        (0, 1),
        (4, 3),
        (8, 0),
        (12, 1),
        (16, 5),
        (20, 9),
        (24, 7),
        (36, 11),
        (40, 6),
        (44, 12),
        (48, 13),
        (52, 2),
    ):
        struct.pack_into("<I", data, at, value)
    struct.pack_into("<2i", data, 28, -1, -2)
    struct.pack_into("<4i", data, 56, -3, 4, 5, 6)
    struct.pack_into("<2Q", data, 72, 1 << 40, 1 << 41)
    (r,) = read(page(bytes(data)))
    assert r == records.Record(1, 3, 0, 1, 5, 9, 7, -1, -2, 11, 6, 12, 13, 2, (-3, 4), 1 << 40, 1 << 41)


def test_incomplete_records_are_left_out() -> None:
    unfinished = b"\0\0\0\0" + record(0)[4:]
    assert [r.rank for r in read(page(unfinished, record(1)))] == [1]


@pytest.mark.parametrize(
    ("flat", "shape", "index"),
    [(13, (2, 3, 5), (0, 2, 3)), (29, (2, 3, 5), (1, 2, 4)), (3, (4,), (3,)), (0, (1, 1), (0, 0))],
)
def test_unflatten(flat: int, shape: tuple[int, ...], index: tuple[int, ...]) -> None:
    assert unflatten(flat, shape) == index


def test_the_whole_text() -> None:
    assert text(record(0, records.TOLD, 1, block=3, flat=0, needed=0), record(1)) == TEXT


def test_late_rank() -> None:
    assert text(record(2, records.ENTRY, 1, peer=3, seconds=600.0, tile=())) == (
        "kernel `gather`: rank 2 waited 600.0 s for rank 3 to begin this launch.\n"
        "  rank 2, block 17, loader\n"
        '  File "/home/me/kernels.py", line 20\n'
        "    with inputs.fill() as s:\n" + TAIL
    )


def test_disagreement_shows_both_launches() -> None:
    other = Launched(KERNELS[0].source, {}, "gather() symmetric: c (32, 128)")
    mine = describe(read(page(record(0, records.DISAGREE, 99, peer=1)))[0], KERNELS)
    theirs = describe(read(page(record(1, records.TOLD, 99, peer=0)))[0], [other])
    assert explain([theirs, mine], (), LIMITS).splitlines()[:3] == [
        "kernel `gather`: rank 0 and rank 1 launch different kernels or different shapes.",
        "  rank 1: gather() symmetric: c (32, 128)",
        "  rank 0: gather() symmetric: c (64, 128)",
    ]


def test_many_blocked_roles_are_counted() -> None:
    lines = text(record(0), *(record(1, records.TOLD, block=b) for b in range(12))).splitlines()
    assert lines[8] == "    rank 1 storer, block 0, tile (0, 2, 3): begun[0, 2, 3] is 0, needs 1 (kernels.py:41)"
    assert "    and 4 more" in lines


def test_unknown_kernels_and_no_records() -> None:
    unknown = describe(read(page(record(0, records.ASSERT)))[0], [])
    assert explain([unknown], (), LIMITS).startswith(
        "kernel `number 0`: rank 0: an assert failed.\n  rank 0, block 17, tile"
    )
    failed = dataclasses.replace(describe(read(page(record(0, records.ASSERT)))[0], KERNELS), what="too many rows")
    assert explain([failed], (), LIMITS).startswith("kernel `gather`: rank 0: an assert failed: too many rows.\n")
    assert explain([], ("rank 1 did not answer within 2 s",), LIMITS) == (
        "a peer gave up, and left no record.\n  rank 1 did not answer within 2 s\n" + TAIL
    )


def test_who_should_have_signalled_and_is_blocked_itself() -> None:
    stuck = [record(r, records.TOLD, block=b) for r in (3, 1) for b in (0, 1)]
    assert text(record(0, needed=3, seen=1), *stuck).splitlines()[4:9] == [
        "  2 more are due.  What signals `begun`:",
        "    storer, kernels.py:50: pk.signal_all(begun, (me, m, n))",
        "      blocked itself, see below, on ranks 1, 3",
        "  Blocked at that time:",
        "    rank 1 storer, block 0, tile (0, 2, 3): begun[0, 2, 3] is 0, needs 1 (kernels.py:41)",
    ]
    other = record(2, records.TOLD, 1)  # a loader: another role than the one that signals
    assert not any("blocked itself" in line for line in text(record(0), other).splitlines())


def test_a_counter_that_nothing_signals() -> None:
    alone = Launched(dataclasses.replace(source(), signallers=()), {"begun": (2, 3, 5)}, "")
    found = describe(read(page(record(0)))[0], [alone])
    assert explain([found], (), LIMITS).splitlines()[4] == "  No statement of the kernel signals `begun`."


def test_an_index_outside_its_bound() -> None:
    """PK_SANITIZE: index, bound and place; it is the cause, whatever else ran out of time."""
    line = "    pk.wait(begun, (owner, m, n), 1)"
    site = Site("storer", "bounds", "index 1 of `begun`", "/home/me/kernels.py", 41, line)
    made = Launched(dataclasses.replace(source(), sites=(*source().sites, site)), {"begun": (2, 3, 5)}, "")
    outside = record(1, records.BOUNDS, 2, flat=7, seen=7, needed=3, seconds=0)
    found = [describe(read(page(r))[0], [made]) for r in (record(0), outside)]
    assert explain(found, (), LIMITS).splitlines()[:5] == [
        "kernel `gather`: rank 1: index 1 of `begun` is 7, which is none of 0 to 2.",
        "  rank 1, block 17, storer, tile (0, 2, 3)",
        '  File "/home/me/kernels.py", line 41',
        "    pk.wait(begun, (owner, m, n), 1)",
        "  Blocked at that time:",
    ]


# ------------------------------------------------------------------------------------------------- between processes
def test_every_process_gets_the_whole_story(tmp_path: Path) -> None:
    machine = Machine(gpus=2)
    stuck = FakeModule(source(), hanging(record(1), record(0, records.TOLD, 1, block=3, flat=0, needed=0)))

    def run(group: Group) -> list[str]:
        c = symm.empty((64, 128), torch.bfloat16, group)
        call(group, stuck, c=c)
        texts = []
        for attempt in (lambda: launching.synchronize(group), lambda: call(group, c=c)):
            with pytest.raises(HangError) as error:
                attempt()
            texts.append(str(error.value))
        group.reset()
        call(group, c=c)
        launching.synchronize(group)
        group.close()
        return texts

    assert as_processes(run, tmp_path, 2, machine) == [[TEXT, TEXT]] * 2


def test_a_process_without_a_record_learns_from_its_abort_word(tmp_path: Path) -> None:
    machine = Machine(gpus=2)

    def raise_abort(driver: FakeDriver, data: bytes) -> None:
        hanging(record(1))(driver, data)
        for field in source().fields:
            if field.kind == "context":
                for header in struct.unpack_from("<2Q", data, field.offset):
                    driver.write(0, header + 256, b"\2\0\0\0")

    def run(group: Group) -> str:
        call(group, FakeModule(source(), raise_abort))
        group.barrier("both launched")
        with pytest.raises(HangError) as error:
            launching.synchronize(group)
        return str(error.value)

    first, second = as_processes(run, tmp_path, 2, machine)
    assert (
        first
        == second
        == TEXT.replace(
            "  Blocked at that time:\n    rank 0 loader, block 3, tile (0, 2, 3): waiting for inputs (kernels.py:20)\n",
            "",
        )
    )


def test_a_process_that_is_elsewhere_learns_within_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pk.runtime.context._COLLECT_S", 8.0)  # a loaded machine is slow to answer
    stuck = FakeModule(source(), hanging(record(1)))
    answered = threading.Event()

    def run(group: Group) -> float:
        c = symm.empty((64, 128), torch.bfloat16, group)
        call(group, stuck, c=c)
        if group.rank == 1:
            with pytest.raises(HangError) as error:
                launching.synchronize(group)
            assert "did not answer" not in str(error.value)
            answered.set()
            return 0.0
        start = time.monotonic()
        assert answered.wait(10)  # it makes no call of pk meanwhile
        assert group.context is not None
        with pytest.raises(HangError):
            group.context.check()
        return time.monotonic() - start

    assert as_processes(run, tmp_path, 2, Machine(gpus=2))[0] < 10


def test_shapes_are_compared_before_the_first_launch(tmp_path: Path) -> None:
    def run(group: Group) -> None:
        call(group, identity=f"gather() symmetric: c ({32 + group.rank}, 128)")

    for error in as_processes(run, tmp_path, 2, Machine(gpus=2)):
        assert "  rank 1: gather() symmetric: c (33, 128)\n" in str(error)


def test_a_late_rank_does_not_hold_up_the_first_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "_PATIENCE_S", 0.2)
    drivers = [FakeDriver(Machine(gpus=1)) for _ in range(2)]
    order: list[int] = []

    def run(group: Group) -> Any:
        c = symm.empty((64, 128), torch.bfloat16, group)
        call(group, c=c)
        if group.rank == 1:
            time.sleep(0.6)  # compiles
        call(group, c=c, identity="another shape")
        order.append(group.rank)
        return group.exchange("after", b"%d" % group.rank)

    assert as_processes(run, tmp_path, 2, Machine(gpus=2), drivers, [0, 0]) == [[b"0", b"1"]] * 2
    assert order == [0, 1]
    assert [len(d.launches) for d in drivers] == [2, 2]


def test_a_process_whose_peer_does_not_launch_is_stopped(tmp_path: Path) -> None:
    """One rank passes a private tensor and goes on after the error; the other's kernel must not wait for minutes."""

    def run(group: Group) -> str:
        c = symm.empty((64, 128), torch.bfloat16, group)
        call(group, c=c)
        if group.rank == 1:
            with pytest.raises(ArgumentError):
                call(group, c=torch.zeros(64, 128, dtype=torch.bfloat16))
            group.barrier("after the error")
            return ""
        call(group, c=c)
        group.barrier("after the error")
        end = time.monotonic() + 5
        while group.context is not None and group.context.hang is None and time.monotonic() < end:
            time.sleep(0.02)
        assert group.context is not None
        assert group.context.aborted()
        with pytest.raises(HangError) as error:
            call(group, c=c)
        return str(error.value)

    text_ = as_processes(run, tmp_path, 2, Machine(gpus=2))[0]
    assert "rank 1 did not launch: ArgumentError: `c` is not symmetric" in text_


def test_a_mistake_that_all_processes_make_stops_nothing(tmp_path: Path) -> None:
    def run(group: Group) -> int:
        c = symm.empty((64, 128), torch.bfloat16, group)
        for tensor in (torch.zeros(64, 128, dtype=torch.bfloat16), c):
            try:
                call(group, c=tensor)
            except ArgumentError:
                continue
        assert group.context is not None
        assert group.context.refusal() is None
        return len(group.driver.launches)  # type: ignore[attr-defined]

    assert as_processes(run, tmp_path, 2, Machine(gpus=2)) == [1, 1]

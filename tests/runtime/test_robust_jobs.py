"""Jobs of several processes over gloo: groups destroyed in any order, forks, Ctrl-C, ranks that fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as distributed

from tests.runtime.toy import ROOT


def job(name: str, world: int) -> list[tuple[Any, str]]:
    """What each rank prints, and its standard error."""
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {**os.environ, "PK_BACKEND": "sim", "OMP_NUM_THREADS": "1"}
    members = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.runtime.robust_jobs", name, str(rank), str(world), str(store.port)],
            env=env, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    try:
        found = [member.communicate(timeout=200) for member in members]
    finally:
        for member in members:
            member.kill()
    return [(json.loads(out) if out.strip() else None, err) for out, err in found]


def test_groups_are_destroyed_in_any_order() -> None:
    found = job("any_order", 3)
    closed = "<pk group: rank {} of 2, sim> has destroyed its process group"
    for rank, (answer, err) in enumerate(found):
        assert answer is not None, err
        sums, places, refused, used, heaps, left = answer
        assert sums == [[3.0, 6.0], [3.0, 5.0, 6.0], [5.0, 6.0]][rank]
        assert places == [[0, 0], [1, 0]]
        assert refused is True
        assert used == closed.format([0, 1, 1][rank])
        assert heaps == [None] * len(heaps) and left == 0


def test_a_group_that_one_rank_has_destroyed() -> None:
    found = job("one_destroys", 3)
    assert [answer for answer, _ in found] == [
        "", ["rank 0 has destroyed its process group, so a barrier cannot go on.", True, True], "",
    ], found  # fmt: skip


def test_ranks_that_have_destroyed_their_groups() -> None:
    for rank, (answer, err) in enumerate(job("destroyed", 2)):
        assert answer is not None, err
        shapes, told, alone = answer
        assert shapes == [[32, 16]] * 3
        gone = "the process group '{}' passed as group= has been destroyed (torch.distributed.destroy_process_group)."
        world = (
            f"torch.distributed, in which this process was rank {rank} of 2, has been destroyed "
            "(destroy_process_group), so pk has no group for it."
        )
        sub = gone.format(told[0].split("'")[1])
        mine = f"<pk group: rank {rank} of 2, sim> has destroyed its process group"
        assert told == [sub, sub, world, world, sub, sub, mine, mine, world]
        assert alone == 1, "pk.finalize() did not end the job that this process was in"


def test_forked_children_are_no_ranks() -> None:
    refused = (
        "this process  was forked from one that is <pk group: rank {} of 2, sim>, and is no rank itself: neither CUDA "
        "nor the connections to other ranks survive a fork."
    )
    for rank, (answer, err) in enumerate(job("forked", 2)):
        assert answer is not None, err
        items, told, sums, size, named = answer
        assert items == [0, 1, 2, 3] and sums == 3.0 and size == 4 and not named
        text = refused.format(rank)
        assert told == [text, f"<pk group: rank {rank} of 2, sim> belongs to the process that forked this one.", text]


def test_a_rank_that_raises_before_its_launch() -> None:
    (told, _), (nothing, err) = job("raises", 2)
    assert told == "rank 1 has left: its process has ended by ValueError: no data, so a launch cannot go on."
    assert nothing is None and "ValueError: no data" in err


def test_ctrl_c_on_one_rank() -> None:
    (told, _), (nothing, err) = job("interrupted", 2)
    assert told.startswith("rank 1 has left: its process has ended by KeyboardInterrupt"), told
    assert nothing is None and "KeyboardInterrupt" in err


def test_ranks_with_different_luck_in_allocation() -> None:
    (first, _), (second, err) = job("different_luck", 2)
    assert first and second, err
    assert second[0] == "no room"
    assert first[0] == "allocating pk.empty((4096,), torch.float32) failed on rank 1: MemoryError: no room"
    assert first[1:] == second[1:] == [3.0, 1.0, [1, 0]]


SPAWNS = """
import sys, time
import pk

def wait(rank):
    if rank == 0:
        print("running", flush=True)
        pk.runtime.group.current().barrier("never")
    time.sleep(60)

if __name__ == "__main__":
    pk.spawn(wait, 2, sys.argv[1])
"""


@pytest.mark.parametrize("backend", ["sim", "sim-processes"])
def test_ctrl_c_ends_a_spawn(backend: str, tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(SPAWNS)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "waits.py"), backend], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    ) as program:  # fmt: skip
        assert program.stdout is not None
        assert program.stdout.readline() == "running\n"
        start = time.monotonic()
        program.send_signal(signal.SIGINT)
        _, err = program.communicate(timeout=100)
    assert "KeyboardInterrupt" in err
    assert program.returncode != 0
    assert time.monotonic() - start < 40

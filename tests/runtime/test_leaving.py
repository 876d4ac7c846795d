"""Ranks of a launcher: process groups that are not initialised, and processes that end while others wait for them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as distributed

import pk
from pk.errors import BackendError, PeerFailed
from pk.runtime import group as groups
from pk.runtime.link import Link, leave_store
from tests.runtime.toy import ROOT

# argv: rank, world, port of a store, whether rank 0 keeps it, who leaves, when
JOB = """
import faulthandler, sys
faulthandler.dump_traceback_later(80)  # goes to stderr, which a failing test shows
import torch, torch.distributed as dist
import pk
rank, world, port, keeps = map(int, sys.argv[1:5])
who, when = sys.argv[5:]
store = dist.TCPStore("127.0.0.1", port, is_master=bool(keeps and rank == 0), wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=world)

def leave(now):
    if now == when and str(rank) == who:
        sys.exit(0)

leave("before the group")
try:
    pk.device()
    leave("after the group")
    pk.empty((4, 4), torch.bfloat16)
    leave("after memory")
    pk.runtime.group.current().meet("a sum", torch.ones(2), lambda parts: parts)
    print("came through")
except pk.errors.PeerFailed as error:
    print(error)
"""


def job(tmp_path: Path, who: int, when: str, rank_0_keeps_the_store: bool = False) -> list[str]:
    """What three ranks print; this process keeps the store, as torchrun does, or rank 0."""
    script, world = tmp_path / "job.py", 3
    script.write_text(JOB)
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port, keeps = store.port, "0"
    if rank_0_keeps_the_store:
        del store
        keeps = "1"
    env = {**os.environ, "PK_BACKEND": "sim", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    members = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(world), str(port), keeps, str(who), when], env=env,
            stdout=subprocess.PIPE, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    try:
        return [member.communicate(timeout=90)[0].strip() for member in members]
    finally:
        for member in members:
            member.kill()


@pytest.mark.parametrize(
    ("who", "when", "what"),
    [
        (1, "before the group", "making a group"),
        (2, "after the group", "symmetric allocation"),
        (0, "after memory", "a sum"),
    ],
)
def test_a_process_that_ends_releases_the_others(tmp_path: Path, who: int, when: str, what: str) -> None:
    said = job(tmp_path, who, when)
    text = f"rank {who} has left: its process has ended, so {what} cannot go on."
    assert said == ["" if rank == who else text for rank in range(3)]


def test_the_process_that_keeps_the_store_ends(tmp_path: Path) -> None:
    for text in job(tmp_path, 0, "after the group", rank_0_keeps_the_store=True)[1:]:
        assert "has left: its process has ended" in text or "cannot reach the store of its process group" in text


def test_processes_that_end_in_their_own_time_disturb_nobody(tmp_path: Path) -> None:
    assert job(tmp_path, -1, "") == ["came through"] * 3


def test_a_store_that_is_gone() -> None:
    code = "import torch.distributed as d, time; s = d.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)"
    code += "; print(s.port, flush=True); time.sleep(60)"
    keeper = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert keeper.stdout is not None
    store = distributed.TCPStore("127.0.0.1", int(keeper.stdout.readline()), is_master=False, wait_for_workers=False)
    link = Link(store, 0, 2)
    keeper.send_signal(signal.SIGKILL)
    keeper.wait()
    start = time.monotonic()
    with pytest.raises((PeerFailed, RuntimeError)):
        link.exchange("x", b"", 600)
    with pytest.raises(PeerFailed, match="rank 0 cannot reach the store of its process group, so x cannot go on: "):
        link._wait("pk/1/1/1/0", 1, "x", time.monotonic() + 600)
    leave_store(store, 0, "has left", 1)
    assert time.monotonic() - start < 30


def test_the_first_to_leave_is_named(tmp_path: Path) -> None:
    ends = [Link(distributed.FileStore(str(tmp_path / "store"), -1), rank, 3) for rank in range(3)]
    leave_store(ends[1].store, 1, "has left", 1)
    leave_store(ends[2].store, 2, "has left", 1)
    with pytest.raises(PeerFailed, match=r"^rank 1 has left, so x cannot go on\.$"):
        ends[0].exchange("x", b"", 600)


def test_a_launchers_rank_without_a_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(groups, "_memo", groups._Memo())
    with pytest.raises(BackendError) as caught:
        groups.current()
    assert str(caught.value) == (
        "this process is rank 1 of 4 (RANK=1, WORLD_SIZE=4, as torchrun sets them), but torch.distributed is not "
        "initialised, so pk has no group for it.\n"
        "  Call torch.distributed.init_process_group() first.  For ranks that work alone, unset RANK and WORLD_SIZE."
    )
    assert pk.spawn(lambda rank: groups.current().world_size, 2, "sim") == [2, 2]


@pytest.mark.parametrize("values", [{"RANK": "0", "WORLD_SIZE": "1"}, {"WORLD_SIZE": "4"}, {"RANK": "1"}, {}])
def test_ranks_that_are_alone(values: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(groups, "_memo", groups._Memo())
    assert groups.current().world_size == 1

"""Ranks whose process is killed, or ends without a word: the others fail in seconds, and say which rank it was."""

from __future__ import annotations

import os
import re
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as distributed

from pk.errors import HangError, PeerFailed
from pk.runtime import alive, launch, symm, watch
from pk.runtime.alive import Process
from pk.runtime.context import GEN_OFFSET
from pk.runtime.group import Group
from pk.runtime.link import Link
from tests.runtime.fake import FakeDriver, FakeModule, Machine
from tests.runtime.ranks import as_processes, links
from tests.runtime.test_launch import SOURCE, call, fields, record
from tests.runtime.toy import ROOT

DIED = r"has died: its process \(pid \d+\) was killed, or ended without a word"


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def described(process: subprocess.Popen[bytes]) -> Process:
    found, me = alive._look(process.pid), alive.myself()
    assert found is not None and me is not None
    return Process(process.pid, found[1], me.space)


# ------------------------------------------------------------------------------------------------------- one process
def test_a_process_that_is_killed_has_ended_before_anyone_reaps_it(victim: subprocess.Popen[bytes]) -> None:
    process = described(victim)
    assert not alive.ended(process)
    victim.send_signal(signal.SIGKILL)
    end = time.monotonic() + 5
    while not alive.ended(process) and time.monotonic() < end:
        time.sleep(0.01)
    assert alive.ended(process)  # a zombie: nobody has waited for it
    assert victim.poll() is not None
    assert alive.ended(process)


def test_a_pid_that_is_used_again_is_another_process(victim: subprocess.Popen[bytes]) -> None:
    process = described(victim)
    assert alive.ended(Process(process.pid, process.started - 1, process.space))


def test_a_process_of_another_host_or_container_is_taken_to_live() -> None:
    assert not alive.ended(Process(1 << 30, 0, "elsewhere"))
    me = alive.myself()
    assert me is not None and not alive.ended(me)


def test_encoding() -> None:
    process = Process(7, 1 << 40, "boot/pid:[4026531836]")
    assert alive.decode(process.encode()) == process
    assert alive.decode(b"") is None


# ------------------------------------------------------------------------------------------------------ host meetings
def killed(end: Link, rank: int, victim: subprocess.Popen[bytes]) -> None:
    """Rank ``rank`` is ``victim``, as far as ``end`` knows, and is killed."""
    end._processes[rank] = described(victim)
    victim.kill()
    victim.wait()


def test_who_waits_for_a_killed_rank_is_released(tmp_path: Path, victim: subprocess.Popen[bytes]) -> None:
    ends = links(tmp_path, 3)
    killed(ends[0], 1, victim)
    start = time.monotonic()
    with pytest.raises(PeerFailed, match=rf"^rank 1 {DIED}, so x cannot go on\.$"):
        ends[0].exchange("x", b"", 600)
    with pytest.raises(PeerFailed, match=rf"^rank 1 {DIED}"):  # told by rank 0; it looks at no process of its own
        ends[2].exchange("x", b"", 600)
    assert time.monotonic() - start < 5


def test_what_a_rank_gave_before_it_died_counts(tmp_path: Path, victim: subprocess.Popen[bytes]) -> None:
    ends = links(tmp_path, 2)
    ends[1]._post("pk/1/1/1", b"x\0payload")
    killed(ends[0], 1, victim)
    assert ends[0].exchange("x", b"mine", 600) == [b"mine", b"payload"]


# argv: rank, world, port of the store, how rank 1 ends
JOB = """
import faulthandler, os, signal, sys
faulthandler.dump_traceback_later(80)
import torch, torch.distributed as dist
import pk
rank, world, port = map(int, sys.argv[1:4])
store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=world)

@pk.kernel
def touch(x: pk.Global, c: pk.Parallel):
    s = pk.signals(1)
    for i in pk.tasks(1):
        with pk.storer():
            pk.barrier(s, 0)

c = pk.empty((8, 8), torch.bfloat16)
touch(torch.zeros(8, 8, dtype=torch.bfloat16), c)
print("ready", flush=True)
if rank == 1:
    if sys.argv[4] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    dist.destroy_process_group()
    sys.exit(0)
try:
    touch(torch.zeros(8, 8, dtype=torch.bfloat16), c)
    print("came through")
except pk.errors.PeerFailed as error:
    print(error)
os._exit(0)
"""


@pytest.mark.parametrize("how", ["kill", "destroy"])
def test_a_rank_that_says_nothing_releases_the_others(tmp_path: Path, how: str) -> None:
    """As under a launcher that does not look after its ranks.  The time-out for late ranks is 600 s."""
    script, world = tmp_path / "job.py", 2
    script.write_text(JOB)
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {**os.environ, "PK_BACKEND": "sim", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    members = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(world), str(store.port), how], env=env, stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    try:
        said = [member.communicate(timeout=90)[0].split("\n", 1) for member in members]
    finally:
        for member in members:
            member.kill()
    assert [text[0] for text in said] == ["ready"] * world
    assert "rank 1 has" in said[0][1] and "cannot go on" in said[0][1], said
    assert members[1].returncode == (-9 if how == "kill" else 0)


# --------------------------------------------------------------------------------------------------------- the watcher
def begun(*ranks: int) -> Callable[[FakeDriver, bytes], None]:
    """A kernel that has begun on ``ranks``, as its headers show, and waits for the others to."""

    def run(driver: FakeDriver, data: bytes) -> None:
        context = fields(data)["context"]
        headers, me = struct.unpack_from("<8Q", context), struct.unpack_from("<I", context, 88)[0]
        for rank in ranks:
            driver.write(0, headers[me] + 8 * rank, struct.pack("<Q", 77 << 32 | 1))

    return run


def test_a_kernel_that_waits_for_a_dead_rank_to_begin_is_stopped(
    tmp_path: Path, victim: subprocess.Popen[bytes], capfd: pytest.CaptureFixture[str]
) -> None:
    machine, meet = Machine(gpus=2), threading.Barrier(2)

    def run(group: Group) -> tuple[str, float]:
        c = symm.empty((64, 128), torch.bfloat16, group)
        call(group, c=c)
        meet.wait(10)
        if group.rank == 1:  # stands for the process that is killed
            meet.wait(10)
            return "", 0
        call(group, FakeModule(SOURCE, begun(0)), c=c)  # rank 1 never launches it
        context = group.context
        assert context is not None
        said: watch.Said = watch.weakref.WeakKeyDictionary()
        watch.look_at_peers(context, said)
        assert context.hang is None and not context.aborted()  # rank 1 lives: it is only late
        killed(group.link, 1, victim)  # type: ignore[arg-type]
        start = time.monotonic()
        while context.hang is None and time.monotonic() < start + 10:
            time.sleep(0.02)
        with pytest.raises(HangError) as error:
            launch.synchronize(group)
        seconds = time.monotonic() - start
        assert context.aborted()
        meet.wait(10)
        return str(error.value), seconds

    text, seconds = as_processes(run, tmp_path, 2, machine)[0]
    assert re.match(rf"rank 1 {DIED}\.\n", text), text
    assert seconds < 4
    assert "and a kernel waits for it; see HangError" in capfd.readouterr().err


def test_a_dead_rank_that_did_its_part_disturbs_nobody(tmp_path: Path, victim: subprocess.Popen[bytes]) -> None:
    machine, meet = Machine(gpus=2), threading.Barrier(2)

    def run(group: Group) -> bool:
        c = symm.empty((64, 128), torch.bfloat16, group)
        call(group, c=c)
        meet.wait(10)
        if group.rank == 1:
            meet.wait(30)
            return True
        context = group.context
        assert context is not None and context.segment is not None
        call(group, FakeModule(SOURCE, begun(0, 1)), c=c)  # both have begun; rank 0 still works
        killed(group.link, 1, victim)  # type: ignore[arg-type]
        assert context.departed() is None
        group.driver.write(0, context.segment.base + GEN_OFFSET, struct.pack("<I", 1))  # and has ended
        assert context.departed() is None
        time.sleep(1.5)  # the watcher looks, too
        launch.synchronize(group)
        meet.wait(30)
        return context.hang is None and not context.aborted()

    assert as_processes(run, tmp_path, 2, machine) == [True, True]


def test_the_error_tells_of_the_dead_rank_and_of_who_waited(tmp_path: Path, victim: subprocess.Popen[bytes]) -> None:
    """The record that the stopped kernel leaves says for whom it waited."""
    machine, meet = Machine(gpus=2), threading.Barrier(2)

    def run(group: Group) -> str:
        c = symm.empty((64, 128), torch.bfloat16, group)
        call(group, c=c)
        meet.wait(10)
        if group.rank == 1:
            meet.wait(30)
            return ""
        context = group.context
        assert context is not None
        stopped = record(0, 7, 0, peer=1, flat=1, seen=0, needed=2, seconds=1.25)
        call(group, FakeModule(SOURCE, begun(0)), c=c)
        killed(group.link, 1, victim)  # type: ignore[arg-type]
        with context._lock:  # the watcher must not report before the record is there
            while context.gone is None:
                time.sleep(0.01)
            page = context.host_page
            group.driver.write(0, page, stopped)
        with pytest.raises(HangError) as error:
            launch.synchronize(group)
        meet.wait(30)
        return str(error.value)

    lines = as_processes(run, tmp_path, 2, machine)[0].splitlines()
    assert "has died: its process" in lines[0]
    assert lines[1].startswith("kernel `gather`: rank 0 ")
    assert not any("did not answer" in line for line in lines), lines

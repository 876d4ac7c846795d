"""What never ends without pk, on a GPU: a signal that is not sent, a rank that is killed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as distributed

import pk
from pk import errors
from pk.runtime.group import current
from tests.gpu.passing import pass_on

pytestmark = pytest.mark.gpu(1)

ROOT = Path(__file__).parent.parent.parent
LIMIT = 3.0


@pk.kernel
def one_forgets(x: pk.Global, c: pk.Parallel, culprit: int):
    """Every rank waits for all; rank `culprit` does not signal."""
    arrived = pk.signals(2, 3)
    for i in pk.tasks(2):
        with pk.storer():
            if pk.rank() != culprit:
                pk.signal_all(arrived, (i, 2))
            pk.wait(arrived, (i, 2), pk.world_size())


def _missing_signal(rank: int, world: int) -> tuple[str, float, bool]:
    x = torch.ones(64, 64, dtype=torch.bfloat16, device=pk.device())
    c = pk.empty((64, 64), torch.bfloat16)
    one_forgets(x, c, -1)  # compiled, loaded and launched once, so that the next launches begin together
    pk.synchronize()
    current().barrier("all are here")
    start = time.perf_counter()
    try:
        one_forgets(x, c, world - 1)
        pk.synchronize()
    except errors.HangError as error:
        took, text = time.perf_counter() - start, str(error)
        pk.reset()  # the process survives
        one_forgets(x, c, -1)
        pk.synchronize()
        return text, took, bool((x + x == 2).all())
    return "", time.perf_counter() - start, False


@pytest.mark.parametrize(("backend", "world"), [("cuda-threads", 2), ("cuda-threads", 4), ("cuda-processes", 2)])
def test_a_missing_signal_is_an_error_on_every_rank_in_time(
    backend: str, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PK_TIMEOUT_S", str(LIMIT))
    for text, seconds, alive in pk.spawn(_missing_signal, world, backend, (world,)):
        assert re.search(r"kernel `one_forgets`: rank \d waited 3\.\d s for arrived\[[01], 2\]", text), text
        assert f"which is {world - 1} and must reach {world}" in text
        assert "storer" in text and "test_hangs.py" in text
        assert "1 more is due.  What signals `arrived`:\n    storer, test_hangs.py:" in text
        assert "pk.signal_all(arrived, (i, 2))" in text
        assert LIMIT <= seconds <= LIMIT + 2
        assert alive


# argv: rank, world, port of the store, how rank 1 ends, when.  Not pk.spawn, which would end the others itself.
JOB = """
import faulthandler, json, os, signal, sys, time
faulthandler.dump_traceback_later(100, exit=True)
import torch, torch.distributed as dist
import pk
from tests.gpu.passing import pass_on
rank, world, port = map(int, sys.argv[1:4])
how, when = sys.argv[4:]
torch.cuda.set_device(rank % torch.cuda.device_count())
store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
x = torch.ones(256, 256, dtype=torch.bfloat16, device=pk.device())
y = pk.empty((256, 256), torch.bfloat16)
for _ in range(3):
    pass_on(x, y)
pk.synchronize()
store.add("ready", 1)
while store.add("ready", 0) < world:
    time.sleep(0.01)

def end():
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "exit":
        os._exit(0)
    dist.destroy_process_group()
    sys.exit(0)

if rank == 1 and when == "before":
    time.sleep(1.0)  # the others wait on the device by now
    end()
start = time.monotonic()
text = ""
try:
    pass_on(x, y)
    if rank == 1:
        pk.synchronize()
        end()
    pk.synchronize()
    if when == "between":  # what all did is not disturbed by the end of one
        time.sleep(2.5)
        pk.synchronize()
        assert bool((y == 1).all())
        print(json.dumps({"between": "fine"}), flush=True)
        start = time.monotonic()
        pass_on(x, y)
        pk.synchronize()
except pk.errors.PkError as error:
    text = f"{type(error).__name__}: {error}"
print(json.dumps({"text": text, "seconds": time.monotonic() - start}), flush=True)
torch.cuda.synchronize()
free = torch.ones(8, device="cuda").sum().item()  # the CUDA context is whole
print(json.dumps({"free": free}), flush=True)
os._exit(0)
"""


def job(tmp_path: Path, how: str, when: str) -> list[list[dict[str, Any]]]:
    """What the surviving ranks print, parsed."""
    script, world = tmp_path / "job.py", 2
    script.write_text(JOB)
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {**os.environ, "PK_BACKEND": "cuda", "PYTHONPATH": str(ROOT), "CUDA_MODULE_LOADING": "EAGER"}
    members = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(world), str(store.port), how, when], env=env,
            stdout=subprocess.PIPE, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    try:
        said = [member.communicate(timeout=150)[0] for member in members]
    finally:
        for member in members:
            member.kill()
    return [
        [json.loads(line) for line in text.splitlines() if line.startswith("{")]
        for rank, text in enumerate(said)
        if rank != 1
    ]


@pytest.mark.parametrize("how", ["kill", "exit", "destroy"])
def test_a_rank_that_is_killed_before_it_begins_is_an_error_in_seconds(tmp_path: Path, how: str) -> None:
    """The others already wait on the device for its entry word, whose own limit is 600 s."""
    for told, after in job(tmp_path, how, "before"):
        assert re.search(r"rank 1 has (died: its process \(pid \d+\)|left)", told["text"]), told
        assert "pass_on" in told["text"] or told["text"].startswith("PeerFailed"), told
        assert told["seconds"] < 8
        assert after["free"] == 8


@pytest.mark.parametrize("how", ["kill", "destroy"])
def test_a_rank_that_ends_after_its_part_disturbs_nobody_until_it_is_needed(tmp_path: Path, how: str) -> None:
    for between, told, after in job(tmp_path, how, "between"):
        assert between == {"between": "fine"}
        assert re.search(r"rank 1 has (died: its process \(pid \d+\)|left)", told["text"]), told
        assert told["seconds"] < 8
        assert after["free"] == 8


def _dies(rank: int) -> None:
    x = torch.ones(256, 256, dtype=torch.bfloat16, device=pk.device())
    y = pk.empty((256, 256), torch.bfloat16)
    pass_on(x, y)
    pk.synchronize()
    if rank == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), 9)
    pass_on(x, y)
    pk.synchronize()


def test_spawn_names_the_rank_that_was_killed() -> None:
    start = time.monotonic()
    with pytest.raises(errors.RankError, match=r"^rank 1 was killed by SIGKILL"):
        pk.spawn(_dies, 2, "cuda-processes")
    assert time.monotonic() - start < 60

"""Memory, groups and failures on a GPU: what tests/runtime/test_robust*.py shows on a machine of host memory."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as distributed

import pk
import pk.ops
from pk import errors
from pk.ops import fused
from pk.runtime import retired, symm
from tests.gpu.passing import Passing, pass_on, record, settle

pytestmark = pytest.mark.gpu(1)

ROOT = Path(__file__).parent.parent.parent
MIB = 1 << 20


def used() -> int:
    """Bytes of this GPU that are taken, by whomever, torch's reserve given back."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


# ------------------------------------------------------------------------------------------------------------- memory
def many_sizes(rank: int, world: int) -> int:
    """400 sizes, 12 GiB a rank in all; how many bytes more are taken at the end than after the first 20."""
    work = Passing(rank, world)
    work.warm_up()
    early = 0
    for n in range(400):
        t = pk.empty((32 * MIB + n * 8192,), torch.uint8)
        t.fill_(rank)
        work.step()
        del t
        if n == 20:
            settle("early")
            early = used()
            settle("early, counted")
    settle("late")
    late = used()
    settle("late, counted")
    work.check(400)
    return late - early


@pytest.mark.parametrize(("backend", "world"), [("cuda-threads", 1), ("cuda-threads", 4), ("cuda-processes", 2)])
def test_many_sizes_do_not_add_up(backend: str, world: int) -> None:
    for more in pk.spawn(many_sizes, world, backend, (world,)):
        assert more <= world * symm.SPARE + 64 * MIB


def _out_of_memory(rank: int, world: int) -> str:
    """A piece that no GPU has, on top of a spare one; all ranks raise, and all go on."""
    work = Passing(rank, world)
    work.warm_up()
    pk.empty((200 * MIB,), torch.uint8)
    text = ""
    try:
        pk.empty((1 << 42,), torch.uint8)
    except errors.BackendError as error:
        text = str(error)
    for _ in range(3):
        work.step()
    work.check(3)
    return text


@pytest.mark.parametrize("backend", ["cuda-threads", "cuda-processes"])
def test_out_of_memory_is_an_error_on_all_ranks_and_nothing_more(backend: str) -> None:
    for text in pk.spawn(_out_of_memory, 2, backend, (2,)):
        assert "OUT_OF_MEMORY" in text


def test_spawns_leave_no_memory_behind_even_when_they_fail() -> None:
    def fails(rank: int) -> None:
        work = Passing(rank, 2)
        work.warm_up()
        t = pk.empty((64 * MIB,), torch.uint8)
        if rank == 1:
            raise ValueError("before its launch")
        t.fill_(1)
        work.step()

    levels = []
    for _ in range(6):
        try:
            pk.spawn(fails, 2, "cuda-threads")
        except errors.RankError as error:
            assert "rank 1 raised ValueError: before its launch" in str(error)  # noqa: PT017
        gc.collect()
        retired.sweep()
        levels.append(used())
    assert levels[-1] - levels[1] < 32 * MIB, levels


# ------------------------------------------------------------------------------------------------ graphs, workspaces
def _workspace(rank: int, world: int) -> str:
    """A graph of an operator stays right when its workspace has grown since; growing under capture is refused."""
    a, b = (torch.randn(s, 256, device=pk.device()).bfloat16() for s in (64 * world, 4096))
    large = torch.randn(192 * world, 256, device=pk.device()).bfloat16()  # by the same kernel
    run: Callable[[torch.Tensor], torch.Tensor] = lambda x: pk.ops.matmul_all_reduce(x, b.T, config="c64x128")  # noqa: E731
    want = run(a)
    pk.synchronize()
    said: list[Any] = []

    def work() -> None:
        try:
            run(large)
        except errors.BackendError as error:
            said.append(str(error))
        said.append(run(a))

    graph = record(work)
    text, got = said
    eager = run(large)
    others = [pk.empty((64 * world, 128), torch.bfloat16).fill_(7) for _ in range(4)]
    pk.synchronize()
    settle("grown")
    graph.replay()
    pk.synchronize()
    assert torch.equal(got, want)
    assert all(bool((t == 7).all()) for t in others)
    assert torch.isfinite(eager).all()
    return text


@pytest.mark.parametrize("world", [2, 4])
def test_a_graph_and_a_workspace_that_grows(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "IN_PLACE_WAVES", 1e9)  # more rows are for the same kernel
    fused._under_way.cache_clear()
    for text in pk.spawn(_workspace, world, "cuda-threads", (world,)):
        assert "symmetric memory, which cannot be allocated while a CUDA graph is being captured" in text


def _global_mode(rank: int) -> None:
    work = Passing(rank, 2)
    work.warm_up()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        work.step()


def test_torch_cuda_graph_of_rank_threads_is_refused_with_its_reason() -> None:
    with pytest.raises(errors.RankError, match='which are threads of one process: in its capture mode, "global"'):
        pk.spawn(_global_mode, 2, "cuda-threads")


def _streams(rank: int, world: int) -> None:
    """Pieces that come and go while launches use them on several streams."""
    streams = [torch.cuda.Stream() for _ in range(3)]
    x = torch.full((256, 256), float(rank + 1), device=pk.device(), dtype=torch.bfloat16)
    torch.cuda.current_stream().synchronize()
    bad = torch.zeros((), device=pk.device(), dtype=torch.int64)
    left = float((rank - 1) % world + 1)
    for n in range(200):
        with torch.cuda.stream(streams[n % 3]):
            y = pk.empty((256, 256), torch.bfloat16)
            pass_on(x, y)
            got = (y != left).sum()
            del y
        torch.cuda.current_stream().wait_stream(streams[n % 3])
        bad += got
    pk.synchronize()
    assert int(bad) == 0


@pytest.mark.parametrize("world", [1, 2, 4])
def test_pieces_reused_on_several_streams(world: int) -> None:
    pk.spawn(_streams, world, "cuda-threads", (world,))


# ------------------------------------------------------------------------------------------------------------ processes
# argv: rank, world, port, what.  Each rank prints one line of JSON.
JOB = """
import faulthandler, json, os, signal, sys, time
faulthandler.dump_traceback_later(150, exit=True)
rank, world, port, what = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
if what == "one gpu each":
    os.environ["CUDA_VISIBLE_DEVICES"] = str(rank)
if what == "expandable":
    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
import torch, torch.distributed as dist
import pk
from pk.runtime.group import current
from tests.gpu.passing import pass_on
count = torch.cuda.device_count()
torch.cuda.set_device((world - 1 - rank) % count if what == "reversed" else rank % count)
store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
dist.init_process_group("gloo", store=store, rank=rank, world_size=world)

def right(group=None):
    g = current(group)
    x = torch.full((256, 256), g.rank + 1.0, device=pk.device(group), dtype=torch.bfloat16)
    y = pk.empty((256, 256), torch.bfloat16, group=group)
    for _ in range(3):
        pass_on(x, y, group=g)
    pk.synchronize(group)
    return bool((y == (g.rank - 1) % g.world_size + 1.0).all())

answer = [right()]
if what == "groups":
    pairs = [dist.new_group([0, 1]) for _ in range(3)]
    answer += [right(pair) for pair in pairs]
    for pair in pairs if rank == 0 else pairs[::-1]:
        dist.destroy_process_group(pair)
    del pairs, pair
    answer.append(right())
if what in ("sub-allocated", "expandable"):
    t = torch.zeros(1000 + 100 * rank, 256, device="cuda", dtype=torch.bfloat16)[100 * rank + 7 :][:256]
    try:
        pk.symmetric(t)
        x = torch.full((256, 256), rank + 1.0, device="cuda", dtype=torch.bfloat16)
        pass_on(x, t)
        pk.synchronize()
        answer.append(bool((t == (rank - 1) % world + 1.0).all()))
    except pk.errors.BackendError as error:
        answer.append(str(error))
    answer.append(right())
if what == "forked":
    class Items(torch.utils.data.Dataset):
        def __len__(self):
            return 2
        def __getitem__(self, at):
            try:
                pk.device()
            except pk.errors.PkError as error:
                return str(error)
    answer += list(torch.utils.data.DataLoader(Items(), num_workers=1, batch_size=None))[:1]
    answer.append(right())
if what == "interrupted" and rank == 1:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(10)
if what == "interrupted":
    try:
        pk.empty((256, 256), torch.bfloat16)
    except pk.errors.PkError as error:
        answer.append(str(error))
    print(json.dumps(answer), flush=True)
    os._exit(0)
pk.finalize()
print(json.dumps(answer), flush=True)
"""


def job(tmp_path: Path, what: str, world: int = 2) -> list[tuple[Any, str]]:
    """What the ranks print, and their standard error."""
    script = tmp_path / "job.py"
    script.write_text(JOB)
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {**os.environ, "PK_BACKEND": "cuda", "PYTHONPATH": str(ROOT), "CUDA_MODULE_LOADING": "EAGER"}
    members = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(world), str(store.port), what], env=env,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(world)
    ]  # fmt: skip
    try:
        said = [member.communicate(timeout=200) for member in members]
    finally:
        for member in members:
            member.kill()
    return [(json.loads(out) if out.strip() else None, err) for out, err in said]


@pytest.mark.parametrize(("what", "answers"), [("groups", 5), ("sub-allocated", 3), ("reversed", 1)])
def test_processes(what: str, answers: int, tmp_path: Path) -> None:
    for answer, err in job(tmp_path, what):
        assert answer == [True] * answers, (answer, err)


@pytest.mark.gpu(2)
def test_processes_that_see_one_gpu_each(tmp_path: Path) -> None:
    for answer, err in job(tmp_path, "one gpu each"):
        assert answer == [True], err


def test_expandable_segments(tmp_path: Path) -> None:
    """pk.empty works; torch's own memory cannot be shared between processes, which both ranks say."""
    for answer, err in job(tmp_path, "expandable"):
        assert answer is not None, err
        first, text, last = answer
        assert first and last
        assert text is True or "expandable_segments:True" in text


def test_forked_data_loader_workers(tmp_path: Path) -> None:
    for answer, err in job(tmp_path, "forked"):
        assert answer is not None, err
        assert answer[0] and answer[2]
        assert "was forked from one that is <pk group: rank" in answer[1]


def test_ctrl_c_on_one_rank(tmp_path: Path) -> None:
    (told, err), (nothing, _) = job(tmp_path, "interrupted")
    assert told is not None, err
    assert told[0] and "rank 1 has left: its process has ended by KeyboardInterrupt" in told[1]
    assert nothing is None


WAITS = """
import sys, time
import torch, pk
from tests.gpu.passing import copy_slowly

x = torch.ones(4096, 4096, device="cuda", dtype=torch.bfloat16)
y = torch.empty_like(x)
copy_slowly(x, y, 1)
pk.synchronize()
copy_slowly(x, y, 200_000)
print("running", flush=True)
pk.synchronize()
"""


def test_ctrl_c_while_a_kernel_runs(tmp_path: Path) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PK_BACKEND": "cuda"}
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "waits.py")], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "running\n"
        time.sleep(0.5)
        start = time.monotonic()
        program.send_signal(signal.SIGINT)
        _, err = program.communicate(timeout=100)
    assert "KeyboardInterrupt" in err
    assert time.monotonic() - start < 30

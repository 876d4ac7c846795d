"""Functions that spawned processes run: they must be importable."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch

import pk
from pk.runtime import symm
from pk.runtime.group import current


def total(rank: int, extra: int) -> dict[str, Any]:
    group = current()
    t = pk.empty((2, 3), torch.bfloat16)
    t.fill_(rank + extra)
    assert len(symm.lookup(t[1:], group)) == group.world_size
    summed = group.meet("sum", t, lambda parts: [sum(parts)] * len(parts))
    return {"rank": rank, "sum": summed, "tensor": t}


def hands_back(rank: int, given: Any) -> Any:
    return given


def fails(rank: int, culprit: int) -> None:
    if rank == culprit:
        raise ValueError(f"bad luck on {rank}")
    current().barrier("the end")


def fails_while_others_compute(rank: int, culprit: int) -> None:
    if rank == culprit:
        raise ValueError("bad luck")
    while True:
        time.sleep(0.001)


def killed(rank: int, culprit: int) -> None:
    if rank == culprit:
        os.kill(os.getpid(), signal.SIGKILL)
    current().barrier("the end")


def exits(rank: int) -> None:
    if rank == 0:
        os._exit(3)
    current().barrier("the end")


def returns_early(rank: int) -> None:
    if rank == 0:
        current().barrier("the end")


def under_torchrun(rank: int, world: int, store: str, results: Any) -> None:
    """One process of a gloo job: the default group, a sub-group, groups made again."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    try:
        results.put((rank, _distributed_work(rank, world)))
    except BaseException as error:  # noqa: BLE001
        results.put((rank, f"{type(error).__name__}: {error}"))
    pk.finalize()
    dist.destroy_process_group()


def _distributed_work(rank: int, world: int) -> list[Any]:
    import torch.distributed as dist

    from pk.errors import ArgumentError

    group = current()
    found: list[Any] = [(group.rank, group.world_size, group.backend), current() is group]
    found.append(group.meet("sum", torch.tensor(rank), lambda parts: [int(sum(parts))] * len(parts)))
    pair = dist.new_group([1, 2])
    if rank in (1, 2):
        sub = current(pair)
        found.append((sub.rank, sub.world_size, sub.exchange("x", b"%d" % rank)))
    else:
        try:
            current(pair)
        except ArgumentError as error:
            found.append(str(error).splitlines()[0])
    try:
        group.meet("broken", rank, lambda parts: 1 // 0)
    except ZeroDivisionError as error:
        found.append(str(error))
    return found

"""Jobs of several processes for test_robust.py: ``python -m tests.runtime.robust_jobs JOB RANK WORLD PORT``.

Each prints one line of JSON.
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import signal
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

import pk
from pk.errors import PkError
from pk.runtime import retired, symm
from pk.runtime.group import current


def said(work: Any) -> str:
    """The first line of the error of pk that ``work`` raises, or ""."""
    try:
        work()
    except PkError as error:
        return str(error).splitlines()[0]
    return ""


def total(x: torch.Tensor, group: Any = None) -> float:
    """The sum over the ranks of a symmetric tensor's first number."""
    parts: list[float] = current(group).meet("a total", float(x[0]), lambda p: [sum(p)] * len(p))
    return parts  # type: ignore[return-value]


def any_order(rank: int, world: int) -> Any:
    """Two sub-groups and the world, each with memory; destroyed in another order on each rank."""
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    mine = [pair for pair, members in zip(pairs, ([0, 1], [1, 2]), strict=True) if rank in members]
    whole = pk.empty((4,), torch.float32)
    whole.fill_(rank + 1)
    groups = [current(pair) for pair in mine]
    sums = []
    for pair in mine:
        part = pk.empty((4,), torch.float32, group=pair)
        part.fill_(rank + 1)
        sums.append(total(part, pair))
    world_group = current()
    names = [symm.place(whole, world_group)]
    for pair in mine if rank != 1 else mine[::-1]:
        dist.destroy_process_group(pair)
    last = mine[-1]
    del mine, pairs, pair
    sums.append(total(whole))  # the world works on
    again = pk.empty((8,), torch.float32)
    names.append(symm.place(again, world_group))
    refused = said(lambda: current(last))
    used = said(lambda: pk.empty((4,), torch.float32, group=groups[0]))
    pk.finalize()
    heaps = [group.heap for group in [*groups, world_group]]
    return [sums, names, "has been destroyed" in refused, used, heaps, len(retired._left)]


def one_destroys(rank: int, world: int) -> Any:
    """Rank 0 destroys a group that rank 1 still uses."""
    pair = dist.new_group([0, 1])
    if rank > 1:
        pk.finalize()
        return ""
    group = current(pair)
    pk.empty((4,), torch.float32, group=pair)
    start = time.monotonic()
    if rank == 0:
        dist.destroy_process_group(pair)
        del pair
        pk.finalize()
        return ""
    text = said(lambda: group.barrier("a barrier"))
    pk.finalize()  # quiet: nothing is lost
    return [text, time.monotonic() - start < 20, group.closed]


def destroyed(rank: int, world: int) -> Any:
    """What ranks are told of a group that they have destroyed, then of the world, all of them the same."""
    a, b = torch.zeros(16, 64).bfloat16(), torch.zeros(64, 16).bfloat16()
    pair, store = dist.new_group([0, 1]), dist.distributed_c10d._get_default_store()
    name, mine = pair.group_name, current(pair)
    gather = pk.ops.all_gather_matmul
    shapes = [list(gather(a, b, group=pair).shape), list(gather(a, b).shape)]
    dist.destroy_process_group(pair)
    told = [said(lambda group=group: gather(a, b, group=group)) for group in (pair, name)]
    world_group = current()
    dist.destroy_process_group()
    left = (None, None, pair, name, mine, world_group)
    told += [said(lambda group=group: gather(a, b, group=group)) for group in left]
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=world)
    shapes.append(list(gather(a, b).shape))
    dist.destroy_process_group()
    told.append(said(pk.device))
    pk.finalize()
    return [shapes, told, current().world_size]


class Numbers(torch.utils.data.Dataset[Any]):
    """Items made in forked workers, which do not use pk, or do."""

    def __init__(self, group: Any, uses_pk: bool) -> None:
        self.group, self.uses_pk = group, uses_pk

    def __len__(self) -> int:
        return 4

    def __getitem__(self, at: int) -> Any:
        if not self.uses_pk:
            return at
        return [said(pk.device), said(lambda: pk.empty((4,), "float32", group=self.group)), said(pk.finalize)]


def forked(rank: int, world: int) -> Any:
    """Data-loader workers; and a child that ends as a program does, which must not take its parent's leave."""
    x = pk.empty((4,), torch.float32)
    x.fill_(rank + 1)
    load = torch.utils.data.DataLoader
    items = [int(i) for i in load(Numbers(current(), False), num_workers=2, batch_size=None)]
    told = next(iter(load(Numbers(current(), True), num_workers=1, batch_size=None)))
    child = os.fork()
    if child == 0:
        atexit._run_exitfuncs()
        os._exit(0)  # torch's threads, which the child does not have, could not be joined
    os.waitpid(child, 0)
    pid = f"pid {os.getpid()}"
    sums = total(x)
    y = pk.empty((4,), torch.float32)
    pk.finalize()
    return [items, [t.split("(pid")[0] + t.partition(")")[2] for t in told], sums, y.numel(), pid in told[0]]


def raises(rank: int, world: int) -> Any:
    """Rank 1 raises before it launches; nobody catches it."""
    pk.empty((4,), torch.float32)
    if rank == 1:
        raise ValueError("no data")
    return said(lambda: current().barrier("a launch"))


def interrupted(rank: int, world: int) -> Any:
    """Ctrl-C reaches rank 1 alone."""
    pk.empty((4,), torch.float32)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)
    return said(lambda: current().barrier("a launch"))


def different_luck(rank: int, world: int) -> Any:
    """One rank cannot allocate: all raise, and all can go on."""
    first = pk.empty((4,), torch.float32)
    first.fill_(rank + 1)
    heap = symm.heap(current())
    make = heap._memory

    def poor(size: int, what: str) -> Any:
        if rank == 1:
            raise MemoryError("no room")
        return make(size, what)

    symm.Heap._memory = lambda self, size, what: poor(size, what)  # type: ignore[method-assign,assignment]
    try:
        pk.empty((4096,), torch.float32)
        text = ""
    except (PkError, MemoryError) as error:
        text = str(error)
    symm.Heap._memory = lambda self, size, what: make(size, what)  # type: ignore[method-assign,assignment]
    second = pk.empty((4096,), torch.float32)
    second.fill_(rank)
    answer = [text, total(first), total(second), symm.place(second, current())]
    pk.finalize()
    return answer


def main() -> None:
    faulthandler.dump_traceback_later(150, exit=True)
    job, rank, world, port = sys.argv[1], *map(int, sys.argv[2:5])
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    answer = globals()[job](rank, world)
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

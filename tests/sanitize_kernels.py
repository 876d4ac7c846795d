"""Kernels whose run-time arguments decide whether an index is outside its bound: for ``PK_SANITIZE``, CPU and GPU."""
# mypy: ignore-errors

from __future__ import annotations

import pk

TILE = 32


@pk.kernel
def counters(c: pk.Parallel, index: int, rank: int):
    """Every rank signals counter (1, index) of `rank`, and waits for it on that rank."""
    arrived = pk.signals(2, 3)
    for i in pk.tasks(1):
        with pk.storer():
            pk.signal(arrived, (1, index), rank)
            if pk.rank() == rank:
                pk.wait(arrived, (1, index), pk.world_size())


@pk.kernel
def elements(x: pk.Global, c: pk.Global, index: int, column: int):
    """c[0, column] = x[0, index]; what `index` does not reach is not looked at."""
    for i in pk.tasks(1):
        with pk.storer():
            found = 0.0
            if index < 100:
                found = pk.load(x, (0, index))
            pk.store(c, found, (0, column))


@pk.kernel
def tiles(x: pk.Global, c: pk.Parallel, m: int, owner: int):
    """Tile row m of x to rank `owner`."""
    ring = pk.pipeline(2, x=pk.shared((TILE, TILE), x.dtype))
    for j in pk.tasks(pk.cdiv(x.cols, TILE)):
        with pk.loader():
            with ring.fill() as s:
                pk.load_async(s.x, x, (m, j))
        with pk.storer():
            with ring.drain() as s:
                pk.store_async(c[owner], s.x, (0, j))


@pk.kernel
def rows(x: pk.Global, which: pk.Global, c: pk.Global):
    """c[i] = x[which[i]]; none where which[i] is negative."""
    ring = pk.pipeline(2, x=pk.shared((TILE, TILE), x.dtype))
    for i, j in pk.tasks(pk.cdiv(which.shape[0], TILE), pk.cdiv(x.cols, TILE)):
        with pk.loader():
            entry = pk.load(which, i, (TILE,), other=-1)
            with ring.fill() as s:
                pk.gather_async(s.x, x, entry, j)
        with pk.storer():
            with ring.drain() as s:
                pk.scatter_async(c, s.x, i * TILE + pk.iota((TILE,)), j)


@pk.kernel
def send_rows(x: pk.Global, which: pk.Global, c: pk.Parallel):
    """Row i of x to row which[i] % 100 of rank which[i] // 100; nowhere where which[i] is negative."""
    ring = pk.pipeline(2, x=pk.shared((TILE, TILE), x.dtype))
    landed = pk.signals(100)
    for i, j in pk.tasks(pk.cdiv(which.shape[0], TILE), pk.cdiv(x.cols, TILE)):
        with pk.loader():
            with ring.fill() as s:
                pk.gather_async(s.x, x, i * TILE + pk.iota((TILE,)), j)
        with pk.storer():
            entry = pk.load(which, i, (TILE,), other=-1)
            rank, row = pk.where(entry < 0, 77, entry // 100), pk.where(entry < 0, -1, entry % 100)
            with ring.drain() as s:
                pk.scatter_async(c, s.x, row, j, rank=rank)
            pk.signal(landed, row, rank)


@pk.kernel
def chosen(x: pk.Global, y: pk.Global, c: pk.Global, m: int):
    """c = tile row m of x or of y, whichever has it."""
    ring = pk.pipeline(2, x=pk.shared((TILE, TILE), x.dtype))
    for j in pk.tasks(pk.cdiv(x.cols, TILE)):
        with pk.loader():
            with ring.fill() as s:
                pk.load_async(s.x, x if m < 2 else y, (m, j))
        with pk.storer():
            with ring.drain() as s:
                pk.store_async(c, s.x, (0, j))


@pk.kernel
def unwritten(x: pk.Global, c: pk.Global):
    """c = scratch that nothing wrote, or stages that nothing filled: NaN, if they are poisoned."""
    lost = pk.scratch((TILE, TILE), x.dtype)
    ring = pk.pipeline(2, x=pk.shared((TILE, TILE), x.dtype), never=pk.shared((TILE, TILE), x.dtype))
    for i in pk.tasks(1):
        with pk.loader():
            with ring.fill() as s:
                pk.load_async(s.x, lost[pk.rank()], (0, 0))
        with pk.storer():
            with ring.drain() as s:
                pk.store_async(c, s.x, (0, 0))
                pk.store_async(c, s.never, (1, 0))

"""What the tests of the warm path share: two kernels, and how to look at their launches."""

from __future__ import annotations

import struct

import torch

import pk
from pk.runtime.group import Group
from tests.runtime.fake import FakeDriver


@pk.kernel
def scaled_copy(x: pk.Global, y: pk.Parallel, step: int = 1, scale: float = 1.0, B: pk.constexpr = 64):
    """Something with a tensor map, pointers to peers, signals, scratch and both kinds of scalars."""
    ring = pk.pipeline(2, t=pk.shared((B, B), x.dtype))
    tmp = pk.scratch((x.rows, x.cols), x.dtype)
    done = pk.signals(pk.cdiv(x.rows, B), pk.cdiv(x.cols, B))
    for m, n in pk.tasks(pk.cdiv(x.rows, B), pk.cdiv(x.cols, B)):
        with pk.loader():
            if step < 7 and scale < 3.0:
                with ring.fill() as s:
                    pk.load_async(s.t, x, (m, n))
        with pk.storer():
            if step < 7 and scale < 3.0:
                with ring.drain() as s:
                    pk.store_async(y[pk.rank()], s.t, (m, n))
                    pk.store_async(tmp[pk.rank()], s.t, (m, n))
                pk.signal_all(done, (m, n))


@pk.kernel
def pushed(x: pk.Global, y: pk.Parallel, B: pk.constexpr = 64):
    """With a communicator."""
    ring = pk.pipeline(2, t=pk.shared((B, B), x.dtype))
    done = pk.signals(1)
    with pk.communicator(sms=4):
        for m, n in pk.tasks(pk.cdiv(x.rows, B), pk.cdiv(x.cols, B)):
            with pk.loader():
                with ring.fill() as s:
                    pk.load_async(s.t, x, (m, n))
            with pk.storer():
                with ring.drain() as s:
                    pk.store_async(y[pk.rank()], s.t, (m, n))
                pk.signal(done, 0, pk.rank())
    for i in pk.tasks(1):
        with pk.storer():
            pk.wait(done, 0, pk.cdiv(x.rows, B) * pk.cdiv(x.cols, B))


KERNELS = (scaled_copy, pushed)


def driver(group: Group) -> FakeDriver:
    assert isinstance(group.driver, FakeDriver)
    return group.driver


def pair(rows: int = 128, cols: int = 128, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(rows, cols, dtype=dtype), torch.zeros(rows, cols, dtype=dtype)


def scalars(group: Group, launch: int = -1) -> tuple[int, float]:
    """What a launch was told as `step` and `scale`."""
    source = scaled_copy.specialise(x=pk.spec(torch.bfloat16, 2), y=pk.spec(torch.bfloat16, 2)).source
    data = driver(group).launches[launch][3]
    found = {f.key: struct.unpack_from("<f" if f.kind == "float" else "<i", data, f.offset)[0]
             for f in source.fields if f.kind in ("int", "float")}  # fmt: skip
    return found["step"], found["scale"]

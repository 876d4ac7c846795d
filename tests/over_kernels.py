"""Kernels whose consumer changes stages in place: ``pk.pipeline(over=)``."""

from __future__ import annotations

import pk

__all__ = ["doubled", "lent"]


@pk.kernel
def doubled(
    x: pk.Global,  # (M, N)
    y: pk.Global,  # (M, N)
    B: pk.constexpr = 64, S: pk.constexpr = 3, GROUPS: pk.constexpr = 1,
):  # fmt: skip
    """y = 2 x, by a loader, a consumer and a storer that share one set of stages."""
    ring = pk.pipeline(S, t=pk.shared((B, B), x.dtype))
    out = pk.pipeline(over=ring)
    for m, n in pk.tasks(pk.cdiv(x.rows, B), pk.cdiv(x.cols, B)):
        with pk.loader():
            with ring.fill() as s:
                pk.load_async(s.t, x, (m, n))
        with pk.consumer(warpgroups=GROUPS):
            with ring.drain() as s:
                with out.fill() as o:
                    pk.store(o.t, pk.load(s.t) * 2.0)
        with pk.storer():
            with out.drain() as o:
                pk.store_async(y, o.t, (m, n))


@pk.kernel
def lent(
    x: pk.Global,  # (M, N)
    y: pk.Global,  # (M, N)
    B: pk.constexpr = 64, S: pk.constexpr = 3, AHEAD: pk.constexpr = 2, LATE: pk.constexpr = False,
):  # fmt: skip
    """y = 2 x by a storer that lends stages and takes them back, AHEAD at a time; LATE: it lends before it takes."""
    ring = pk.pipeline(S, t=pk.shared((B, B), x.dtype))
    out = pk.pipeline(over=ring)
    cols = pk.cdiv(x.cols, B)
    first = pk.min(AHEAD, cols)
    for m in pk.tasks(pk.cdiv(x.rows, B)):
        with pk.consumer():
            for n in pk.range(cols):
                with ring.drain() as s:
                    with out.fill() as o:
                        pk.store(o.t, pk.load(s.t) * 2.0)
        with pk.storer():
            for n in pk.range(first):
                with ring.fill() as s:
                    pk.load_async(s.t, x, (m, n))
            for n in pk.range(cols - first):
                if LATE:
                    with ring.fill() as s:
                        pk.load_async(s.t, x, (m, n + first))
                with out.drain() as o:
                    pk.store_async(y, o.t, (m, n))
                if LATE == False:  # noqa: E712
                    with ring.fill() as s:
                        pk.load_async(s.t, x, (m, n + first))
            for n in pk.range(first):
                with out.drain() as o:
                    pk.store_async(y, o.t, (m, n + cols - first))

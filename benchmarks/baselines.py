"""What others do for the same result: NCCL and cuBLAS through torch, torch's symmetric-memory operators, and the parts
alone.  On CPU (gloo) only what it has.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from tp_problems import AG, AR, RS, Operands

import pk

Call = Callable[[], object]
PLAIN = "c128x256"  # a configuration that the fused kernels have too


@dataclass
class Contender:
    """``kind``: "pk", "rival", "gemm", "comm" or "part".  ``whole``: the call makes the operator's result, which it
    returns or writes to ``Operands.out``.
    """

    name: str
    kind: str
    call: Call
    whole: bool = False


def gemm(o: Operands) -> list[Contender]:
    """The product that a rank computes, by cuBLAS and by pk, without communication."""
    m, n, _ = o.p.local(o.world)
    whole = o.a.repeat(o.world, 1) if o.p.operator == AG else o.a
    out = torch.empty(m, n, dtype=o.out_dtype, device=o.a.device)
    sms = o.team.sms
    ours = Contender("pk.matmul", "gemm", lambda: pk.ops.matmul(whole, o.b, out=out, sms=sms))
    if not o.team.library:  # cuBLAS cannot be told to leave SMs to another rank
        same = lambda: pk.ops.matmul(whole, o.b, out=out, sms=sms, config=PLAIN)  # noqa: E731
        return [ours, Contender(f"pk.matmul {PLAIN}", "gemm", same)]
    return [Contender("cuBLAS", "gemm", lambda: torch.mm(whole, o.b, out=out)), ours]


def moving(o: Operands, comm_sms: list[int]) -> list[Contender]:
    """pk's communication with next to no multiplication: 64 columns of b, or 64 of K."""
    operator = getattr(pk.ops, o.p.operator)
    if o.p.operator == AG:
        b = o.b[:, :64]
        out = torch.empty(o.p.m, b.shape[1], dtype=o.out_dtype, device=o.a.device)

        def gather(comm: int) -> Call:
            return lambda: operator(o.a, b, out=out, config="c128x64", comm_sms=comm)

        return [Contender(f"pk moves/{comm}", "comm", gather(comm)) for comm in comm_sms]
    thin, flat = o.a[:, :64], o.b[:64]
    return [Contender("pk moves", "comm", lambda: operator(thin, flat, out=o.out, config=PLAIN))]


def library(o: Operands) -> list[Contender]:
    """NCCL + cuBLAS, and NCCL alone."""
    m, n, k = o.p.local(o.world)
    device = o.a.device
    if o.p.operator == AG:
        whole = torch.empty(m, k, dtype=o.dtype, device=device)

        def gather() -> None:
            dist.all_gather_into_tensor(whole, o.a)

        def together() -> None:
            gather()
            torch.mm(whole, o.b, out=o.out)

        return [Contender("NCCL+cuBLAS", "rival", together, True), Contender("NCCL", "comm", gather)]
    partial = torch.empty(m, n, dtype=o.out_dtype, device=device)
    if o.p.operator == RS:

        def scatter() -> None:
            dist.reduce_scatter_tensor(o.out, partial)

        def product() -> None:
            torch.mm(o.a, o.b, out=partial)
            scatter()

        return [Contender("NCCL+cuBLAS", "rival", product, True), Contender("NCCL", "comm", scatter)]

    def reduced() -> None:
        torch.mm(o.a, o.b, out=o.out)
        dist.all_reduce(o.out)

    partial.zero_()  # it is reduced again and again
    return [
        Contender("NCCL+cuBLAS", "rival", reduced, True),
        Contender("NCCL", "comm", lambda: dist.all_reduce(partial)),
    ]


def symmetric_memory(o: Operands) -> list[Contender]:
    """torch's async-TP; for the all-reduce cuBLAS into symmetric memory, then its one-shot and two-shot kernels."""
    import torch.distributed._symmetric_memory as symm_mem

    name = dist.group.WORLD.group_name
    with warnings.catch_warnings():  # newer versions of torch need no enabling, and say so
        warnings.simplefilter("ignore")
        symm_mem.enable_symm_mem_for_group(name)
    ops = torch.ops.symm_mem
    if o.p.operator == AG:

        def gathered() -> torch.Tensor:
            return ops.fused_all_gather_matmul(o.a, [o.b], 0, name, return_A=False)[1][0]

        return [Contender("async-TP", "rival", gathered, True)]
    if o.p.operator == RS:

        def scattered() -> torch.Tensor:
            return ops.fused_matmul_reduce_scatter(o.a, o.b, "sum", 0, name)

        return [Contender("async-TP", "rival", scattered, True)]
    shared = symm_mem.empty(o.shape, dtype=o.out_dtype, device=o.a.device)
    symm_mem.rendezvous(shared, name)

    def two_shot() -> torch.Tensor:
        torch.mm(o.a, o.b, out=shared)
        return ops.two_shot_all_reduce_(shared, "sum", name)

    def one_shot() -> None:
        torch.mm(o.a, o.b, out=shared)
        ops.one_shot_all_reduce_out(shared, "sum", name, o.out)

    found = [Contender("cuBLAS+two-shot", "rival", two_shot, True)]
    return found + ([Contender("cuBLAS+one-shot", "rival", one_shot, True)] if o.out.numel() <= 1 << 22 else [])


def graphed(c: Contender) -> Contender:
    """The same as a CUDA graph of one call.  All ranks capture."""
    graph = torch.cuda.CUDAGraph()
    c.call()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        c.call()
    return Contender(f"{c.name}, graph", c.kind, graph.replay, c.whole)


__all__ = ["AG", "AR", "RS", "Contender", "gemm", "graphed", "library", "symmetric_memory"]

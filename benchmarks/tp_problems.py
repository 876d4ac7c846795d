"""Problems of the tensor-parallel benchmark: shapes, operands, references, and which kernels they need compiled.

M, N, K are those of the whole product: an all-gather divides M and N among the ranks, the other two operators K (and
the reduce-scatter's result M).
"""

from __future__ import annotations

import math
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from team import Team

import pk
from pk.ops import dense, few_rows, fused, kernels, model, parallel_kernels
from pk.runtime.group import Group

AG, RS, AR = fused.OPERATORS
SHAPES = [
    (8192, 8192, 8192), (8192, 4096, 8192), (16384, 4096, 4096), (4096, 4096, 4096), (8192, 14336, 4096),
    (2048, 8192, 8192),
]  # fmt: skip
FEW_ROWS = (16, 64, 256)
PAPER = (8192, 16384, 4096, 32768, 2048)  # N x N / world x N, N x N x N / world: ParallelKittens' figure
LINK_GB_S = 382.0  # one way, the most that any mechanism reached between two H200s (the copy engine)
HOP_US = 1.3  # a signal's way
COMM_SMS = (8, 4, 16)
FP8 = torch.float8_e4m3fn
FUNCTIONS = {
    "none": lambda x: x, "relu": torch.relu, "silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu,
}  # fmt: skip
Build = tuple[str, dict[str, Any]]  # a kernel's name, its arguments with specs for tensors


@dataclass(frozen=True)
class Problem:
    """One call of one operator, on every rank."""

    operator: str
    m: int
    n: int
    k: int
    layout: str = "kn"  # of b; "nk": a transposed view, as F.linear's weight
    dtype: str = "bfloat16"
    bias: bool = False
    activation: str = "none"
    kind: str = "large"  # "few" rows, "paper", "graph", "check"

    def local(self, world: int) -> tuple[int, int, int]:
        """m, n, k of the product that a rank computes."""
        if self.operator == AG:
            return self.m, self.n // world, self.k
        return self.m, self.n, self.k // world

    def few(self, world: int) -> list[str]:
        """Tiles for a few rows, the best first."""
        m, n, k = self.local(world)
        local = model.Problem(m, n, k, 8 * torch_dtype(self.dtype).itemsize)
        found = fused.few_tiles(self.operator, world, local)
        return [c.name for c in sorted(found, key=lambda c: model.microseconds(c, local))]

    def link_bytes(self, world: int) -> int:
        """Bytes that must enter (and leave) each GPU, of 16-bit messages."""
        if self.operator == AG:
            return (world - 1) * self.m // world * self.k * torch_dtype(self.dtype).itemsize
        return (2 if self.operator == AR else 1) * (world - 1) * self.m * self.n * 2 // world

    def predicted_us(self, world: int, tile: str, comm_sms: int) -> float:
        """The cost model: the product on the SMs that compute, or the link, and a hop at either end."""
        m, n, k = self.local(world)
        computing = model.SMS - (comm_sms if self.operator == AG and world > 1 else 0)
        bits = 8 * torch_dtype(self.dtype).itemsize
        product = model.microseconds(model.CONFIGS[tile], model.Problem(m, n, k, bits, 16, computing))
        return max(product, self.link_bytes(world) / LINK_GB_S * 1e-3) + 2 * HOP_US

    def title(self) -> str:
        """As in the tables."""
        name = {AG: "all-gather+GEMM", RS: "GEMM+reduce-scatter", AR: "GEMM+all-reduce"}[self.operator]
        return f"{name} M {self.m} N {self.n} K {self.k}"


def torch_dtype(name: str) -> torch.dtype:
    return FP8 if name == "float8" else getattr(torch, name)


def problems(kinds: list[str], layout: str, world: int, shrink: int = 1) -> list[Problem]:
    """Most important first; ``shrink`` divides every extent, for a rehearsal."""

    def fitting(extent: int, step: int) -> int:
        return max(-(-extent // shrink // step), 1) * step

    found = []
    if "large" in kinds:
        for m, n, k in SHAPES:
            found += [Problem(op, m, n, k, layout) for op in (AG, RS)]
        found += [Problem(AR, m, n, k, layout) for m, n, k in (SHAPES[0], SHAPES[3])]
    if "few" in kinds:
        found += [Problem(op, m, 8192, 8192, layout, kind="few") for m in FEW_ROWS for op in (AG, RS, AR)]
    if "paper" in kinds:
        found += [Problem(op, n, n, n, layout, kind="paper") for n in PAPER for op in fused.OPERATORS]
    if "graph" in kinds:
        found += [Problem(op, m, 8192, 8192, layout, kind="graph") for m in (FEW_ROWS[1], 2048) for op in (RS, AG, AR)]
    return [replace(p, m=fitting(p.m, world), n=fitting(p.n, 8 * world), k=fitting(p.k, 8 * world)) for p in found]


def checks(
    count: int, world: int, most: int, seed: int = 0, comms: tuple[int, ...] = COMM_SMS
) -> list[tuple[Problem, str, int]]:
    """``count`` random problems of each operator, extents up to ``most``, with a tile and some of ``comms``.

    The kernels are few, the shapes all different.
    """
    rng = random.Random(seed)
    found = []
    for op in fused.OPERATORS:
        variants = []
        for i in range(min(12, count)):
            tile = fused.tiles(op)[i % len(fused.tiles(op))]
            dtype = ("bfloat16", "float16", "bfloat16", "float8")[(i + i // len(fused.tiles(op))) % 4]
            layout = "nk" if dtype == "float8" or rng.random() < 0.5 else "kn"
            comm = rng.choice(comms)
            shape = Problem(op, 0, 0, 0, layout, dtype, rng.random() < 0.4, rng.choice(list(FUNCTIONS)), "check")
            variants.append((shape, tile, comm))
        for i in range(count):
            p, tile, comm = variants[i % len(variants)]
            m = rng.randrange(1, most // world + 1) * world
            n, k = (16 * rng.randrange(1, max(most // 16 // world, 2)) for _ in range(2))
            whole = (m, n * world, k) if op == AG else (m, n, k * world)
            found.append((replace(p, m=whole[0], n=whole[1], k=whole[2]), tile, comm))
    rng.shuffle(found)
    return found


# ----------------------------------------------------------------------------------------------------- operands
def laid(b: torch.Tensor, layout: str) -> torch.Tensor:
    return b if layout == "kn" else b.T.contiguous().T


class Operands:
    """What one rank passes, where results go, and the right answer."""

    def __init__(self, p: Problem, team: Team, seed: int = 0) -> None:
        self.p, self.team, self.world = p, team, team.world
        rank, world, device = team.rank, team.world, team.device
        gen = torch.Generator(device=device).manual_seed(p.m + 3 * p.n + 7 * p.k + 1001 * rank + seed)
        m, n, k = p.local(world)
        self.dtype = torch_dtype(p.dtype)
        self.out_dtype = torch.bfloat16 if self.dtype == FP8 else self.dtype
        rows = m // world if p.operator == AG else m
        scale = 1.0 if p.kind != "check" else math.sqrt(2 / k)
        self.a = torch.randn(rows, k, device=device, generator=gen).to(self.dtype)
        self.b = laid((torch.randn(k, n, device=device, generator=gen) * scale).to(self.dtype), p.layout)
        self.options: dict[str, Any] = {}
        if p.activation != "none":
            self.options["activation"] = p.activation
        if p.bias:
            shared = torch.Generator(device=device).manual_seed(n + (rank if p.operator == AG else 0))
            self.options["bias"] = torch.randn(n, device=device, generator=shared).to(self.out_dtype)
        if self.dtype == FP8:
            self.options["scale_a"] = torch.rand(rows, 1, device=device, generator=gen) + 0.5
            self.options["scale_b"] = torch.rand(1, n, device=device, generator=gen) + 0.5
        self.shape = (m // world if p.operator == RS else m, n)
        if p.operator == AR:
            self.out = pk.empty(self.shape, self.out_dtype)
        else:
            self.out = torch.empty(self.shape, dtype=self.out_dtype, device=device)

    def call(self, config: str | None, comm_sms: int | None = None, fresh: bool = False) -> torch.Tensor:
        """pk's operator, into ``out`` or a ``fresh`` result."""
        operator = getattr(pk.ops, self.p.operator)
        out = None if fresh else self.out
        comm_sms = None if self.p.operator == AR or config == "library" else comm_sms
        found: torch.Tensor = operator(self.a, self.b, out=out, config=config, comm_sms=comm_sms, **self.options)
        return found

    def reference(self, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """In ``dtype``, by torch.  Collective."""
        a, b = self.a.to(dtype), self.b.to(dtype)
        if self.dtype == FP8:
            a, b = a * self.options["scale_a"].to(dtype), b * self.options["scale_b"].to(dtype)
        if self.p.operator == AG:
            whole = self.team.gathered(a) @ b
        else:
            whole = self.team.summed(a @ b)
            if self.p.operator == RS:
                whole = whole.view(self.world, -1, whole.shape[1])[self.team.rank]
        if self.p.bias:
            whole = whole + self.options["bias"].to(dtype)
        return FUNCTIONS[self.p.activation](whole)

    def poison(self) -> None:
        """NaN into ``out``, on every rank before any goes on: peers write there."""
        self.out.fill_(math.nan)
        self.team.sync()
        self.team.align()
        self.team.sync()

    def error(self, want: torch.Tensor, got: torch.Tensor | None = None) -> float:
        """||out - want|| / ||want||; infinite if ``out`` (or ``got``) has a NaN."""
        found = self.out if got is None else got
        off = (found.to(want.dtype) - want).norm() / want.norm().clamp_min(1e-30)
        return float(off) if bool(off == off) else math.inf


# ---------------------------------------------------------------------------------------------------- compiling
def specs(given: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a kernel with their types in place of tensors."""
    return {k: pk.spec(v.dtype, v.ndim) if isinstance(v, torch.Tensor) else v for k, v in given.items()}


@contextmanager
def recording(found: list[Build]) -> Iterator[None]:
    """Inside, the operators' launches are only noted, as specs; their workspaces are "meta"."""

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            def note(**given: Any) -> None:
                given.pop("group", None)
                found.append((name, specs(given)))

            return note

    kept = fused.parallel_kernels, fused.few_rows, fused.symmetric_workspace, fused._gather_scales
    fused.parallel_kernels = fused.few_rows = Recorder()  # type: ignore[assignment]
    fused.symmetric_workspace = lambda group, name, shape, dtype: torch.empty(shape, dtype=dtype, device="meta")
    fused._gather_scales = lambda q, mine: mine.repeat(q.world)
    try:
        yield
    finally:
        fused.parallel_kernels, fused.few_rows, fused.symmetric_workspace, fused._gather_scales = kept


def builds(p: Problem, tiles: list[tuple[str, int]], world: int, sms: int = model.SMS) -> list[Build]:
    """The kernels that this problem needs with these tiles and communicator SMs; no GPU needed.  ``sms``: of a rank."""
    m, n, k = p.local(world)
    rows = m // world if p.operator == AG else m
    dtype = torch_dtype(p.dtype)
    a, b = torch.empty(rows, k, dtype=dtype, device="meta"), torch.empty(k, n, dtype=dtype, device="meta")
    out_dtype = torch.bfloat16 if dtype == FP8 else dtype
    given: dict[str, Any] = {"activation": p.activation}
    if p.bias:
        given["bias"] = torch.empty(n, dtype=out_dtype, device="meta")
    if dtype == FP8:
        given |= {"scale_a": torch.empty(rows, 1, device="meta"), "scale_b": torch.empty(1, n, device="meta")}
    group = Group(0, world, "sim")
    group.sms = sms  # constants of the kernels depend on it
    request = fused.Request(p.operator, group, a, laid(b, p.layout), out_dtype, **given)
    found: list[Build] = []
    with recording(found):
        for tile, comm in tiles:
            fused.run(request, None, model.CONFIGS[tile], comm)
    if p.kind != "check":
        chosen = model.choose(model.Problem(m, n, k, 8 * dtype.itemsize, 16, sms))
        whole, c = torch.empty(m, k, dtype=dtype, device="meta"), torch.empty(m, n, dtype=out_dtype, device="meta")
        for config in [chosen, *([model.CONFIGS["c128x256"]] if sms < model.SMS else [])]:
            arguments = dense.arguments(whole, laid(b, p.layout), c, {}, "none", config)
            found.append(("matmul", specs(arguments)))
    return found


def compile_one(build: Build) -> str:
    """In a process of its own: fills the disk cache; what is wrong with the cubin, or nothing."""
    name, arguments = build
    kernel = getattr({"matmul": kernels}.get(name, few_rows if name.startswith("few_") else parallel_kernels), name)
    resources = kernel.resources(**arguments)
    return f"{name}: {resources}" if resources.spill_bytes or resources.local_bytes else ""


def compile_all(
    work: list[tuple[Problem, list[tuple[str, int]]]], world: int, sms: int = model.SMS,
    more: Iterable[tuple[str, Callable[[], str]]] = (),
) -> None:  # fmt: skip
    """Fill the disk cache, in parallel; what cannot be compiled here is left to the ranks.  ``more``: names, jobs."""
    wanted: dict[str, Build] = {}
    for p, tiles in work:
        try:
            wanted |= {repr(b): b for b in builds(p, tiles, world, sms)}
        except pk.PkError as error:
            print(f"!! {p} with {tiles}: {error}", flush=True)
    began = time.time()
    todo = [*((b[0], partial(compile_one, b)) for b in wanted.values()), *more]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max(1, min(len(todo), 32, os.cpu_count() or 1)), mp_context=context) as pool:
        for name, job in [(name, pool.submit(one)) for name, one in todo]:
            try:
                if job.result():
                    print(f"!! {job.result()}", flush=True)
            except Exception as error:  # noqa: BLE001  the ranks meet it again, with their own report
                print(f"!! {name} does not compile: {type(error).__name__}: {error}", flush=True)
    print(f"compiled {len(todo)} kernels in {time.time() - began:.0f} s", flush=True)

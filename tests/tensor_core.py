"""Kernels that put the tensor core through its forms: operands, layouts, dtypes, private tiles, several accumulators.

Simulated, compiled and run on GPUs by the tests; each has its problem and its meaning in float64 beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

import pk


@pk.kernel
def product(
    a: pk.Global,  # (M, K), or (K, M) if TA
    b: pk.Global,  # (K, N), or (N, K) if TB
    c: pk.Global,  # (M, N)
    TA: pk.constexpr = False, TB: pk.constexpr = False, REGISTERS: pk.constexpr = False,
    BM: pk.constexpr = 128, BN: pk.constexpr = 64, BK: pk.constexpr = 64, WG: pk.constexpr = 2,
):  # fmt: skip
    """c = a @ b in every form of the operands; REGISTERS: a goes through registers."""
    inputs = pk.pipeline(
        2,
        a=pk.shared((BK, BM) if TA else (BM, BK), a.dtype),
        b=pk.shared((BN, BK) if TB else (BK, BN), b.dtype),
    )
    P = BN // 2 if BN % 16 == 0 and BN > 64 else BN
    output = pk.pipeline(1, c=pk.shared((BM, P), c.dtype))
    depth = a.rows if TA else a.cols
    for m, n in pk.tasks(pk.cdiv(c.rows, BM), pk.cdiv(c.cols, BN)):
        with pk.loader():
            for k in pk.range(pk.cdiv(depth, BK)):
                with inputs.fill() as s:
                    pk.load_async(s.a, a, (k, m) if TA else (m, k))
                    pk.load_async(s.b, b, (n, k) if TB else (k, n))
        with pk.consumer(warpgroups=WG):
            acc = pk.zeros((BM, BN), pk.float32)
            for k in pk.range(pk.cdiv(depth, BK)):
                with inputs.drain() as s:
                    right = s.b.T if TB else s.b
                    if REGISTERS:
                        pk.mma(acc, pk.cast(pk.load(s.a), s.a.dtype), right)
                    else:
                        pk.mma(acc, s.a.T if TA else s.a, right)
            for j in pk.static_range(BN // P):
                with output.fill() as s:
                    pk.store(s.c, acc[:, j * P : (j + 1) * P])
        with pk.storer():
            for j in pk.static_range(BN // P):
                with output.drain() as s:
                    pk.store_async(c, s.c, (m, n * (BN // P) + j))


@pk.kernel
def private(
    a: pk.Global,  # (M, K)
    b: pk.Global,  # (K, N)
    c: pk.Global,  # (M, N) = (2 a + 1) @ b through a private tile
    d: pk.Global,  # (N, M) float32 or 16-bit: its transpose
    FORM: pk.constexpr = "stored", BM: pk.constexpr = 128, BN: pk.constexpr = 64, BK: pk.constexpr = 64,
    WG: pk.constexpr = 2,
):  # fmt: skip
    """A tile of the consumer's own: written from registers (stored or transposed), read by mma, or loaded again."""
    inputs = pk.pipeline(2, a=pk.shared((BM, BK), a.dtype), b=pk.shared((BK, BN), b.dtype))
    output = pk.pipeline(1, c=pk.shared((BM, BN), c.dtype), d=pk.shared((BN, BM), d.dtype))
    tile = pk.shared((BK, BM) if FORM == "transposed" else (BM, BK), a.dtype)
    for m, n in pk.tasks(pk.cdiv(c.rows, BM), pk.cdiv(c.cols, BN)):
        with pk.loader():
            for k in pk.range(pk.cdiv(a.cols, BK)):
                with inputs.fill() as s:
                    pk.load_async(s.a, a, (m, k))
                    pk.load_async(s.b, b, (k, n))
        with pk.consumer(warpgroups=WG):
            acc = pk.zeros((BM, BN), pk.float32)
            for k in pk.range(pk.cdiv(a.cols, BK)):
                with inputs.drain() as s:
                    x = pk.load(s.a) * 2.0 + 1.0
                    if FORM == "transposed":
                        pk.store(tile.T, x)
                        pk.mma(acc, tile.T, s.b)
                    else:
                        pk.store(tile, x)
                        if FORM == "loaded":
                            pk.mma(acc, pk.cast(pk.load(tile), s.b.dtype), s.b)
                        else:
                            pk.mma(acc, tile, s.b)
            with output.fill() as s:
                pk.store(s.c, acc)
                pk.store(s.d.T, acc)
        with pk.storer():
            with output.drain() as s:
                pk.store_async(c, s.c, (m, n))
                pk.store_async(d, s.d, (n, m))


@pk.kernel
def recurrence(
    x: pk.Global,  # (M, K)
    y: pk.Global,  # (T * N, K)
    z: pk.Global,  # (T * N, D)
    c: pk.Global,  # (M, D)
    BM: pk.constexpr = 128, BN: pk.constexpr = 64, BK: pk.constexpr = 64, D: pk.constexpr = 64, WG: pk.constexpr = 2,
):  # fmt: skip
    """acc = acc / 2 + (x @ y[t].T) @ z[t] for each t: arithmetic between mmas, operands from registers, overwriting."""
    held = pk.pipeline(1, x=pk.shared((BM, BK), x.dtype))
    ys, zs = pk.pipeline(2, y=pk.shared((BN, BK), y.dtype)), pk.pipeline(2, z=pk.shared((BN, D), z.dtype))
    output = pk.pipeline(1, c=pk.shared((BM, D), c.dtype))
    turns = pk.cdiv(y.rows, BN)
    for m in pk.tasks(pk.cdiv(c.rows, BM)):
        with pk.loader():
            with held.fill() as s:
                pk.load_async(s.x, x, (m, 0))
            for t in pk.range(turns):
                with ys.fill() as s:
                    pk.load_async(s.y, y, (t, 0))
                with zs.fill() as s:
                    pk.load_async(s.z, z, (t, 0))
        with pk.consumer(warpgroups=WG):
            acc, s = pk.zeros((BM, D), pk.float32), pk.zeros((BM, BN), pk.float32)
            with held.drain() as h:
                for t in pk.range(turns):
                    with ys.drain() as u:
                        pk.mma(s, h.x, u.y.T, accumulate=False)
                    with zs.drain() as u:
                        acc = acc * 0.5
                        pk.mma(acc, pk.cast(s, z.dtype), u.z)
            with output.fill() as o:
                pk.store(o.c, acc)
        with pk.storer():
            with output.drain() as o:
                pk.store_async(c, o.c, (m, 0))


@pk.kernel
def gradients(
    q: pk.Global,  # (M, D)
    k: pk.Global,  # (N, D)
    g: pk.Global,  # (M, D)
    dk: pk.Global,  # (N, D) float32 = (k @ q.T) @ g
    dq: pk.Global,  # (M, D) float32 = (k @ q.T).T @ k, one slice of N after another
    BM: pk.constexpr = 64, BN: pk.constexpr = 128, D: pk.constexpr = 128, WG: pk.constexpr = 2,
):  # fmt: skip
    """The shape of attention backward: three accumulators in flight, a private tile, a transposed left operand."""
    kv = pk.pipeline(1, k=pk.shared((BN, D), k.dtype))
    rows = pk.pipeline(2, q=pk.shared((BM, D), q.dtype), g=pk.shared((BM, D), g.dtype))
    dqs, dks = pk.pipeline(1, t=pk.shared((BM, D), pk.float32)), pk.pipeline(1, t=pk.shared((BN, D), pk.float32))
    tile = pk.shared((BN, BM), q.dtype)
    turn = pk.signals(pk.cdiv(q.rows, BM))
    for j in pk.tasks(pk.cdiv(k.rows, BN)):
        with pk.loader():
            with kv.fill() as s:
                pk.load_async(s.k, k, (j, 0))
            for i in pk.range(pk.cdiv(q.rows, BM)):
                with rows.fill() as s:
                    pk.load_async(s.q, q, (i, 0))
                    pk.load_async(s.g, g, (i, 0))
        with pk.consumer(warpgroups=WG):
            acc = pk.zeros((BN, D), pk.float32)
            with kv.drain() as t:
                for i in pk.range(pk.cdiv(q.rows, BM)):
                    with rows.drain() as u:
                        s, other = pk.zeros((BN, BM), pk.float32), pk.zeros((BN, BM), pk.float32)
                        dqT = pk.zeros((D, BM), pk.float32)
                        pk.mma(s, t.k, u.q.T)
                        pk.mma(other, t.k, u.g.T)
                        p = pk.cast(s + other * 0.0, q.dtype)
                        pk.mma(acc, p, u.g)
                        pk.store(tile, p)
                        pk.mma(dqT, t.k.T, tile)
                    with dqs.fill() as w:
                        pk.store(w.t.T, dqT)
            with dks.fill() as w:
                pk.store(w.t, acc)
        with pk.storer():
            for i in pk.range(pk.cdiv(q.rows, BM)):
                pk.wait(turn, i, j)  # slices add in order; the first stores
                with dqs.drain() as w:
                    if j == 0:
                        pk.store_async(dq, w.t, (i, 0))
                    else:
                        pk.store_add_async(dq, w.t, (i, 0))
                pk.signal(turn, i, pk.rank())
            with dks.drain() as w:
                pk.store_async(dk, w.t, (j, 0))


# ------------------------------------------------------------------------------------------------ problems
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
Pair = tuple[torch.Tensor, torch.Tensor]  # what came out, and what should


@dataclass(frozen=True)
class Form:
    """A form of ``product``: operands and tile sizes, with a problem that has tails in every dimension."""

    dtype: torch.dtype
    TA: bool = False
    TB: bool = False
    REGISTERS: bool = False
    BM: int = 128
    BN: int = 64
    BK: int = 64
    WG: int = 2
    other: torch.dtype | None = None  # of b, if not a's

    def __str__(self) -> str:
        left = "registers" if self.REGISTERS else f"a{'.T' * self.TA}"
        names = "-".join(str(d).removeprefix("torch.") for d in (self.dtype, self.other) if d)
        return f"{names}-{left}-b{'.T' * self.TB}-{self.BM}x{self.BN}x{self.BK}-wg{self.WG}"

    @property
    def constants(self) -> dict[str, object]:
        """The constexpr arguments of ``product``."""
        return {n: getattr(self, n) for n in ("TA", "TB", "REGISTERS", "BM", "BN", "BK", "WG")}

    def operands(self, m: int, n: int, k: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """a and b as the kernel takes them."""
        gen = torch.Generator().manual_seed(seed)
        a = (torch.randn(m, k, generator=gen) / k**0.5).to(self.dtype)
        b = torch.randn(k, n, generator=gen).to(self.other or self.dtype)
        return (a.T.contiguous() if self.TA else a), (b.T.contiguous() if self.TB else b)

    def meaning(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """a @ b in float64."""
        x, y = a.double(), b.double()
        return (x.T if self.TA else x) @ (y.T if self.TB else y)

    @property
    def limit(self) -> float:
        """Relative error allowed for a result in float32: the rounding of tf32 operands; sums of 8-bit products."""
        return {F32: 2e-3, E4M3: 2e-3, E5M2: 2e-3}.get(self.dtype, 1e-5)


FORMS = (
    *(Form(BF16, TA, TB) for TA in (False, True) for TB in (False, True)),
    *(Form(F16, TA, TB, BM=64, BN=128, BK=128, WG=1) for TA in (False, True) for TB in (False, True)),
    *(Form(d, TB=TB, REGISTERS=True) for d in (BF16, F16) for TB in (False, True)),
    Form(BF16, REGISTERS=True, BM=192, BN=96, BK=32, WG=3),
    Form(BF16, BM=192, BN=192, BK=64, WG=3),
    Form(BF16, BM=256, BN=128, BK=64),
    Form(BF16, BM=128, BN=16, BK=16),
    Form(BF16, TB=True, BM=64, BN=8, BK=192, WG=1),
    Form(F16, TB=True, BM=128, BN=200, BK=48),
    Form(BF16, TA=True, BM=256, BN=96, BK=80),
    *(Form(x, TB=True, other=y) for x in (E4M3, E5M2) for y in (E4M3, E5M2)),
    Form(E4M3, TB=True, BM=64, BN=248, BK=256, WG=1),
    Form(E4M3, TB=True, BM=128, BN=24, BK=32),
    Form(F32, TB=True, BK=32),
    Form(F32, TB=True, BM=64, BN=40, BK=72, WG=1),
    Form(F32, TB=True, BM=192, BN=128, BK=64, WG=3),
)
"""What the tests run: every operand form and dtype, few and many warpgroups, one panel and several."""


def run_product(form: Form, m: int, n: int, k: int, device: str = "cpu") -> Pair:
    """What ``product`` makes of a problem on this rank's device, and what it should."""
    a, b = form.operands(m, n, k)
    c = torch.full((m, n), float("nan"), device=device)
    product(a.to(device), b.to(device), c, **form.constants)
    return c.cpu(), form.meaning(a, b)


def run_private(form: str, dtype: torch.dtype, out: torch.dtype, device: str = "cpu") -> list[Pair]:
    """The outputs of ``private`` and what they should be."""
    m, n, k = 136, 88, 152
    gen = torch.Generator().manual_seed(1)
    a, b = (torch.randn(m, k, generator=gen) / k**0.5).to(dtype), torch.randn(k, n, generator=gen).to(dtype)
    c, d = torch.empty(m, n, dtype=out, device=device), torch.empty(n, m, dtype=out, device=device)
    private(a.to(device), b.to(device), c, d, FORM=form)
    want = (a.double() * 2 + 1).to(dtype).double() @ b.double()
    return [(c.cpu(), want), (d.cpu(), want.T)]


def run_recurrence(dtype: torch.dtype, device: str = "cpu", **constants: int) -> Pair:
    """The output of ``recurrence`` and what it should be."""
    m, n, depth, d, turns = 200, 64, 64, 64, 5
    gen = torch.Generator().manual_seed(2)
    shapes = (m, depth), (turns * n, depth), (turns * n, d)
    x, y, z = ((torch.randn(*shape, generator=gen) / 8).to(dtype) for shape in shapes)
    c = torch.empty(m, d, device=device)
    recurrence(x.to(device), y.to(device), z.to(device), c, **constants)
    want = torch.zeros(m, d, dtype=torch.float64)
    for t in range(turns):
        s = (x.double() @ y[t * n : (t + 1) * n].double().T).to(dtype).double()
        want = want / 2 + s @ z[t * n : (t + 1) * n].double()
    return c.cpu(), want


def run_gradients(dtype: torch.dtype, device: str = "cpu", **constants: int) -> list[Pair]:
    """The outputs of ``gradients`` and what they should be."""
    m, n, d = 192, 256, 128
    gen = torch.Generator().manual_seed(3)
    q, k, g = ((torch.randn(rows, d, generator=gen) / 8).to(dtype) for rows in (m, n, m))
    dk, dq = torch.empty(n, d, device=device), torch.empty(m, d, device=device)
    gradients(q.to(device), k.to(device), g.to(device), dk, dq, **constants)
    p = (k.double() @ q.double().T).to(dtype).double()
    return [(dk.cpu(), p @ g.double()), (dq.cpu(), p.T @ k.double())]

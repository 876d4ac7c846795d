"""Random problems of the operators, forward and backward, and the error that rounding allows, element by element.

A problem is a function of (operator, world size, seed), so that ``Problem``'s text in a failure is all one needs.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import pk
import pk.ops
from pk.ops import fused
from pk.ops.model import CONFIGS

PARALLEL = fused.OPERATORS
BF16, F16, F32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
UNIT = {BF16: 2.0**-8, F16: 2.0**-11, F32: 2.0**-24}  # the largest relative error of rounding
SUMS = 2.0**-24  # of the products' magnitude, for each term of a sum in float32
TINY = {BF16: 1e-38, F16: 2.0**-25, F32: 1e-38}  # what rounding loses of numbers near zero
functional = torch.nn.functional
FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "none": lambda x: x, "relu": torch.relu, "silu": functional.silu, "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}  # fmt: skip
STEEP = {"none": 1.0, "relu": 1.0, "silu": 1.1, "gelu": 1.13, "gelu_tanh": 1.13}  # largest first derivatives
BENT = {"none": 0.0, "relu": 0.0, "silu": 0.5, "gelu": 0.8, "gelu_tanh": 0.81}  # largest second derivatives


@dataclass(frozen=True)
class Problem:
    """One call on ``world`` ranks; ``rows`` are a rank's of ``a`` (all-gather), of the result, or all of them."""

    operator: str
    world: int
    seed: int
    rows: int
    n: int
    k: int
    dtype: torch.dtype = BF16
    a_layout: str = "plain"  # "transposed"; "padded": rows of a wider matrix; "offset": its address is odd
    b_layout: str = "kn"  # "nk": transposed view; with "+": of a wider matrix
    bias: str = ""  # "alike", "float32", "one", "row" (1, N)
    activation: str = "none"
    scale_a: str = ""  # "each" row, or "one"
    scale_b: str = ""
    out: str = ""  # "new", "padded", "symmetric"
    out_dtype: torch.dtype | None = None
    options: dict[str, Any] = field(default_factory=dict)
    through: str = "function"
    wanted: tuple[str, ...] = ()  # gradients

    @property
    def gathers(self) -> bool:
        return self.operator == "all_gather_matmul"

    @property
    def scatters(self) -> bool:
        return self.operator == "matmul_reduce_scatter"

    @property
    def a_rows(self) -> int:
        return self.rows * self.world if self.scatters else self.rows

    @property
    def y_rows(self) -> int:
        return self.rows * self.world if self.gathers else self.rows

    @property
    def result(self) -> torch.dtype:
        return self.out_dtype or (BF16 if self.dtype == FP8 else self.dtype)


# ------------------------------------------------------------------------------------------------------ the choice
def _extent(rng: random.Random, step: int) -> int:
    return step * rng.choice([1, rng.randrange(1, 10), rng.randrange(1, 24), rng.randrange(1, 42)])


def _config(rng: random.Random, operator: str, deterministic: bool) -> str | None:
    if operator == "matmul":
        return rng.choice([None, None, rng.choice(list(CONFIGS))])
    names = [None, None, rng.choice(fused.tiles(operator)), rng.choice(fused.FEW)]
    return rng.choice(names if deterministic else [*names, "library"])


def _common(rng: random.Random, operator: str, world: int, step: int) -> dict[str, Any]:
    most = 150 if operator == "matmul_all_reduce" or world < 4 else 40
    rows = rng.choice([1, 7, 16, rng.randrange(1, 40), rng.randrange(1, most)])
    sizes = {"rows": rows, "n": _extent(rng, step), "k": _extent(rng, step)}
    if rng.random() < 0.08:
        sizes[rng.choice(["rows", "n", "k"])] = 0
    options: dict[str, Any] = {}
    if operator != "matmul":
        options["deterministic"] = rng.random() < 0.3
    options["config"] = _config(rng, operator, options.get("deterministic", False))
    if operator == "all_gather_matmul" and rng.random() < 0.3 and options["config"] != "library":
        options["comm_sms"] = rng.randrange(1, 4)
    return {
        "operator": operator, "world": world, **sizes, "activation": rng.choice(list(FUNCTIONS)), "options": options,
        "a_layout": rng.choice(["plain", "plain", "transposed", "padded", "offset"]),
        "b_layout": rng.choice(["kn", "nk", "kn+", "nk+"]), "bias": rng.choice(["", "alike", "float32", "one", "row"]),
    }  # fmt: skip


def _spare_matmul(p: dict[str, Any], dtype: torch.dtype) -> None:
    """``pk.ops.matmul`` reads ``a`` where it is: what TMA cannot address there is refused, and not copied."""
    layout, rows = p["a_layout"], p["rows"]
    if p["operator"] == "matmul" and (layout == "offset" or (layout == "transposed" and (dtype == FP8 or rows % 8))):
        p["a_layout"] = "plain"


def forward_problem(operator: str, world: int, seed: int) -> Problem:
    """With everything that a call can have but gradients."""
    rng = random.Random(f"forward {operator} {world} {seed}")
    dtype = rng.choice([BF16, F16, FP8])
    p = _common(rng, operator, world, 16 if dtype == FP8 else 8)
    scales = rng.choice([("", ""), ("each", "each"), ("one", "one"), ("each", ""), ("", "each"), ("one", "each")])
    if dtype == FP8:
        p["b_layout"] = p["b_layout"].replace("kn", "nk")
    _spare_matmul(p, dtype)
    outs = ["", "", "new", "padded", *(["symmetric"] if operator == "matmul_all_reduce" else [])]
    return Problem(
        **p, seed=seed, dtype=dtype, scale_a=scales[0], scale_b=scales[1], out=rng.choice(outs),
        out_dtype=rng.choice([None, None, BF16, F16, F32]),
    )  # fmt: skip


def gradient_problem(operator: str, world: int, seed: int) -> Problem:
    """With everything that a call whose gradients are wanted can have."""
    rng = random.Random(f"gradient {operator} {world} {seed}")
    p = _common(rng, operator, world, 8)
    _spare_matmul(p, BF16)
    through = rng.choice(["function", "function", "operator"])
    if operator == "all_gather_matmul" and through == "function":
        p["options"]["save_gathered"] = rng.random() < 0.5
    names = ["a", "b", *(["bias"] if p["bias"] else [])]
    wanted = names if rng.random() < 0.6 else rng.sample(names, rng.randrange(1, len(names) + 1))
    return Problem(
        **p, seed=seed, dtype=rng.choice([BF16, F16]), out_dtype=rng.choice([None, None, None, F32]), through=through,
        wanted=tuple(sorted(wanted)),
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------------- the call
def laid(x: torch.Tensor, layout: str) -> torch.Tensor:
    """``x`` in memory as ``layout`` says; on its device."""
    rows, cols = x.shape
    if layout in ("transposed", "nk", "nk+"):
        return laid(x.T, "padded" if layout == "nk+" else "plain").T
    if layout in ("padded", "kn+"):
        return x.new_zeros((rows, cols + 16)).narrow(1, 0, cols).copy_(x)
    if layout == "offset":
        return x.new_zeros((rows * cols + 1,))[1:].view(rows, cols).copy_(x)
    return x.clone(memory_format=torch.contiguous_format)


def operands(p: Problem, rank: int, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
    """What rank ``rank`` passes, and ``g``, the gradient of its result.  What has to be alike on all ranks is."""
    every = p.seed * 1000 + 500
    own = torch.Generator().manual_seed(p.seed * 1000 + rank)
    same = torch.Generator().manual_seed(every)
    given = {
        "a": laid(torch.randn(p.a_rows, p.k, generator=own).to(p.dtype).to(device), p.a_layout),
        "b": laid(torch.randn(p.k, p.n, generator=own).to(p.dtype).to(device), p.b_layout),
    }
    gen = own if p.gathers else same  # of what a rank may have of its own
    if p.bias:
        shape = {"one": (1,), "row": (1, p.n)}.get(p.bias, (p.n,))
        dtype = F32 if p.bias == "float32" or p.dtype == FP8 else p.dtype
        given["bias"] = torch.randn(shape, generator=gen).to(dtype).to(device)
    for name, count, shape in (("scale_a", p.a_rows, (-1, 1)), ("scale_b", p.n, (1, -1))):
        kind = getattr(p, name)
        if kind:
            values = torch.rand(count if kind == "each" else 1, generator=own) + 0.5
            given[name] = values.reshape(shape if values.numel() else (count, 1)[:: 1 if name == "scale_a" else -1])
            given[name] = given[name].to(device)
    given["g"] = torch.randn(p.y_rows, p.n, generator=same if p.operator == "matmul_all_reduce" else own)
    given["g"] = given["g"].to(p.result).to(device)
    return given


def call(rank: int, p: Problem) -> dict[str, torch.Tensor]:
    """The call on one rank; ``y``, and the gradients as ``a'``, ``b'``, ``bias'``."""
    device = pk.device() if torch.cuda.is_available() else "cpu"
    given = operands(p, rank, device)
    g = given.pop("g")
    for name in p.wanted:
        given[name] = given[name].detach().requires_grad_()
    options = dict(p.options, **({"out_dtype": p.out_dtype} if p.out_dtype else {}))
    options["activation"] = p.activation if p.through == "operator" or p.activation != "none" else None
    whole = None
    if p.out:
        shape = (p.y_rows, p.n + 16 * (p.out == "padded"))
        whole = pk.empty(shape, p.result) if p.out == "symmetric" else torch.empty(shape, dtype=p.result, device=device)
        whole.fill_(float("nan"))
        options["out"] = whole.narrow(1, 0, p.n)
    module = torch.ops.pk if p.through == "operator" else pk.ops
    y = getattr(module, p.operator)(**given, **options)
    assert whole is None or y is options["out"]
    assert whole is None or bool(whole[:, p.n :].isnan().all()), "wrote outside `out`"
    if p.wanted:
        y.backward(g)
    found = {"y": y.detach().cpu()}
    for name in ("a", "b", "bias"):
        grad = given[name].grad if name in given else None
        assert (grad is not None) == (name in p.wanted), name
        if grad is not None:
            assert grad.dtype == given[name].dtype
            found[f"{name}'"] = grad.detach().cpu()
    return found


# -------------------------------------------------------------------------------------------------- what it must be
@dataclass
class Value:
    """A float64 tensor, and by how much what pk computes may differ from it."""

    x: torch.Tensor
    e: torch.Tensor

    def rounded(self, dtype: torch.dtype, times: int = 1) -> Value:
        """After ``times`` roundings to ``dtype``."""
        return Value(self.x, self.e + times * (UNIT[dtype] * (self.x.abs() + self.e) + TINY[dtype]))


def exact(x: torch.Tensor) -> Value:
    """``x`` as it is."""
    return Value(x.double(), torch.zeros_like(x, dtype=torch.float64))


def product(a: Value, b: Value) -> Value:
    """a @ b, summed in float32."""
    size = a.x.abs() @ b.x.abs()
    return Value(a.x @ b.x, a.e @ b.x.abs() + (a.x.abs() + a.e) @ b.e + (a.x.shape[1] + 4) * SUMS * size)


def total(terms: list[Value]) -> Value:
    """Their sum."""
    return Value(torch.stack([v.x for v in terms]).sum(0), torch.stack([v.e for v in terms]).sum(0))


def before(p: Problem, every: list[dict[str, torch.Tensor]]) -> list[Value]:
    """Every rank's value before bias and activation; whole on all ranks where they are the same or shares of one."""
    a, b = [], []
    for given in every:
        a.append(exact(given["a"].double() * given.get("scale_a", torch.ones(1)).double()))
        b.append(exact(given["b"].double() * given.get("scale_b", torch.ones(1)).double()))
    if p.gathers or p.operator == "matmul":
        rows = exact(torch.cat([v.x for v in a])) if p.gathers else a[0]
        return [product(rows, w) for w in b]
    return [total([product(x, w).rounded(p.result) for x, w in zip(a, b, strict=True)])]


def gradient_before(p: Problem, z: Value, g: torch.Tensor, y: torch.Tensor) -> Value:
    """The gradient before the activation, in the operands' dtype.  relu: rounding may decide which values pass."""
    if p.activation == "relu":
        wrong = (y > 0) != (z.x > 0)
        assert bool((z.x.abs() <= z.e + UNIT[p.result] * z.x.abs())[wrong].all())
        return exact(g * (y > 0)).rounded(p.dtype)
    leaf = z.x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(FUNCTIONS[p.activation](leaf).sum(), leaf)
    e = BENT[p.activation] * (z.e + UNIT[p.result] * z.x.abs()) + 4 * UNIT[F32]
    times = 0 if p.activation == "none" else 2
    if p.activation == "none":
        e = torch.zeros_like(e)
    return Value(g.double() * slope, g.double().abs() * e).rounded(p.result, times).rounded(p.dtype)


def ratio(name: str, got: torch.Tensor, want: Value) -> float:
    """The largest error, as a share of what is allowed."""
    assert got.shape == want.x.shape, f"{name}: {tuple(got.shape)}, not {tuple(want.x.shape)}"
    if not got.numel():
        return 0.0
    assert not got.isnan().any(), f"{name} has NaN"
    share = (got.double() - want.x).abs() / (want.e + 1e-30)
    worst = float(share.max())
    assert worst <= 1, f"{name}: an error of {worst:.2f} times what rounding allows"
    return worst


def check(p: Problem, found: list[dict[str, torch.Tensor]]) -> float:
    """Raise AssertionError if a rank's result or gradient is wrong; the largest error, as a share of the allowed."""
    every = [operands(p, r) for r in range(p.world)]
    zs, worst, gs = before(p, every), 0.0, []
    library = p.options.get("config") == "library"
    for r, z in enumerate(zs):
        bias = every[r].get("bias")
        z = z.rounded(p.result, 2 * library)
        z = z if bias is None else Value(z.x + bias.double(), z.e + 2 * UNIT[F32] * (z.x.abs() + bias.abs()))
        # Where a gradient is wanted, the activation is one of torch's: what comes to it is rounded.
        apart = bool(p.wanted) and p.through == "function" and p.activation not in ("none", "relu")
        z = z.rounded(p.result, library + apart)
        y = Value(FUNCTIONS[p.activation](z.x), STEEP[p.activation] * z.e + 1e-6 * z.x.abs()).rounded(p.result)
        if p.scatters:
            shares = zip(y.x.split(p.rows), y.e.split(p.rows), strict=True) if p.rows else [(y.x, y.e)] * p.world
            for q, (x, e) in enumerate(shares):
                worst = max(worst, ratio(f"rank {q}'s result", found[q]["y"], Value(x, e)))
            result, g = (torch.cat([f[name] for f in of]) for name, of in (("y", found), ("g", every)))
        else:
            for q in range(p.world) if len(zs) == 1 else [r]:
                worst = max(worst, ratio(f"rank {q}'s result", found[q]["y"], y))
                assert len(zs) > 1 or torch.equal(found[q]["y"], found[0]["y"]), "ranks have different results"
            result, g = found[r]["y"], every[r]["g"]
        if p.wanted:
            gs.append(gradient_before(p, z, g, result))
    for r in range(p.world if p.wanted else 0):
        worst = max(worst, _check_gradients(p, r, every, gs, found[r]))
    return worst


def _check_gradients(
    p: Problem, rank: int, every: list[dict[str, torch.Tensor]], gs: list[Value], found: dict[str, torch.Tensor]
) -> float:
    g, given, worst = gs[rank % len(gs)], every[rank], 0.0
    if "a" in p.wanted:
        if p.gathers:
            terms = [product(gs[q], exact(every[q]["b"].T)).rounded(p.dtype) for q in range(p.world)]
            whole = total(terms)
            rows = slice(rank * p.rows, (rank + 1) * p.rows)
            want = Value(whole.x[rows], whole.e[rows])
        else:
            want = product(g, exact(given["b"].T))
        times = 2 if p.options.get("config") == "library" else 1
        worst = max(worst, ratio(f"rank {rank}'s gradient of a", found["a'"], want.rounded(p.dtype, times)))
    if "b" in p.wanted:
        rows_a = torch.cat([x["a"] for x in every]) if p.gathers else given["a"]
        want = product(exact(rows_a.T), g).rounded(p.dtype)
        worst = max(worst, ratio(f"rank {rank}'s gradient of b", found["b'"], want))
    if "bias" in p.wanted:
        bias, size = given["bias"], (g.x.abs() + g.e).sum(0)
        want = Value(g.x.sum(0), g.e.sum(0) + (g.x.shape[0] + 4) * SUMS * size)
        if bias.numel() == 1:
            extra = (g.x.shape[0] + g.x.shape[1]) * SUMS * size.sum()
            want = Value(g.x.sum().reshape(1), (g.e.sum() + extra).reshape(1))
        want = Value(want.x.reshape(bias.shape), want.e.reshape(bias.shape)).rounded(bias.dtype)
        worst = max(worst, ratio(f"rank {rank}'s gradient of bias", found["bias'"], want))
    return worst

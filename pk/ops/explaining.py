"""``pk.ops.explain``: what an operator would do with these operands, what else it could do, and why."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from pk.errors import ArgumentError, short
from pk.ops import choose, collective_plans, collectives, dense, estimate, fused, inputs, model
from pk.ops.autograd import as_called
from pk.ops.calls import Collective
from pk.ops.choose import Candidate, Facts
from pk.ops.estimate import Case
from pk.ops.model import Config
from pk.ops.options import check, whole
from pk.runtime.group import alone, check_world_size, current

PLANNED = "NVIDIA H200"  # what the model's constants are of
Operator = str | Callable[..., torch.Tensor]


def explain(
    operator: Operator | torch.Tensor,
    a: torch.Tensor | None = None,
    b: torch.Tensor | None = None,
    *,
    group: Any = None,
    world_size: int | None = None,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    deterministic: bool = False,
    comm_sms: int | None = None,
    config: Config | str | None = None,
    sms: int | None = None,
    count: int = 8,
    **dims: int,
) -> str:
    """The choice of ``operator``, such as ``pk.ops.all_gather_matmul`` or its name, for this call, as a table.

    The call as it would be made here: under autocast with its dtype, and with the activation apart from the product
    where a gradient needs what goes into it.  Candidates with estimated microseconds, and measured ones where
    :func:`pk.ops.tune` measured; the one taken, and why.  ``a`` and ``b`` may be on "meta".  Nothing is launched.
    ``count``: rows of the table.

    With ``world_size`` no group is needed: the answer is the model's, for so many H200s of ``sms`` SMs.  Without, it is
    that of ``group``, and collective if nothing was chosen on the group before.  ``explain(a, b)`` is that of
    :func:`pk.ops.matmul`.  ``explain("all_gather", x, dim=1)``, of a collective, says by which kernel and in what tiles
    it goes into ordinary memory.  Raises :class:`pk.errors.ArgumentError` as the operator would, and for options that
    the operator does not have.
    """
    whole("count", count, what="rows")
    called = operator if isinstance(operator, str) else getattr(operator, "__name__", "")
    if called.removeprefix("pk.ops.") in collectives.DIMENSIONS:
        _none_of(called, bias=bias, activation=activation, out_dtype=out_dtype, scale_a=scale_a, scale_b=scale_b,
                 comm_sms=comm_sms, config=config, deterministic=deterministic or None)  # fmt: skip
        return _collective(called.removeprefix("pk.ops."), a, b, dims, group, world_size, sms)
    name, a, b = _which(operator, a, b)
    _none_of(name, **dims)
    given = {"deterministic": deterministic, "comm_sms": comm_sms, "config": config, "sms": sms}
    check(name, activation=activation, out_dtype=out_dtype, **given)
    vectors = {"bias": bias, "scale_a": scale_a, "scale_b": scale_b}
    inputs.are_tensors("explain", **{k: x for k, x in vectors.items() if x is not None})
    a, b, bias, activation = as_called(a, b, bias, activation, scale_a, scale_b)
    dense.check_operands(a, b, activation)
    if 0 in (*a.shape, *b.shape):
        raise ArgumentError(f"pk.ops.explain: {name} of empty matrices takes no time.\n  Pass some with elements.")
    if name == "matmul":
        _only_parallel(world_size=world_size, deterministic=deterministic or None, comm_sms=comm_sms)
        sms = sms or (None if group is None else alone(group).sms) or None
        vectors = {"bias": bias, "scale_a": scale_a, "scale_b": scale_b}
        return dense.explain(a, b, activation=activation, out_dtype=out_dtype, config=config, sms=sms, **vectors)
    _one_of(group, world_size)
    case, known = _case(name, a, b, group, world_size, sms, out_dtype)
    if comm_sms is not None and comm_sms >= case.sms:
        raise ArgumentError(f"comm_sms={comm_sms} leaves none of {case.sms} SMs to compute.\n  Pass a smaller number.")
    scaled = scale_a is not None or scale_b is not None
    case = replace(case, bias=bias is not None, activation=activation not in (None, "none"), scaled=scaled)
    tile = choose.forced(name, deterministic, comm_sms, config)
    every = choose.candidates(case, known)
    if config == choose.LIBRARY:
        left = [next((c for c in every if c.choice.library), Candidate(choose.Choice(None), estimate.library_us(case)))]
    else:
        left = choose.allowed(every, name, deterministic, comm_sms, tile)
    shown = [*left, *(c for c in every if c.choice not in [x.choice for x in left])]
    taken = choose.best(left)
    lines = [*heading(case, known), *table(shown, taken, count, name)]
    ruled_out = "deterministic=True" if deterministic else ""
    if comm_sms is not None and name == "all_gather_matmul":
        ruled_out = f"comm_sms={comm_sms}"
    return "\n".join([*lines, f"  {_why(taken, known, ruled_out, config)}"])


def _collective(
    name: str, x: torch.Tensor | None, b: Any, dims: dict[str, int], group: Any, world_size: int | None, sms: int | None
) -> str:
    """The same of a collective, of which there is one way for each call."""
    if not isinstance(x, torch.Tensor) or b is not None:
        raise ArgumentError(f'pk.ops.explain needs one tensor for {name}.\n  One on "meta" will do.')
    _one_of(group, world_size)
    whole("sms", sms)
    known = collectives.DIMENSIONS[name]
    for dim in dims.keys() - set(known):
        raise ArgumentError(f"`{dim}` is no dimension of {name}.\n  It has {', '.join(known) or 'none'}.")
    at = {d: collectives.along(name, d, dims.get(d, 0), x) for d in known}
    owner = None if world_size is not None else current(group)
    if world_size is not None:
        check_world_size(world_size)
    world = owner.world_size if owner else world_size or 1
    collectives.result_shape(name, x, at, world)
    sms = sms or (owner.sms if owner else 0) or model.SMS
    ranks = f"{world} rank" + "s" * (world > 1)
    lines = [f"{name} of {tuple(x.shape)} {str(x.dtype).removeprefix('torch.')} on {ranks}, {sms} SMs"]
    if world == 1:
        return "\n".join([*lines, "  a copy: there is no other rank"])
    plan = collective_plans.made(Collective(name, x, tuple(at.items())), world, sms)
    return "\n".join([*lines, *plan.words_of(name, x, sms)])


def _none_of(operator: str, **given: Any) -> None:
    for option, value in given.items():
        if value is not None:
            raise ArgumentError(f"{option}={short(value)}: {operator} has no such option.\n  Leave it away.")


def _one_of(group: Any, world_size: int | None) -> None:
    if group is not None and world_size is not None:
        raise ArgumentError("`group` and `world_size` both say how many ranks there are.\n  Leave one of them away.")


def _which(
    operator: Operator | torch.Tensor, a: torch.Tensor | None, b: torch.Tensor | None
) -> tuple[str, torch.Tensor, torch.Tensor]:
    if isinstance(operator, torch.Tensor):
        if a is not None and b is not None:
            raise ArgumentError(
                "pk.ops.explain got three tensors.\n  Pass an operator and `a` and `b`, or these alone for matmul."
            )
        operator, a, b = "matmul", operator, a if b is None else b
    name = name_of(operator, ("matmul", *fused.OPERATORS))
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        raise ArgumentError('pk.ops.explain needs `a` and `b`.\n  Tensors on "meta" will do.')
    return name, a, b


def _only_parallel(**given: Any) -> None:
    for option, value in given.items():
        if value is not None:
            raise ArgumentError(
                f"{option}={short(value)}: pk.ops.matmul, which pk.ops.explain is asked about, has no such choice.\n"
                "  Leave it away, or name another operator."
            )


def name_of(operator: Operator, known: Sequence[str]) -> str:
    """The name of a public operator; :class:`pk.errors.ArgumentError` if it is none of ``known``."""
    name = operator if isinstance(operator, str) else getattr(operator, "__name__", repr(operator))
    name = name.removeprefix("pk.ops.")
    if name not in known:
        raise ArgumentError(f"operator={short(operator)} is no operator.\n  There are {', '.join(known)}.")
    return name


def _case(
    operator: str, a: torch.Tensor, b: torch.Tensor, group: Any, world_size: int | None, sms: int | None,
    out_dtype: torch.dtype | None,
) -> tuple[Case, Facts]:  # fmt: skip
    if world_size is not None:
        check_world_size(world_size)
        world, known = world_size, Facts(PLANNED, sms or model.SMS, "", "", {})
    else:
        owner = current(group)
        with owner.turn.of(f"pk.ops.explain({operator})"):
            world, known = owner.world_size, choose.facts(owner)
    rows = a.shape[0]
    if operator == "matmul_reduce_scatter" and rows % world:
        raise ArgumentError(f"`a` has {rows} rows, which {world} ranks cannot share equally.")
    m = rows * world if operator == "all_gather_matmul" else rows
    layout = "kn" if b.stride(1) == 1 or b.shape[1] == 1 else "nk"
    dtype = out_dtype or dense.default_dtype(a)
    sizes = (m, b.shape[1], a.shape[1], 8 * a.element_size(), 8 * dtype.itemsize)
    return Case(operator, world, *sizes, layout, sms=sms or known.sms), known


# ---------------------------------------------------------------------------------------------------------- text
def heading(case: Case, known: Facts) -> list[str]:
    """What is asked, and what no kernel can beat."""
    ranks = f"{case.world} rank" + "s" * (case.world > 1)
    product = estimate.best_product_us(case)
    floor = f"  at least {estimate.floor_us(case):.1f} us: product {product:.1f} us"
    if case.world > 1:
        link = estimate.link_us(case, case.sms)
        floor += f", link {link:.1f} us for {case.link_bytes / 1e6:.1f} MB"
    return [
        f"{case.operator} on {ranks} of {known.gpu}, {case.sms} SMs: each multiplies {case.m} x {case.n} x {case.k}, "
        f"{case.bits}-bit operands",
        floor,
    ]


def table(found: Sequence[Candidate], taken: Candidate, count: int, operator: str) -> list[str]:
    """Rows of the first ``count`` candidates and of the one that is ``taken``; the library is always among them."""
    rows = [
        c for i, c in enumerate(found) if i < count or c.choice.library or c.choice == taken.choice
    ]  # fmt: skip
    lines = [f"     {'':<28} estimate  measured"]
    for c in rows:
        mark = "->" if c.choice == taken.choice else "  "
        measured = f"{c.measured:8.1f}" if c.measured is not None else f"{'-':>8}"
        failed = f"  failed: {c.failed.splitlines()[0][:80]}" if c.failed else ""
        lines.append(f"  {mark} {_words(c, operator):<28} {_us(c.estimate)}  {measured}{failed}")
    if len(found) > len(rows):
        lines.append(f"     and {len(found) - len(rows)} more")
    return lines


def _us(x: float) -> str:
    return f"{'-':>8}" if math.isnan(x) else f"{x:8.1f}"


def _words(c: Candidate, operator: str) -> str:
    way = c.choice
    if way.tile is None:
        return "library (cuBLAS + NCCL)"
    if choose.warps(operator, way):
        return f"{way.tile.name}, communicator warps"
    comm = f", {way.comm_sms} SMs communicate" if way.comm_sms > 1 else ", 1 SM communicates" * way.comm_sms
    return f"{way.tile.name}{comm}"


def _why(taken: Candidate, known: Facts, ruled_out: str, config: Config | str | None) -> str:
    """``ruled_out``: the option that rules the library out, or nothing."""
    if config is not None:
        return f"{taken.choice.name}: asked for by config={(config if isinstance(config, str) else config.name)!r}"
    why = "the lowest estimate; pk.ops.tune measures"
    if taken.measured is not None:
        why = "the quickest that pk.ops.tune measured"
    if ruled_out:
        why += f"; {ruled_out} rules the library out"
    elif known.no_library:
        why += f"; no library: {known.no_library}"
    return f"{taken.choice.name}: {why}"

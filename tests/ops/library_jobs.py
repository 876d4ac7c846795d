"""What processes of tests/ops/test_library.py run: importable, as pickling needs it."""

from __future__ import annotations

import warnings
from typing import Any

import torch

import pk
import pk.ops
from pk.ops.collectives import DIMENSIONS


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def opchecks(rank: int, operators: tuple[str, ...]) -> list[str]:
    """What `torch.library.opcheck` finds fault with."""
    warnings.simplefilter("ignore")
    x, w = numbers(rank, 16, 64).requires_grad_(), numbers(9 + rank, 48, 64).T.requires_grad_()
    faults = []
    for name in operators:
        args = (x,) if name in DIMENSIONS else (x, w, numbers(30, 48).requires_grad_(), "relu")
        told = torch.library.opcheck(getattr(torch.ops.pk, name).default, args, raise_exception=False)
        faults += [f"{name}: {test}: {what}" for test, what in told.items() if what != "SUCCESS"]
    return faults


def block(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, bias: torch.Tensor, group: Any = None) -> torch.Tensor:
    h = pk.ops.all_gather_matmul(x, w1.T, activation="gelu", group=group)
    return pk.ops.matmul_reduce_scatter(h, w2.T, bias=bias, group=group)


def arguments(rank: int) -> list[torch.Tensor]:
    shapes = ((rank, 24, 64), (9 + rank, 48, 64), (20 + rank, 64, 48), (5, 64))
    return [numbers(*shape).requires_grad_() for shape in shapes]


def with_gradients(fn: Any, values: list[torch.Tensor]) -> list[torch.Tensor]:
    y = fn(*values)
    return [y.detach(), *torch.autograd.grad(y.float().pow(2).sum(), values)]


def alike(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Up to the rounding that a fused elementwise operation saves."""
    return all(
        float((x.float() - y.float()).abs().max()) <= 0.01 * float(y.float().abs().max())
        for x, y in zip(one, other, strict=True)
    )


def under_torchrun(rank: int, world: int, store: str, results: Any) -> None:
    """One process of a gloo job: eager and compiled, in the world, and in one group of two by object and by name."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    try:
        results.put((rank, _groups(rank, world)))
    except BaseException as error:  # noqa: BLE001
        results.put((rank, f"{type(error).__name__}: {error}"))
    pk.finalize()
    dist.destroy_process_group()


def _groups(rank: int, world: int) -> list[Any]:
    import torch.distributed as dist

    values = arguments(rank)
    found: list[Any] = []
    pair = dist.new_group([1, 2])
    for group in (None, pair):
        if group is pair and rank not in (1, 2):
            continue

        def fn(*given: torch.Tensor, group: Any = group) -> torch.Tensor:
            return block(*given, group=group)

        eager = with_gradients(fn, values)
        compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
        found.append(alike(with_gradients(compiled, values), eager))
        found.append(float(eager[0].float().pow(2).sum()))
    if rank in (1, 2):
        by_name = torch.ops.pk.all_gather_matmul(values[0], values[1].T, group=pair.group_name)
        found.append(tuple(by_name.shape))
    return found

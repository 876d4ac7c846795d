"""torch.ops.pk on GPUs: opcheck, compile, gradients of ranks that share a GPU, CUDA graphs of a training step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pk
import pk.ops
from pk.ops import library
from pk.ops.collectives import DIMENSIONS
from tests.gpu.passing import record

pytestmark = pytest.mark.gpu(1)


def numbers(seed: int, *shape: int, scale: float = 1.0) -> torch.Tensor:
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).bfloat16().cuda()


def arguments(rank: int) -> list[torch.Tensor]:
    shapes = ((rank, 256, 512), (9 + rank, 384, 512), (20 + rank, 512, 384), (5, 512))
    return [numbers(*shape, scale=0.1).requires_grad_() for shape in shapes]


def block(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    h = pk.ops.all_gather_matmul(x, w1.T, activation="gelu")
    y = pk.ops.matmul_reduce_scatter(h, w2.T, bias=bias)
    return y + pk.ops.matmul_all_reduce(x, w1.T, activation="relu") @ w2.T


def with_gradients(fn: Any, values: list[torch.Tensor]) -> list[torch.Tensor]:
    y = fn(*values)
    return [y.detach(), *torch.autograd.grad(y.float().pow(2).sum(), values)]


def alike(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(
        float((x.float() - y.float()).abs().max()) <= 0.02 * float(y.float().abs().max())
        for x, y in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("operator", library.SCHEMAS)
def test_opcheck(operator: str) -> None:
    x, w, bias, *_ = numbers(1, 128, 256), numbers(2, 192, 256).T, numbers(3, 192)
    args = (x.requires_grad_(), w.requires_grad_(), bias.requires_grad_(), "relu")
    args = args[:1] if operator in DIMENSIONS else args
    torch.library.opcheck(getattr(torch.ops.pk, operator).default, args)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(backend: str) -> None:
    torch._dynamo.reset()
    values = arguments(0)
    compiled = torch.compile(block, fullgraph=True, backend=backend)
    assert alike(with_gradients(compiled, values), with_gradients(block, values))


def _gradients(rank: int) -> list[list[torch.Tensor]]:
    """The first calls of all ranks, backward passes among them, meet on the host: they must not share a thread."""
    values = arguments(rank)
    found = with_gradients(block, values)
    again = with_gradients(block, values)
    assert all(torch.equal(x, y) for x, y in zip(found, again, strict=True)), "not repeatable"
    return [[x.detach().double().cpu() for x in part] for part in (values, found)]


@pytest.mark.parametrize("world", [2, 4, 8])
def test_gradients_of_ranks_that_share_a_gpu(world: int) -> None:
    """Against the simulator's own test of the formulas: here one all-gather and one reduce-scatter in float64."""
    ranks = pk.spawn(_layer, world, "cuda-threads")
    x, w, v = ([r[i].requires_grad_() for r in ranks] for i in range(3))
    h = [torch.nn.functional.gelu(torch.cat(x) @ one.T) for one in w]
    y = sum(a @ b.T for a, b in zip(h, v, strict=True))
    y.pow(2).sum().backward()
    for rank, (*_, out, gx, gw, gv) in enumerate(ranks):
        wanted = (y.detach().chunk(world)[rank], x[rank].grad, w[rank].grad, v[rank].grad)
        assert alike([out, gx, gw, gv], wanted)


def _layer(rank: int) -> list[torch.Tensor]:
    x, w, v, _ = arguments(rank)
    out = pk.ops.matmul_reduce_scatter(pk.ops.all_gather_matmul(x, w.T, activation="gelu"), v.T)
    grads = torch.autograd.grad(out.float().pow(2).sum(), (x, w, v))
    return [t.detach().double().cpu() for t in (x, w, v, out, *grads)]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_repeatable(world: int) -> None:
    pk.spawn(_gradients, world, "cuda-threads")


def _captured(rank: int) -> bool:
    values = arguments(rank)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # allocates the workspaces and compiles
            want = with_gradients(block, values)
        side.synchronize()
        found: list[torch.Tensor] = []
        graph = record(lambda: found.extend(with_gradients(block, values)))
    for x in found:
        x.fill_(float("nan"))
    for _ in range(3):
        graph.replay()
    torch.cuda.current_stream().synchronize()
    return all(torch.equal(x, y) for x, y in zip(found, want, strict=True))


@pytest.mark.parametrize("world", [1, 2])
def test_a_training_step_in_a_cuda_graph(world: int) -> None:
    assert pk.spawn(_captured, world, "cuda-threads") == [True] * world

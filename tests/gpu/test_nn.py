"""pk.nn on a GPU that the ranks share, and on a GPU each where there are enough: against torch.nn in float64."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import pk
from tests.gpu.test_graphs import record
from tests.nn.problems import block, error, leaf, linear, mixed, plan, share, tokens
from tests.nn.test_distributed import example

pytestmark = pytest.mark.gpu(1)
RTOL = 2e-2


def layers(rank: int, world: int, sequence: bool) -> dict[str, float]:
    """Errors of an MLP's result and gradients; the reference is on the GPU too."""
    features, hidden, rows = 512, 256 * world, 128 * world
    up, down, gate = (
        linear(*s, seed=i).cuda() for i, s in enumerate(((hidden, features), (features, hidden), (hidden, features)))
    )
    x, grad = tokens(rows, features).cuda(), tokens(rows, features, seed=5).cuda()
    d_up, d_down, d_gate = (
        linear(m.out_features, m.in_features, seed=i).double().cuda() for i, m in enumerate((up, down, gate))
    )
    want_x = leaf(x.double())
    want = d_down(nn.functional.silu(d_gate(want_x)) * d_up(want_x))
    want.backward(grad.double())

    made = pk.nn.ParallelMLP.from_linear(up, down, gate, activation="silu", sequence_parallel=sequence)
    mine = leaf(share(x, rank, world) if sequence else x)
    got = made(mine)
    got.backward(share(grad, rank, world) if sequence else grad)
    pk.synchronize()
    wanted_up = torch.cat([share(d_gate.weight.grad, rank, world), share(d_up.weight.grad, rank, world)])
    return {
        "result": error(got, share(want, rank, world) if sequence else want),
        "x": error(mine.grad, share(want_x.grad, rank, world) if sequence else want_x.grad),
        "up": error(made.up.weight.grad, wanted_up),
        "down": error(made.down.weight.grad, share(d_down.weight.grad, rank, world, 1)),
        "bias": error(made.down.bias.grad, d_down.bias.grad),
    }


@pytest.mark.parametrize("sequence", [True, False])
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_mlp(world: int, sequence: bool) -> None:
    for errors in pk.spawn(layers, world, args=(world, sequence)):
        assert max(errors.values()) < RTOL, errors


def trained(rank: int, world: int, steps: int) -> tuple[list[float], bytes]:
    """Losses of a block's training, and whether replicated parameters are the same bits on all ranks."""
    x, target = tokens(256, 2, 256).float().cuda(), tokens(256, 2, 256, seed=9).float().cuda()
    made = block(features=256, head=32, hidden=512).cuda()
    if world:
        made = pk.nn.parallelize(made, None, plan(256))
        x, target = share(x, rank, world), share(target, rank, world)
    optimizer, losses = torch.optim.AdamW(made.parameters(), lr=1e-3), []
    for _ in range(steps):
        with mixed("cuda"):
            y = made(x)
        loss = (y.float() - target).square().sum() / (256 * 2 * 256)
        optimizer.zero_grad()
        loss.backward()
        pk.nn.clip_grad_norm_(made, 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    kept = torch.cat([p.detach().flatten().float() for p in (made.norm1.weight, made.norm2.bias, made.out.bias)])
    return losses, kept.cpu().numpy().tobytes()


@pytest.mark.parametrize("world", [2, 4, 8])
def test_twenty_steps_follow_the_reference(world: int) -> None:
    want, _ = trained(0, 0, 20)
    ranks = pk.spawn(trained, world, args=(world, 20))
    got = [sum(parts) for parts in zip(*(losses for losses, _ in ranks), strict=True)]
    assert want[-1] < 0.9 * want[0]
    for a, b in zip(want, got, strict=True):
        assert abs(a - b) < 0.02 * a, (want, got)
    assert len({kept for _, kept in ranks}) == 1, "what all ranks have alike has drifted apart"


def graphed(rank: int, world: int) -> float:
    """Forward and backward of an MLP as a CUDA graph, replayed on other tokens: error against eager."""
    made = pk.nn.ParallelMLP.from_linear(linear(512, 256, seed=1).cuda(), linear(256, 512, seed=2).cuda())
    x = leaf(share(tokens(256, 256), rank, world).cuda())

    def step() -> torch.Tensor:
        y = made(x)
        y.float().square().sum().backward()
        return y

    def again() -> None:
        made.zero_grad()
        x.grad = None

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    kept: list[torch.Tensor] = []
    with torch.cuda.stream(stream):
        for _ in range(3):
            again()
            step()
        again()
        graph = record(lambda: kept.append(step()))
        grads = [x.grad, made.up.weight.grad, made.down.weight.grad]
        with torch.no_grad():
            x.copy_(share(tokens(256, 256, seed=8), rank, world))
        graph.replay()
        replayed = [t.clone() for t in (*kept, *grads)]
        pk.synchronize()
        again()
        eager = [step(), x.grad, made.up.weight.grad, made.down.weight.grad]
        pk.synchronize()
        return max(error(a, b) for a, b in zip(replayed, eager, strict=True))


@pytest.mark.parametrize("world", [1, 2])
def test_cuda_graph(world: int) -> None:
    assert max(pk.spawn(graphed, world, args=(world,))) < 5e-3


def test_the_example() -> None:
    module = example()
    whole, together, _, _ = module.compare(module.arguments(["--ranks", "4"]))
    assert whole[-1] < 0.1 * whole[0]
    for a, b in zip(whole, together, strict=True):
        assert abs(a - b) < 0.02 * a

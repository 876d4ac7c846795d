"""What the processes of a job run: they must be importable."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pk
from pk.errors import ArgumentError
from tests.nn.problems import block, error, leaf, mixed, plan, share, tokens

TOKENS, BATCH, FEATURES = 8, 4, 64


def under_torchrun(rank: int, world: int, store: str, results: Any) -> None:
    """One of four processes: two tensor-parallel pairs, data parallel with each other."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    try:
        results.put((rank, _trained()))
    except BaseException as problem:  # noqa: BLE001
        results.put((rank, f"{type(problem).__name__}: {problem}"))
    pk.finalize()
    dist.destroy_process_group()


def _trained() -> dict[str, float]:
    """Errors of every gradient, by name, against the whole block on the whole batch; "compiled", "fsdp": the worst."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.nn.parallel import DistributedDataParallel

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    replica, rank = mesh.get_local_rank("dp"), mesh.get_local_rank("tp")
    x, grad = tokens(TOKENS, BATCH, FEATURES).float(), tokens(TOKENS, BATCH, FEATURES, seed=2).float()
    reference = block().double()
    reference(x.double()).backward(grad.double())

    made = pk.nn.parallelize(block(), mesh["tp"], plan())
    mine = share(share(x, replica, 2, 1), rank, 2)
    its_grad = share(share(grad, replica, 2, 1), rank, 2)
    graphed = _gradients(torch.compile(made, backend="aot_eager", fullgraph=True), mine, its_grad)
    eager = _gradients(made, mine, its_grad)
    _gradients(DistributedDataParallel(made, process_group=mesh.get_group("dp")), mine, its_grad)
    shards = {name: shard for name, _, shard in pk.nn.shards.shared_parameters(made)}
    errors = {}
    for name, p in reference.named_parameters():
        want = p.grad / 2  # data parallel takes the mean
        want = shards[name].take(want, rank, 2) if name in shards else want
        errors[name] = error(made.get_parameter(name).grad, want)
    worst = max(error(g, e) for g, e in zip(graphed, eager, strict=True))
    return errors | {"compiled": worst, "fsdp": _fully_sharded(mesh, reference, mine, its_grad)}


def _fully_sharded(mesh: Any, reference: Any, x: torch.Tensor, grad: torch.Tensor) -> float:
    """The worst error of a gradient where FSDP shards, across the pairs, what the ranks of a pair share."""
    from torch.distributed.fsdp import fully_shard

    made = pk.nn.parallelize(block(), mesh["tp"], plan())
    shards = {name: shard for name, _, shard in pk.nn.shards.shared_parameters(made)}
    fully_shard(made, mesh=mesh["dp"])
    for _ in range(2):  # FSDP takes the memory of parameters away, and gives it back
        made.zero_grad()
        with mixed():
            y = made(x)
        y.backward(grad)
    rank = mesh.get_local_rank("tp")
    want_norm = torch.stack([(p.grad / 2).square().sum() for p in reference.parameters()]).sum().sqrt()
    worst = error(pk.nn.clip_grad_norm_(made, 1e9), want_norm)
    whole = pk.nn.full_state_dict(made)
    assert all(torch.equal(whole[name], value) for name, value in block().state_dict().items())
    with pytest.raises(ArgumentError, match="before fully_shard"):
        pk.nn.load_full_state_dict(made, whole)
    for name, p in reference.named_parameters():
        want = shards[name].take(p.grad, rank, 2) if name in shards else p.grad
        worst = max(worst, error(made.get_parameter(name).grad.full_tensor(), want / 2))
    return worst


def _gradients(module: Any, x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    module.zero_grad()
    x = leaf(x)
    with mixed():
        y = module(x)
    y.backward(grad)
    return [y.detach(), x.grad, *(p.grad.clone() for p in module.parameters())]


def versions(rank: int) -> tuple[int, int, int]:
    """How often torch was told of a write to an operand that a product only reads, twice, and to its result."""
    a, b = tokens(16, 32), tokens(32, 16)
    out = torch.empty(32, 16, dtype=torch.bfloat16)
    before = out._version
    pk.ops.all_gather_matmul(a, b, out=out)
    return a._version, b._version, out._version - before

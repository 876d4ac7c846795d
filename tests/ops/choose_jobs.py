"""What processes of tests/ops/test_choose.py run: importable, as pickling needs it."""

from __future__ import annotations

import os
import pickle
from typing import Any

import torch

import pk
import pk.ops
from pk.ops import baseline, choose, fused, tuning
from pk.runtime.group import current, process_group


def numbers(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def operands(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    return numbers(rank, 16, 32), numbers(50 + rank, 32, 48)


def gloo(rank: int, world: int, folder: str, results: Any) -> None:
    """One process of a gloo job, with a cache folder of its own."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["PK_CACHE_DIR"] = f"{folder}/cache{rank}"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    try:
        results.put(pickle.dumps((rank, _gloo(rank))))  # by value: the process ends before they are read
    except BaseException as error:  # noqa: BLE001
        results.put(pickle.dumps((rank, f"{type(error).__name__}: {error}")))
    dist.barrier()
    pk.finalize()
    dist.destroy_process_group()


def _gloo(rank: int) -> dict[str, Any]:
    import torch.distributed as dist

    a, b = operands(rank)
    local = pk.ops.matmul(a, b) if rank == 0 else None  # before pk has met the process group, and meets nobody
    found: dict[str, Any] = {name: getattr(pk.ops, name)(a, b, config="library") for name in fused.OPERATORS}
    found["local"] = local
    # float8 does not pickle: only its float32 result travels.
    row, col = torch.full((16, 1), 0.5 + rank), torch.full((1, 48), 2.0)
    a8, b8 = a.to(torch.float8_e4m3fn), b.T.contiguous().to(torch.float8_e4m3fn).T
    options = {"scale_a": row, "scale_b": col, "out_dtype": torch.float32, "config": "library"}
    found["fp8"] = pk.ops.all_gather_matmul(a8, b8, **options)
    x, w = a.clone().requires_grad_(), b.clone().requires_grad_()
    pk.ops.all_gather_matmul(x, w, config="library").float().pow(2).sum().backward()
    found["gradients"] = (x.grad, w.grad)
    found["direct"] = process_group(current()) is dist.group.WORLD
    # Rank 1 is slow with what is quick on rank 0; afterwards only rank 0's disk knows.
    baseline.unavailable = lambda group: ""
    current().choices = None
    slow = {0: (30.0, 10.0), 1: (40.0, 90.0)}
    tuning.timed = lambda q, way, repeats: slow[rank][not way.library]
    pk.ops.tune("matmul_all_reduce", a, b, limit=1, save=True)
    current().choices = None  # as in another run
    q = pk.ops.tensor_parallel.request("matmul_all_reduce", a, b, None, None, None, None, None, None, None)
    found["choice"] = choose.decide(q, False, None, None).name
    found["files"] = sum(
        name.endswith(".json") for _, _, names in os.walk(os.environ["PK_CACHE_DIR"]) for name in names
    )
    return found

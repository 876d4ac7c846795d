"""pk.nn in processes of torch.distributed, and the example."""

from __future__ import annotations

import importlib.util
import multiprocessing
from pathlib import Path
from types import ModuleType

import pytest

import pk
from tests.nn.jobs import under_torchrun, versions


@pytest.mark.timeout(280)
def test_a_mesh_of_pairs(tmp_path: Path) -> None:
    """DeviceMesh (2, 2): tensor parallel in the pairs, data parallel (DDP, FSDP) across, eager and compiled."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    args = (4, str(tmp_path / "store"), results)
    jobs = [context.Process(target=under_torchrun, args=(rank, *args), daemon=True) for rank in range(4)]
    for job in jobs:
        job.start()
    found = dict(results.get(timeout=240) for _ in jobs)
    for job in jobs:
        job.join(60)
    for rank, errors in found.items():
        assert isinstance(errors, dict), errors
        worst = max(errors, key=lambda name: errors[name])
        assert errors[worst] < 0.03, (rank, worst, errors[worst])
        assert len(errors) == 14


def test_a_launch_in_processes_leaves_its_inputs_alone() -> None:
    """Else autograd refuses to use what it saved for the backward pass."""
    first, second = pk.spawn(versions, 2, backend="sim-processes")
    assert first[:2] == second[:2] == (0, 0)
    assert second[2] >= 1, "the result came from another process"


def example() -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "10_transformer.py"
    found = importlib.util.spec_from_file_location("transformer", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_example(ranks: int) -> None:
    module = example()
    args = module.arguments(["--ranks", str(ranks), "--steps", "6", "--heads", "6", "--features", "48", "--tokens", "24", "--hidden", "96"])  # fmt: skip  # noqa: E501
    whole, together, _, held = module.compare(args)
    assert whole[-1] < 0.6 * whole[0], "it learns nothing, so it shows nothing"
    for a, b in zip(whole, together, strict=True):
        assert abs(a - b) < 0.02 * a
    assert held < sum(p.numel() for p in module.model_and_data(args)[0].parameters())

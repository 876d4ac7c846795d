"""PK_SANITIZE=1 on a GPU: planted indices are reported, poison is found, and clean kernels run clean."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import pk
from pk import errors
from tests import sanitize_kernels as k
from tests.kernels import relative_error
from tests.problems import expected, problems, solve_all

pytestmark = pytest.mark.gpu(1)


@pytest.fixture(autouse=True)
def sanitize(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PK_SANITIZE", "1")
    monkeypatch.setenv("PK_TIMEOUT_S", "5")


def _matrix(rows: int, cols: int) -> torch.Tensor:
    return torch.arange(rows * cols, dtype=torch.float32, device=pk.device()).view(rows, cols)


def _call(name: str, *numbers: Any) -> str:
    x, c = _matrix(64, 64), pk.empty((64, 64), torch.float32)
    try:
        if name == "counters":
            k.counters(c, *numbers)
        elif name == "elements":
            k.elements(x, c, *numbers)
        elif name == "tiles":
            k.tiles(x, c, *numbers)
        else:
            kernel = k.rows if name == "rows" else k.send_rows
            kernel(x, torch.tensor(numbers, dtype=torch.int32, device=pk.device()), c)
        pk.synchronize()
    except errors.HangError as error:
        pk.reset()
        return str(error)
    return ""


def _calls(rank: int, calls: list[tuple[Any, ...]]) -> list[str]:
    return [_call(*c) for c in calls]


PLANTED = [
    (("counters", 3, 0), "index 1 of `arrived` is 3, which is none of 0 to 2"),
    (("counters", -1, 0), "index 1 of `arrived` is -1, which is none of 0 to 2"),
    (("counters", 1, 2), "the rank that `arrived` is signalled on is 2, which is none of 0 to 1"),
    (("elements", 64, 0), "column of `x` is 64, which is none of 0 to 63"),
    (("elements", 0, -7), "column of `c` is -7, which is none of 0 to 63"),
    (("tiles", 1000, 0), "row of `x` is 32000, which is none of 0 to 63"),
    (("tiles", 0, 5), "the rank whose `c` is meant is 5, which is none of 0 to 1"),
    (("tiles", 0, 100000), "the rank whose `c` is meant is 100000, which is none of 0 to 1"),
    (("rows", 1, 2, 5000, -1), "row of `x` is 5000, which is none of 0 to 63"),
    (("send_rows", 1, 102, 201, -1), "the rank whose `c` is meant is 2, which is none of 0 to 1"),
]
CLEAN = [
    ("counters", 2, 1), ("elements", 63, 0), ("elements", 100, 63), ("tiles", 1, 1), ("rows", 63, 0, -1),
    ("send_rows", 163, 0, -1),
]  # fmt: skip


@pytest.mark.parametrize("backend", ["cuda-threads", "cuda-processes"])
def test_an_index_outside_its_bound_is_reported_on_every_rank(backend: str) -> None:
    calls = [call for call, _ in PLANTED] + CLEAN
    for said in pk.spawn(_calls, 2, backend, (calls,)):
        for text, (call, wanted) in zip(said, PLANTED, strict=False):
            assert f"kernel `{call[0]}`: rank " in text and wanted in text, (call, text)
            assert "sanitize_kernels.py" in text and ("storer" in text or "loader" in text)
        assert said[len(PLANTED) :] == [""] * len(CLEAN)


def _poisoned(rank: int) -> list[torch.Tensor]:
    found = []
    for _ in range(3):  # the second launch may not find what the first one left
        c = torch.zeros(2 * k.TILE, k.TILE, dtype=torch.bfloat16, device=pk.device())
        k.unwritten(torch.zeros(8, 8, dtype=torch.bfloat16, device=pk.device()), c)
        pk.synchronize()
        found.append(c.cpu())
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_scratch_and_stages_that_nothing_wrote_are_nan(world: int) -> None:
    for found in pk.spawn(_poisoned, world, "cuda"):
        assert all(bool(c.isnan().all()) for c in found)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_clean_kernels_run_clean(world: int) -> None:
    batch = problems()
    for rank, want in enumerate(pk.spawn(solve_all, world, "cuda", (world, batch))):
        for got, problem in zip(want, batch, strict=True):
            assert relative_error(got, expected(world, problem)[rank]) <= 1e-2, problem

"""Index vectors on the simulator: rows gathered and scattered, elements, counters, loops whose extents are read."""

from __future__ import annotations

import pytest
import torch

import pk
from tests.vector_kernels import double_rows, exchange_rows, gather_rows, last_adds, segments

SEEDS = range(4)


@pytest.fixture(params=SEEDS)
def seed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("PK_SEED", str(request.param))
    return int(request.param)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int32], ids=str)
@pytest.mark.parametrize(("r", "c"), [(32, 64), (128, 8), (5, 32)])
def test_rows_gathered_and_scattered(seed: int, dtype: torch.dtype, r: int, c: int) -> None:
    gen = torch.Generator().manual_seed(seed)
    x = torch.randint(-9, 9, (50, 72), generator=gen).to(dtype)
    rows = torch.randint(-2, 53, (77,), generator=gen).int()  # -2 and 50 up: no such row, zero
    y = torch.full((77, 72), 99).to(dtype)
    gather_rows(x, rows, y, R=r, C=c)
    want = torch.zeros_like(y)
    exists = (rows >= 0) & (rows < 50)
    want[exists] = x[rows[exists].long()]
    want[rows == -1] = 99
    assert torch.equal(y, want)


def test_rows_past_a_ragged_edge(seed: int) -> None:
    whole, target = torch.randn(20, 24).bfloat16(), torch.full((20, 40), 7.0).bfloat16()
    rows = torch.arange(19, -1, -1, dtype=torch.int32)
    gather_rows(whole[:, :13], rows, target[:, :13])  # 26 bytes a row: no multiple of 16
    assert torch.equal(target[:, :13], whole[:, :13].flip(0))
    assert (target[:, 13:] == 7).all()


@pytest.mark.parametrize(("m", "n"), [(130, 72), (128, 64)])
def test_gathered_rows_in_registers(seed: int, m: int, n: int) -> None:
    x = torch.randn(40, n).bfloat16()
    rows = torch.randint(-1, 40, (m,)).int()
    y = torch.full((m, n), 3.0).bfloat16()
    double_rows(x, rows, y)
    want = torch.where((rows >= 0)[:, None], 2 * x[rows.clamp(min=0).long()], torch.tensor(3.0).bfloat16())
    assert torch.equal(y, want)


def _exchange(rank: int, world: int, n: int, cols: int) -> tuple[torch.Tensor, ...]:
    perm = torch.randperm(world * n, generator=torch.Generator().manual_seed(n)).int()
    to = perm[rank * n : (rank + 1) * n].clone()
    x = torch.randn(n, cols, generator=torch.Generator().manual_seed(rank)).bfloat16()
    y, source = pk.empty((n, cols), torch.bfloat16), pk.empty((n,), torch.int32)
    seen, tickets = torch.zeros(n, dtype=torch.int32), torch.full((1,), -1, dtype=torch.int32)
    exchange_rows(x, to, y, source, seen, tickets)
    return x, to, y.clone(), seen, tickets


@pytest.mark.parametrize(("world", "n", "cols"), [(1, 45, 136), (2, 85, 264), (3, 41, 72), (4, 40, 128)])
def test_rows_exchanged_between_ranks(seed: int, world: int, n: int, cols: int) -> None:
    out = pk.spawn(_exchange, world, "sim", (world, n, cols))
    for rank, (_, _, y, seen, tickets) in enumerate(out):
        assert int(tickets) == -(-n // 40) * -(-cols // 128) - 1
        for sender, (x, to, *_) in enumerate(out):
            mine = to % world == rank
            row = (to[mine] // world).long()
            assert torch.equal(y[row], x[mine])
            assert torch.equal(seen[row], sender * n + torch.arange(n).int()[mine])


def test_task_loops_of_extents_in_memory(seed: int) -> None:
    x = torch.randn(60, 40).bfloat16()
    first, count = torch.tensor([3, 0, 60, 10], dtype=torch.int32), torch.tensor([20, 60, 0, 1], dtype=torch.int32)
    y = torch.zeros(4 * 60, 40).bfloat16()
    segments(x, first, count, y)
    want = torch.zeros_like(y)
    for s, (at, n) in enumerate(zip(first.tolist(), count.tolist(), strict=True)):
        want[60 * s : 60 * s + n] = x[at : at + n]
    assert torch.equal(y, want)


def test_an_assert_says_what_the_user_wrote() -> None:
    with pytest.raises(pk.PkError, match="a segment leaves x"):
        segments(
            torch.zeros(60, 40).bfloat16(),
            torch.tensor([41]).int(),
            torch.tensor([20]).int(),
            torch.zeros(60, 40).bfloat16(),
        )


def test_the_last_ticket_sees_what_all_have_stored(seed: int) -> None:
    x, total = torch.randint(-50, 50, (9, 64)).int(), torch.zeros(64, dtype=torch.int32)
    last_adds(x, total)
    assert torch.equal(total, 2 * x.sum(0, dtype=torch.int32))

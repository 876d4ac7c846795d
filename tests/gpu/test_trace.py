"""``pk.trace`` on a GPU: every block's roles are there, their times add up, every task is done once."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

import pk
from pk.timeline import Timeline

pytestmark = pytest.mark.gpu(1)
M, N, K = 1024, 2048, 2048


def traced(rank: int, world: int, folder: str) -> tuple[Timeline, int]:
    """Two launches of GEMM + reduce-scatter, traced after a warm-up; and how many blocks a launch may have."""
    generator = torch.Generator().manual_seed(rank)
    a = torch.randn(M, K, generator=generator).to(pk.device(), torch.bfloat16)
    b = torch.randn(K, N, generator=generator).to(pk.device(), torch.bfloat16)
    call = lambda: pk.ops.matmul_reduce_scatter(a, b, config="c128x256", deterministic=True)  # noqa: E731
    before = call()
    with pk.trace(Path(folder) / "timeline.json", launches=2) as timeline:
        for _ in range(3):
            during = call()
    after = call()
    assert torch.equal(before, during) and torch.equal(before, after)
    sharing = -(-world // torch.cuda.device_count())
    return timeline, torch.cuda.get_device_properties(0).multi_processor_count // sharing


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_role_of_every_block_is_there_and_adds_up(world: int, tmp_path: Path) -> None:
    timeline, blocks = pk.spawn(traced, world, "cuda-threads", (world, str(tmp_path)))[world - 1]
    print(timeline)
    assert len(timeline.launches) == 2 and timeline.missed == 1
    for launch in timeline.launches:
        assert 0 < launch.nanoseconds < 1e9
        for rank in range(world):
            roles = launch.roles(rank)
            assert {"loader", "consumer", "storer"} <= roles.keys()
            for role, rows in roles.items():
                assert len(rows) == blocks, role
                for row in rows:
                    assert row.lost == 0 and 0 <= row.waited <= row.end - row.begin
                    assert [s for s in row.spans if not 0 <= s.waited <= s.end - s.begin] == []
            for role in ("loader", "consumer", "storer"):
                done = Counter(task for row in roles[role] for _, task in row.tasks)
                assert done and set(done.values()) == {1}, role
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    assert {e["pid"] for e in events} == set(range(world))

"""The benchmarks of several ranks, rehearsed without a GPU: rows of their tables, their checks, a soak, a sweep."""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import pk

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.parametrize("how", [["--threads"], []], ids=["threads", "processes"])
def test_a_rehearsal(tmp_path: Path, how: list[str]) -> None:
    run = subprocess.run(
        [
            sys.executable, str(BENCHMARKS / "tensor_parallel.py"), *how, "--ranks", "2", "--kinds", "few",
            "--rows", "1", "--operators", "matmul_reduce_scatter", "--tiles", "c64x128", "--check", "4", "--soak", "3",
            "--most", "40", "--table", "--seconds", "200", "--out", str(tmp_path),
        ],
        capture_output=True, text=True, timeout=240, check=False,
        env={**os.environ, "PK_BACKEND": "sim", "PYTHONPATH": str(BENCHMARKS.parent)},
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    # the fourth is float8, which torch cannot send to another process by itself
    assert "checked 4 problems on 2 ranks: 0 wrong" in run.stdout
    assert "soak: 3 calls on 2 ranks, 0 wrong" in run.stdout
    (row,) = json.loads((tmp_path / "tensor_parallel.json").read_text())["rows"]
    assert row["m"] == 2
    assert row["wrong"] == []
    assert {"c64x128", "pk default", "pk.matmul"} <= row["us"].keys()
    assert row["rival"] == ("" if how else "NCCL+cuBLAS")
    with open(tmp_path / "tensor_parallel.csv", newline="", encoding="utf-8") as file:
        assert [line["operator"] for line in csv.DictReader(file)] == ["matmul_reduce_scatter"]


def test_wrong_results_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import team as teams
    import tp_problems

    def rank(rank: int) -> tuple[float, float, float]:
        team = teams.Threads(rank, 2, torch.device("cpu"), time.time(), 100)
        o = tp_problems.Operands(tp_problems.Problem("matmul_reduce_scatter", 32, 32, 32), team)
        o.poison()
        want = o.reference()
        unwritten = o.error(want)
        o.call("c64x128")
        right = o.error(want)
        o.out[0, 0] += 8
        return unwritten, right, o.error(want)

    for unwritten, right, off in pk.spawn(rank, 2, "sim"):
        assert unwritten == math.inf
        assert right < 5e-3 < off


def test_parts_can_still_be_taken_out_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import tp_problems
    import what_if

    for operator, parts in what_if.TAKEN_OUT.items():
        compiled = what_if.compiled(tp_problems.Problem(operator, 8192, 4096, 8192), 2)
        assert [what for what, _ in compiled] == list(parts)
        for what, (name, arguments) in compiled:
            assert getattr(what_if.module(operator, what), name).specialise(**arguments).ir
    monkeypatch.setitem(what_if.TAKEN_OUT[tp_problems.AG], "x", what_if.Variant([("gone", "")]))
    with pytest.raises(ValueError, match="the kernels have no 'gone' any more"):
        what_if.module(tp_problems.AG, "x")


@pytest.mark.parametrize("how", [["--threads"], []], ids=["threads", "processes"])
def test_a_rehearsal_of_the_collectives(tmp_path: Path, how: list[str]) -> None:
    for more, rows in (["--table", "--check", "8", "--sizes", "1KB"], 4), (["--sweep", "--sizes", "4KB"], 4):
        run = subprocess.run(
            [
                sys.executable, str(BENCHMARKS / "collectives.py"), *how, *more, "--ranks", "2", "--seconds", "100",
                "--out", str(tmp_path),
            ],
            capture_output=True, text=True, timeout=120, check=False,
            env={**os.environ, "PK_BACKEND": "sim", "PYTHONPATH": str(BENCHMARKS.parent)},
        )  # fmt: skip
        assert run.returncode == 0, run.stdout + run.stderr
        assert "--check" not in more or "checked 8 calls on 2 ranks: 0 wrong" in run.stdout
        found = json.loads((tmp_path / "collectives.json").read_text())["rows"]
        assert len(found) == rows
        assert all(row["wrong"] == [] and row["all"]["pk"] > 0 for row in found)
        assert found[0]["rival"] == ("" if how or "--sweep" in more else "NCCL")
        assert any("t512 s32 b0" in name for row in found for name in row["all"]) == ("--sweep" in more)


def test_what_crosses_the_link() -> None:
    import collective_problems as problems

    moved = {o: problems.Problem(o, 8 << 20).link_bytes(4) / (1 << 20) for o in problems.OPERATORS}
    assert moved == {"all_reduce": 12, "all_gather": 6, "reduce_scatter": 6, "all_to_all": 6}
    assert [problems.nbytes_of(text) for text in ("300", "64KB", "1.5MB", "1gb")] == [300, 65536, 3 << 19, 1 << 30]
    assert [problems.size(nbytes) for nbytes in (300, 65536, 1 << 30)] == ["300 B", "64 KB", "1 GB"]

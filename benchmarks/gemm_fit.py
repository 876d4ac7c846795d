"""The constants of ``pk.ops.model`` from a sweep of ``benchmarks/gemm.py``: the clock of every configuration, and what
the model's choices cost against the best measured.

    python benchmarks/gemm_fit.py sweep.json
"""

from __future__ import annotations

import json
import statistics
import sys
from typing import Any

from pk.ops import model


def problem(row: dict[str, Any]) -> model.Problem:
    return model.Problem(row["m"], row["n"], row["k"], 8 if row["kind"] == "fp8" else 16)


def clocks(rows: list[dict[str, Any]], kinds: tuple[str, ...]) -> dict[str, float]:
    """GHz that make the model right for the median shape of these kinds."""
    found: dict[str, list[float]] = {}
    for row in rows:
        for name, us in row["us"].items():
            if row["kind"] in kinds and name != "cublas":
                busy = model.cycles(model.CONFIGS[name], problem(row))
                found.setdefault(name, []).append(busy / 1e3 / (us - model.LAUNCH_US))
    return {name: statistics.median(values) for name, values in found.items()}


def main() -> None:
    with open(sys.argv[1]) as f:
        rows = json.load(f)["rows"]
    fitted = {kind: clocks(rows, (kind,)) for kind in ("large", "fp8")}
    for name, kind in (("CLOCK", "large"), ("CLOCK_8", "fp8")):
        print(f"{name} = {{" + ", ".join(f'"{c}": {ghz:.3f}' for c, ghz in fitted[kind].items()) + "}")
    print("\nkind  b        M      N      K   best            ratio   old choice      costs   new choice      costs")
    old = dict(model.CLOCK), dict(model.CLOCK_8)
    for row in rows:
        names = {}
        for when, (wide, narrow) in (("old", old), ("new", (old[0] | fitted["large"], old[1] | fitted["fp8"]))):
            for table, values in ((model.CLOCK, wide), (model.CLOCK_8, narrow)):
                table.clear()
                table.update(values)
            model.ranking.cache_clear()
            timed = [c.name for c, _ in model.ranking(problem(row)) if c.name in row["us"]]
            names[when] = timed[0]
        best, us = row["best"], row["us"]
        costs = "   ".join(f"{name:14} {us[name] / us[best]:6.3f}" for name in names.values())
        print(f"{row['kind']:5} {row['layout']} {row['m']:7} {row['n']:6} {row['k']:6}   {best:14} "
              f"{row['best_ratio']:6.3f}   {costs}")  # fmt: skip


if __name__ == "__main__":
    main()

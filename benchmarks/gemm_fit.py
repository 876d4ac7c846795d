"""The clocks of ``pk.ops.model`` from a sweep of ``benchmarks/gemm.py``, and what the model's choices cost against the
best measured.

A sweep of some configurations only replaces theirs: the clocks of the others are moved by what the median of these
moved, since GPUs and their days differ by a few percent.

    python benchmarks/gemm_fit.py sweep.json            # prints
    python benchmarks/gemm_fit.py sweep.json --write    # and rewrites pk/ops/clocks.py
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from pk.ops import clocks, cublas, model

TABLES: dict[str, dict[str, float]] = {"kn": clocks.CLOCK["kn"], "nk": clocks.CLOCK["nk"], "fp8": clocks.CLOCK_8}


def problem(row: dict[str, Any]) -> model.Problem:
    return model.Problem(row["m"], row["n"], row["k"], 8 if row["kind"].startswith("fp8") else 16, layout=row["layout"])


def times(row: dict[str, Any]) -> dict[str, float]:
    """Microseconds of the configurations that still exist."""
    return {name: us for name, us in row["us"].items() if name in model.CONFIGS}


def fitted(rows: list[dict[str, Any]], table: str) -> dict[str, float]:
    """GHz that make the model right for the median large shape.

    What all configurations have in common on a shape is taken out first (median polish), since some are measured on,
    or candidates for, some shapes only.
    """
    found: dict[str, dict[int, float]] = {}  # by configuration and shape
    for i, row in enumerate(rows):
        if row["kind"] == ("fp8" if table == "fp8" else "large") and table in ("fp8", row["layout"]):
            for name, us in times(row).items():
                if model.legal(model.CONFIGS[name], problem(row)):
                    busy = model.cycles(model.CONFIGS[name], problem(row))
                    found.setdefault(name, {})[i] = busy / 1e3 / (us - model.LAUNCH_US)
    shapes = dict.fromkeys((i for values in found.values() for i in values), 1.0)
    ghz: dict[str, float] = {}
    for _ in range(20):
        ghz = {name: statistics.median(v / shapes[i] for i, v in values.items()) for name, values in found.items()}
        shapes = {i: statistics.median(v[i] / ghz[name] for name, v in found.items() if i in v) for i in shapes}
    middle = statistics.median(shapes.values()) if shapes else 1.0
    return {name: round(value * middle, 4) for name, value in ghz.items()}


def merged(old: dict[str, float], new: dict[str, float]) -> dict[str, float]:
    """``new``, and what only ``old`` has, moved along; in the order of the configurations."""
    both = [new[name] / old[name] for name in new if name in old]
    moved = statistics.median(both) if both else 1.0
    every = {name: round(ghz * moved, 4) for name, ghz in old.items()} | new
    return {name: every[name] for name in model.CONFIGS if name in every}


def use(tables: dict[str, dict[str, float]]) -> None:
    for name, table in TABLES.items():
        table.clear()
        table.update(tables[name])
    model.ranking.cache_clear()


def text(tables: dict[str, dict[str, float]]) -> str:
    """The new ``pk/ops/clocks.py``."""

    def dictionary(table: dict[str, float], indent: str) -> str:
        lines, line = [], ""
        for entry in (f'"{name}": {ghz:.4f},' for name, ghz in table.items()):
            if len(indent) + 4 + len(line) + 1 + len(entry) > 118:
                lines, line = [*lines, line], ""
            line = f"{line} {entry}".strip()
        return "{\n" + "".join(f"{indent}    {each}\n" for each in [*lines, line]) + indent + "}"

    head = Path(clocks.__file__).read_text().partition("CLOCK:")[0]
    layouts = "".join(f'    "{name}": {dictionary(tables[name], "    ")},\n' for name in ("kn", "nk"))
    return (
        f"{head}CLOCK: dict[str, dict[str, float]] = {{\n{layouts}}}  # fmt: skip\n"
        f"CLOCK_8: dict[str, float] = {dictionary(tables['fp8'], '')}  # fmt: skip\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweep")
    parser.add_argument("--write", action="store_true", help="rewrite pk/ops/clocks.py")
    args = parser.parse_args()
    rows = json.loads(Path(args.sweep).read_text())["rows"]
    old = {name: dict(table) for name, table in TABLES.items()}
    new = {name: merged(old[name], fitted(rows, name)) for name in TABLES}
    print("kind  b        M      N      K   best            ratio   old choice      costs   new choice      costs"
          "   estimates are long by: choice, cuBLAS")  # fmt: skip
    ratios: dict[str, list[float]] = {}
    for row in rows:
        us, names = times(row), []
        for tables in (old, new):
            use(tables)
            names.append(next(c.name for c, _ in model.ranking(problem(row)) if c.name in us))
        least = min(us, key=lambda name: us[name])
        costs = "   ".join(f"{name:14} {us[name] / us[least]:6.3f}" for name in names)
        estimate = model.microseconds(model.CONFIGS[names[1]], problem(row)) / us[names[1]]
        ratios.setdefault(f"{row['kind']} {row['layout']}", []).append(row["us"]["cublas"] / us[names[1]])
        theirs = cublas.microseconds(problem(row)) / row["us"]["cublas"]
        print(f"{row['kind']:5} {row['layout']} {row['m']:7} {row['n']:6} {row['k']:6}   {least:14} "
              f"{row['us']['cublas'] / us[least]:6.3f}   {costs}   {estimate:6.3f} {theirs:6.3f}")  # fmt: skip
    for kind, found in ratios.items():
        mean = statistics.geometric_mean(found)
        print(f"{kind}: cuBLAS / new choice: geometric mean {mean:.4f}, least {min(found):.4f}")
    print(f"\n{text(new)}")
    if args.write:
        Path(clocks.__file__).write_text(text(new))


if __name__ == "__main__":
    main()

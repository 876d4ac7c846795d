"""What the tensor-parallel benchmark prints and writes."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import torch
from report import table, write
from rounds import KINDS
from tp_problems import LINK_GB_S, Problem

from pk.ops import fused

Row = dict[str, Any]


def lines(row: Row) -> str:
    """A row in words: time (ratio to cuBLAS alone)."""
    us, base = row["us"], row["cublas_us"]

    def one(name: str) -> str:
        single = f" single {row['single_us'][name]:.0f}" if name in row["single_us"] else ""
        return f"{name} {us[name]:.1f} ({us[name] / base:.3f}{single})"

    p = Problem(row["operator"], row["m"], row["n"], row["k"])
    said = [
        f"{p.title()}, world {row['world']}: pk {row['best_us']:.1f} us = {row['best_us'] / base:.3f} of {row['base']}",
        f"{row['best_us'] / row['floor_us']:.3f} of the floor {row['floor_us']:.1f} (link {row['link_us']:.1f})",
    ]
    if row["rival"]:
        said.append(f"{row['rival']} {row['rival_us'] / row['best_us']:.3f} times as slow")
    if "predicted_us" in row:
        said.append(f"model {row['predicted_us']:.0f}")
    said.append(f"error {max(row['errors'].values()):.1e}")
    if row["wrong"]:
        said.append(f"WRONG {' '.join(row['wrong'])}")
    named = {kind: sorted((n for n in us if row["kinds"][n] == kind), key=us.__getitem__) for kind in KINDS}
    ours, rivals, parts = named["pk"], named["rival"], named["gemm"] + named["comm"]
    host = min((row["host_us"][n] for n in ours), default=math.nan)
    return "\n".join(
        [
            "; ".join(said),
            "   parts:  " + "  ".join(one(n) for n in parts),
            *(["   without: " + "  ".join(one(n) for n in named["part"])] if named["part"] else []),
            "   rivals: " + "  ".join(one(n) for n in rivals),
            "   pk:     " + "  ".join(one(n) for n in ours)
            + f"; host {host:.0f} us",
        ]
    )  # fmt: skip


COLUMNS = {
    "NCCL+cuBLAS": "nccl_cublas_us", "async-TP": "async_tp_us", "cuBLAS+two-shot": "two_shot_us",
    "pk.matmul": "pk_matmul_us", "NCCL": "nccl_us", "pk default": "pk_default_us",
}  # fmt: skip


def flat(rows: list[Row]) -> list[Row]:
    """With the contenders that every row has as columns of their own."""
    return [
        {**row, "ratio": row["best_us"] / row["cublas_us"], **{c: row["us"].get(n, "") for n, c in COLUMNS.items()}}
        for row in rows
    ]


def finish(rows: list[Row], folder: str, name: str) -> None:
    """Summary, files, plot."""
    view = []
    for r in rows:
        names = {"NCCL+cuBLAS": "NCCL+cuBLAS", "async-TP": "async-TP", "default": "pk default"}
        ratios = {k: r["us"][n] / r["cublas_us"] for k, n in names.items() if n in r["us"]}
        view.append({
            "operator": r["operator"], "M": r["m"], "N": r["n"], "K": r["k"], "alone us": r["cublas_us"],
            "floor": r["floor_us"] / r["cublas_us"], **ratios, "pk": r["best_us"] / r["cublas_us"], "by": r["best"],
            "rival/pk": r["rival_us"] / r["best_us"],
        })  # fmt: skip
    columns = "operator,M,N,K,alone us,floor,NCCL+cuBLAS,async-TP,default,pk,by,rival/pk"
    print("\n" + table(view, columns.split(",")), flush=True)
    for op in fused.OPERATORS:
        gains = [r["rival_us"] / r["best_us"] for r in rows if r["operator"] == op and r["best_us"] == r["best_us"]]
        gains = [g for g in gains if g == g]
        if gains:
            mean = statistics.geometric_mean(gains)
            print(f"{op}: geometric mean of best rival / pk {mean:.3f}, least {min(gains):.3f}")
    if folder:
        write(folder, name, flat(rows), [f"link {LINK_GB_S} GB/s", f"torch {torch.__version__}"])
        print(plot(str(Path(folder) / f"{name}.png"), rows))


def plot(path: str, rows: list[Row]) -> str:
    """Ratios to cuBLAS alone, a group of bars for each problem."""
    try:
        import matplotlib
    except ImportError:
        return "no plot: matplotlib is not installed"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    bars = {"floor": lambda r: r["floor_us"], "pk": lambda r: r["best_us"]}
    bars |= {n: (lambda r, n=n: r["us"].get(n, math.nan)) for n in ("async-TP", "NCCL+cuBLAS")}
    figure, axis = pyplot.subplots(figsize=(max(6, 0.7 * len(rows)), 4.5))
    for i, (name, value) in enumerate(bars.items()):
        places = [j + 0.2 * i for j in range(len(rows))]
        axis.bar(places, [value(r) / r["cublas_us"] for r in rows], 0.2, label=name)
    short = dict(zip(fused.OPERATORS, ("AG", "RS", "AR"), strict=True))
    names = [f"{short[r['operator']]} {r['m']}\n{r['n']}\n{r['k']}" for r in rows]
    axis.set_xticks([j + 0.3 for j in range(len(rows))], names, fontsize=7)
    axis.set_ylabel("time / cuBLAS alone")
    axis.set_ylim(0, min(4, 1.05 * axis.get_ylim()[1]))
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=140)
    return f"plot: {path}"

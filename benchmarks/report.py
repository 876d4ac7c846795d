"""What the benchmarks share: facts about the machine, and rows as CSV, JSON and a table."""

from __future__ import annotations

import csv
import json
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def facts() -> Row:
    """Where and how the numbers were made."""
    import torch

    gpus = torch.cuda.device_count()
    return {
        "command": " ".join(sys.argv),
        "device": torch.cuda.get_device_name(0) if gpus else "none",
        "gpus": gpus,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def write(folder: str, name: str, rows: Sequence[Row], notes: Sequence[str] = ()) -> None:
    """``folder/name.csv`` and ``folder/name.json``; nothing without a folder.  What is nested is only in the JSON."""
    if not folder:
        return
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    columns = list(dict.fromkeys(k for row in rows for k, v in row.items() if not isinstance(v, dict | list)))
    with open(path / f"{name}.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    text = json.dumps({**facts(), "notes": list(notes), "rows": list(rows)}, indent=1)
    (path / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def table(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """Rows as aligned text, numbers with three significant digits or so."""
    cells = [[_cell(row.get(column, "")) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in [list(columns), *cells]) for i in range(len(columns))]
    lines = [list(columns), *cells]
    return "\n".join("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)) for line in lines)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)

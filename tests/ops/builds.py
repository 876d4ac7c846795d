"""Kernels of ``pk.ops.matmul`` compiled ahead, in processes side by side: a test that needs many waits once."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

import pk
from pk.ops import dense, kernels
from pk.ops.model import CONFIGS
from pk.runtime.compile import sass


def build(
    a: torch.Tensor, b: torch.Tensor, name: str, activation: str | None, **vectors: torch.Tensor
) -> dict[str, Any]:
    """Arguments of ``specialise`` for one call; the tensors may be on "meta"."""
    out = torch.empty(a.shape[0], b.shape[1], dtype=dense.default_dtype(a), device=a.device)
    given = dense.arguments(a, b, out, vectors, activation or "none", CONFIGS[name])
    return {k: pk.spec(v.dtype, v.ndim) if isinstance(v, torch.Tensor) else v for k, v in given.items()}


def compile_one(arguments: dict[str, Any]) -> str:
    """Fills the disk cache; what is wrong with the cubin, or nothing."""
    binary = kernels.matmul.specialise(**arguments).binary
    found = binary.resources
    # Beside 192 registers of accumulator those of two vectors along its rows are one too many: set aside before it.
    allowed = 8 if arguments["PINGPONG"] and arguments.get("row_scale") and arguments.get("row_bias") else 0
    wrong = found.local_bytes > allowed or found.spill_bytes > allowed or "C75" in binary.log
    if found.local_bytes and not wrong:
        lines = sass(binary.cubin).splitlines()
        products = [i for i, line in enumerate(lines) if "GMMA" in line]
        wrong = any("LDL" in line or "STL" in line for line in lines[products[0] : products[-1]])
    return f"{arguments}: {found}\n{binary.log}" if wrong else ""


def compile_all(builds: Iterable[dict[str, Any]]) -> list[str]:
    """Complaints about the cubins."""
    wanted = {repr(b): b for b in builds}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1), mp_context=context) as pool:
        return [complaint for complaint in pool.map(compile_one, wanted.values()) if complaint]

"""Mutants that change nothing: ``equivalent.toml``, by kernel and name, each with its reason."""

from __future__ import annotations

from pathlib import Path

import tomllib

FILE = Path(__file__).with_name("equivalent.toml")


def _read() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for entry in tomllib.loads(FILE.read_text(encoding="utf-8"))["equivalent"]:
        for kernel in entry["kernels"]:
            for name in entry["mutants"]:
                assert name not in found.setdefault(kernel, {}), f"equivalent.toml lists {kernel}: {name} twice"
                found[kernel][name] = entry["reason"]
    return found


EQUIVALENT: dict[str, dict[str, str]] = _read()

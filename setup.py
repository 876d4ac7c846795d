"""Builds the optional native module ``pk._C``; everything else about the package is in pyproject.toml.

``PK_NATIVE=0`` builds without it, ``PK_NATIVE=require`` makes a failed build an error (releases); by default a machine
without a working C++ compiler gets a warning and a pk that does the same work in Python.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from setuptools import setup


def extensions() -> list[Any]:
    wish = os.environ.get("PK_NATIVE", "")
    if wish == "0":
        return []
    try:
        from pybind11.setup_helpers import Pybind11Extension
    except ImportError:
        if wish == "require":
            raise
        print("pk: pybind11 is not installed, building without pk._C", file=sys.stderr)
        return []
    native = Pybind11Extension(
        "pk._C",
        [f"csrc/{name}.cpp" for name in ("module", "explore", "launch", "reach", "submit", "warm", "watch")],
        depends=[f"csrc/{name}.hpp" for name in ("dlpack", "explore", "launch", "submit", "warm", "watch")],
        cxx_std=17,
        extra_compile_args=["-O2", "-Wall", "-Wextra"],
        extra_link_args=["-pthread"],
    )
    native.optional = wish != "require"
    return [native]


setup(ext_modules=extensions())

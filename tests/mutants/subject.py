"""What is mutated: a kernel with constants, and small problems on which its mutants are run."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import pk
from pk.ir import nodes as ir
from pk.sim.memory import SimTensor
from pk.simulate import _raw
from tests.conformance.case import Arg, Arguments

EXAMPLES = Path(__file__).parents[2] / "examples"
Make = Callable[[int, int], Arguments]


@dataclass(frozen=True)
class Problem:
    """One launch: tensors by (rank, world), scalars, and how many SMs each rank has.

    Enough tasks for every ring to wrap around on some block, and tails in every dimension; blocks enough for two to
    meet.
    """

    world: int
    make: Make
    sms: int = 2
    scalars: dict[str, int | float] = field(default_factory=dict)

    def arguments(self) -> list[dict[str, SimTensor | int | float]]:
        """Fresh arguments of every rank."""
        return [
            {name: tensor(arg) for name, arg in self.make(rank, self.world).items()} | dict(self.scalars)
            for rank in range(self.world)
        ]


@dataclass(frozen=True, eq=False)
class Subject:
    """A kernel of the repository.  A mutant is caught if any of the problems catches it."""

    name: str
    kernel: pk.Kernel
    problems: tuple[Problem, ...]
    constants: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    @cached_property
    def ir(self) -> ir.Kernel:
        """The kernel that is mutated."""
        first = self.problems[0]
        specs: dict[str, Any] = {n: None for n in self.kernel.signature.tensors if self.kernel.signature.optional(n)}
        specs |= {n: pk.spec(a.dtype, a.value.ndim) for n, a in first.make(0, first.world).items()}
        return self.kernel.specialise(**specs, **first.scalars, **self.constants).ir


def tensor(arg: Arg) -> SimTensor:
    """An argument as the simulator takes it, in memory of its own."""
    made = torch.from_numpy(arg.value.copy()).to(arg.dtype)
    array, dtype = _raw(made)
    return SimTensor(array.copy(), dtype)


def example(name: str) -> ModuleType:
    """An example as a module, which is loaded once."""
    key = f"mutated_{name}"
    if key not in sys.modules:
        spec = importlib.util.spec_from_file_location(key, EXAMPLES / f"{name}.py")
        assert spec is not None and spec.loader is not None
        sys.modules[key] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[key])
    return sys.modules[key]

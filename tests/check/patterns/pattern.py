"""What a pattern is made of, and how its kernels are launched without ``pk.check``."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import pk
from pk import env

Make = Callable[[int, int], list[Any]]
"""The arguments of the kernel on one of so many ranks; ``Parallel`` parameters are plain tensors here."""


@dataclass(frozen=True)
class Expected:
    """A finding: its kind, the places it is made of, and words of its text.

    A place is ``"tag:role"``, where the line of the kernel ends in the comment ``# [tag]``.
    """

    kind: str
    places: frozenset[str]
    says: tuple[str, ...] = ()


def finds(kind: str, *places: str, says: tuple[str, ...] = ()) -> Expected:
    """A finding of ``kind`` at ``places``."""
    return Expected(kind, frozenset(places), says)


@dataclass(frozen=True)
class Case:
    """One kernel of a pattern: what a check finds in it; nothing, if it is right."""

    kernel: pk.Kernel
    expected: tuple[Expected, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)  # of pk.check, for this kernel alone


@dataclass(frozen=True)
class Weakened:
    """What no kernel can say, done to the IR of case ``case``: ``attrs`` for its ops of name ``op``.

    ``exit_words``: false takes away the wait for peers at the end of a launch.
    """

    case: str
    expected: Expected
    op: str = ""
    attrs: tuple[tuple[str, Any], ...] = ()
    exit_words: bool | None = None


@dataclass(frozen=True)
class Refused:
    """A kernel that cannot be written: types of its tensors, and words of the compile error."""

    kernel: pk.Kernel
    specs: tuple[Any, ...]
    says: tuple[str, ...]


@dataclass(frozen=True)
class Pattern:
    """A mistake: where it was made (``source``), and its kernels by name.

    ``arguments(rank, world)`` makes those of a rank, ``result`` is the position of the output, and ``reference`` says
    what must be in it on every rank.  ``options`` go to ``pk.check``; ``refused``: kernels that do not compile;
    ``weakened``: what a compiler could get wrong.
    """

    source: str
    cases: dict[str, Case]
    arguments: Make
    result: int
    reference: Callable[[int, int], torch.Tensor]  # (rank, world)
    world: int = 2
    sms: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    refused: dict[str, Refused] = field(default_factory=dict)
    weakened: dict[str, Weakened] = field(default_factory=dict)

    @property
    def wrong(self) -> dict[str, Case]:
        """The kernels in which something is found."""
        return {name: case for name, case in self.cases.items() if case.expected}

    @property
    def right(self) -> dict[str, Case]:
        """The kernels in which nothing is."""
        return {name: case for name, case in self.cases.items() if not case.expected}

    def launch(self, case: Case, world: int | None = None) -> list[torch.Tensor]:
        """Simulate one launch on all ranks; the results, by rank."""
        sms = case.options.get("sms", self.sms)
        with env.overriding(**({"PK_SIM_SMS": str(sms)} if sms else {})):
            world = world or self.world
            return pk.spawn(_body, world, "sim", args=(self, case, world))

    def run(self, name: str) -> Callable[[], None]:
        """A function for ``python -m pk check FILE:FUNCTION``."""

        def launch() -> None:
            self.launch(self.cases[name])

        launch.__name__ = name
        return launch


def _body(rank: int, pattern: Pattern, case: Case, world: int) -> torch.Tensor:
    given = pattern.arguments(rank, world)
    for i, kind in enumerate(case.kernel.signature.tensors.values()):
        if kind == "parallel":
            own = given[i]
            given[i] = pk.empty(tuple(own.shape), own.dtype)
            given[i].copy_(own)
    case.kernel(*given)
    result: torch.Tensor = given[pattern.result]
    return result.clone()


def tags(path: str) -> dict[int, str]:
    """Line numbers of a file and the tags on them."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    found = ((n, re.search(r"# \[([\w-]+)\]", line)) for n, line in enumerate(lines, 1))
    return {n: match[1] for n, match in found if match}


def numbers(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small whole numbers, other ones on every rank: sums of them are exact."""
    gen = torch.Generator().manual_seed(rank + 1)
    return torch.randint(-8, 9, shape, generator=gen).to(dtype)


def blank(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """An output that nobody has written."""
    return torch.full(shape, float("nan") if dtype.is_floating_point else -1, dtype=dtype)

"""The parts of a random program: tensors, what has been written so far, the module that comes out."""

from __future__ import annotations

from dataclasses import dataclass, field
from textwrap import indent
from typing import Any

import torch

from tests.conformance.case import Array


@dataclass
class Value:
    """A tensor of the program.  ``data``: what each rank's copy holds in the end, (rows, cols) or (world, rows, cols).

    ``made``: the tile it was made in, and how often each of its counters ``done[copy or slot, m, n]`` is raised; None
    for an input, which is there from the start.  ``anyone``: every rank is told, else only the one that holds the copy.
    """

    name: str
    kind: str  # global, parallel or scratch
    dtype: torch.dtype
    slots: bool
    rows: str
    cols: str
    data: list[Array]
    made: tuple[tuple[int, int], str] | None = None
    anyone: bool = True

    @property
    def shape(self) -> tuple[int, int]:
        return self.data[0].shape[-2:]

    @property
    def read_as(self) -> str:
        """Its own copy, in the language."""
        return self.name if self.kind == "global" else f"{self.name}[me]"


@dataclass
class Program:
    """A program being made."""

    seed: int
    world: int
    whole: bool
    values: list[Value] = field(default_factory=list)
    params: list[Value] = field(default_factory=list)
    top: list[str] = field(default_factory=list)
    first: list[str] = field(default_factory=list)  # the communicator's body
    body: list[str] = field(default_factory=list)
    shared: int = 0
    scalars: dict[str, Any] = field(default_factory=dict)


class Unsuitable(Exception):
    """Numbers grew beyond what is exact: another program is made in its place."""


def text(p: Program) -> str:
    """The module of a program."""
    kinds = {"global": "pk.Global", "parallel": "pk.Parallel"}
    params = ", ".join(f"{v.name}: {kinds[v.kind]}" for v in p.params)
    lines = ["me, W = pk.rank(), pk.world_size()", *p.top]
    if p.first:
        lines += ["with pk.communicator(sms=2):", *(f"    {line}" for line in p.first)]
    body = indent("\n".join(lines + p.body), "    ")
    return f"import pk\n\n\n@pk.kernel\ndef program_{p.seed}({params}, alpha: float, shift: int):\n{body}\n"

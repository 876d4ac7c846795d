"""A call of an operator that meets other ranks: its text, which all ranks must have alike, and the way it goes.

The first time that a rank makes a call with these shapes, dtypes, layouts and options, all ranks compare what they
call.  Later calls are compared by their launches, as those of every kernel are.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pk.errors import RanksDisagree
from pk.ops import dense
from pk.runtime import launch, symm
from pk.runtime.rendezvous import differing

if TYPE_CHECKING:
    from pk.ops.fused import Request
    from pk.runtime.group import Group

KEPT = 4096  # calls that a group remembers


class Called(NamedTuple):
    """A call of a tensor-parallel operator.  ``gathered``: the rows of all ranks are kept for the backward pass."""

    q: Request
    out: torch.Tensor | None
    deterministic: bool = False
    comm_sms: int | None = None
    config: Any = None
    gathered: bool = False

    @property
    def inside(self) -> bool:
        """Whether the result is written to the caller's symmetric memory: then it is on all ranks."""
        reduces = self.q.operator == "matmul_all_reduce"
        return reduces and self.out is not None and symm.place(self.out, self.q.group) is not None

    def key(self) -> Hashable:
        """Equal keys have equal texts, and go the same way."""
        q = self.q
        return (
            q.operator, q.a.shape, q.a.dtype, q.b.shape, dense.columns_first(q.b), q.out_dtype,
            None if q.bias is None else q.bias.dtype, q.activation, q.scale_a is None, q.scale_b is None,
            self.deterministic, self.comm_sms, self.config, self.gathered, self.inside,
        )  # fmt: skip

    def __str__(self) -> str:
        q = self.q
        found = [_matrix("a", q.a), _matrix("b", q.b) + " transposed" * dense.columns_first(q.b)]
        found += [] if q.bias is None else [f"bias {_dtype(q.bias.dtype)}"]
        found += [name for name in ("scale_a", "scale_b") if getattr(q, name) is not None]
        found += [] if q.activation == "none" else [f"activation={q.activation!r}"]
        found += [] if q.out_dtype == dense.default_dtype(q.a) else [f"out_dtype={_dtype(q.out_dtype)}"]
        found += ["out in symmetric memory"] * self.inside + ["deterministic=True"] * self.deterministic
        found += [] if self.comm_sms is None else [f"comm_sms={self.comm_sms}"]
        if self.config is not None:
            found.append(f"config={self.config if isinstance(self.config, str) else self.config.name!r}")
        found += ["rows kept for the backward pass"] * self.gathered
        return f"pk.ops.{q.operator}({', '.join(found)})"


class Collective(NamedTuple):
    """A call of a collective.  ``dims``: its dimensions by name.  ``inside``: as of :class:`Called`."""

    operator: str
    x: torch.Tensor
    dims: tuple[tuple[str, int], ...] = ()
    inside: bool = False

    def key(self) -> Hashable:
        """As of :class:`Called`."""
        return self.operator, self.x.shape, self.x.dtype, self.dims, self.inside

    def __str__(self) -> str:
        found = [_matrix("x", self.x), *(f"{name}={value}" for name, value in self.dims)]
        return f"pk.ops.{self.operator}({', '.join(found + ['out in symmetric memory'] * self.inside)})"


def _matrix(name: str, x: torch.Tensor) -> str:
    return f"{name} {tuple(x.shape)} {_dtype(x.dtype)}"


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def compared(group: Group, call: Called | Collective) -> None:
    """All ranks make this ``call``.  Collective, on the first call of its kind.

    Raises :class:`pk.errors.RanksDisagree` on every rank if they make different ones.
    """
    if group.world_size == 1:
        return
    told = launch.compare(group, "the first call of its kind", f"{call}\0{group.turn.told()}")
    pairs = [text.split("\0") for text in told]
    if len({pair[0] for pair in pairs}) > 1:
        raise RanksDisagree(
            f"the ranks make different calls at the same point:\n{differing([pair[1] for pair in pairs])}\n"
            "  Pass the same shapes, dtypes, layouts and options on every rank."
        )


def remember(group: Group, key: Hashable, way: Any) -> None:
    """Keep the way that calls with ``key`` go.  All ranks forget at the same call."""
    if len(group.calls) >= KEPT:
        group.calls.clear()
    group.calls[key] = way

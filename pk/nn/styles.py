"""How one module of a plan becomes parallel: what :func:`pk.nn.parallelize` is told for each.

Torch's own ``ColwiseParallel``, ``RowwiseParallel`` and ``SequenceParallel`` are understood too, where their layouts
are those of a layer here.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pk.errors import ArgumentError, short
from pk.nn.linear import ColumnParallelLinear, RowParallelLinear
from pk.nn.replicated import CLASSES, refuse_drifting
from pk.runtime.names import name_of

# These read the weights of their layers themselves, without calling them.
_READERS = (torch.nn.MultiheadAttention, torch.nn.TransformerEncoderLayer)


class Style(Protocol):
    """What a plan may hold."""

    def check(self, name: str, module: torch.nn.Module, parent: torch.nn.Module | None, group: Any) -> None:
        """Raise :class:`pk.errors.ArgumentError` if ``module`` cannot be replaced."""

    def replace(self, module: torch.nn.Module, group: Any) -> torch.nn.Module:
        """What takes the place of ``module``, maybe itself."""


class _Linear:
    """What the styles of linear layers have in common: fields named as the layer's options."""

    layer: Any

    def options(self, group: Any) -> dict[str, Any]:
        """The layer's options."""
        return {"group": group, **dataclasses.asdict(self)}  # type: ignore[call-overload]

    def check(self, name: str, module: torch.nn.Module, parent: torch.nn.Module | None, group: Any) -> None:
        """See :class:`Style`."""
        _check_linear(name, module, parent, type(self).__name__)
        bias = module.bias is not None
        try:
            self.layer(module.in_features, module.out_features, bias, device="meta", **self.options(group))
        except ArgumentError as error:
            raise ArgumentError(f"`{name}`: {error}") from None

    def replace(self, module: torch.nn.Module, group: Any) -> torch.nn.Module:
        """See :class:`Style`."""
        return self.layer.from_linear(module, **self.options(group))


@dataclass(frozen=True)
class ColwiseParallel(_Linear):
    """A ``torch.nn.Linear`` becomes a :class:`pk.nn.ColumnParallelLinear` with these options."""

    sequence_parallel: bool = True
    sequence_dim: int = 0
    activation: str | None = None
    parts: tuple[int, ...] | None = None
    gather_output: bool = False
    save_gathered: bool = True
    deterministic: bool = False
    comm_sms: int | None = None
    config: str | None = None

    layer = ColumnParallelLinear


@dataclass(frozen=True)
class RowwiseParallel(_Linear):
    """A ``torch.nn.Linear`` becomes a :class:`pk.nn.RowParallelLinear` with these options."""

    sequence_parallel: bool = True
    sequence_dim: int = 0
    parts: tuple[int, ...] | None = None
    deterministic: bool = False
    comm_sms: int | None = None
    config: str | None = None

    layer = RowParallelLinear


@dataclass(frozen=True)
class SequenceParallel:
    """A layer that is whole on every rank and sees this rank's tokens: the gradients of its parameters are summed.

    For ``torch.nn.LayerNorm``, ``RMSNorm``, ``Linear`` and ``Embedding``, and for layers without parameters, which stay
    as they are.  A class of your own wraps its parameters in :func:`pk.nn.sum_gradients` where it uses them.
    """

    def check(self, name: str, module: torch.nn.Module, parent: torch.nn.Module | None, group: Any) -> None:
        """See :class:`Style`."""
        if next(module.parameters(), None) is None or type(module) in CLASSES.values():
            return
        if type(module) not in CLASSES:
            known = ", ".join(cls.__name__ for cls in CLASSES)
            raise ArgumentError(
                f"`{name}` is {type(module).__name__}, and SequenceParallel knows {known} of torch.nn.\n"
                "  In its forward, use pk.nn.sum_gradients(self.weight) for self.weight, and leave it out of the plan."
            )
        refuse_drifting(f"`{name}`", module)

    def replace(self, module: torch.nn.Module, group: Any) -> torch.nn.Module:
        """See :class:`Style`."""
        if type(module) in CLASSES:
            module.__class__ = CLASSES[type(module)]
            module.group_name = name_of(group)
        return module


def _check_linear(name: str, module: torch.nn.Module, parent: torch.nn.Module | None, style: str) -> None:
    if type(module) is not torch.nn.Linear:
        raise ArgumentError(f"`{name}` is {type(module).__name__}, and {style} is for torch.nn.Linear.")
    if isinstance(parent, _READERS):
        raise ArgumentError(
            f"`{name}` is part of a {type(parent).__name__}, which reads its weights without calling it.\n"
            "  Write the block with torch.nn.Linear and scaled_dot_product_attention."
        )
    if any(getattr(module, hooks) for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")):
        raise ArgumentError(f"`{name}` has hooks, which a layer in its place would not.\n  Register them afterwards.")


# ----------------------------------------------------------------------------------------------------- torch's styles
def translated(style: Any) -> Style:
    """``style``, or the one here that does what a style of torch.distributed.tensor.parallel does.

    Raises :class:`pk.errors.ArgumentError` for anything else.
    """
    parts = getattr(style, "parts", None)
    if isinstance(style, (ColwiseParallel, RowwiseParallel)) and isinstance(parts, list):
        return dataclasses.replace(style, parts=tuple(parts))  # equal to one with a tuple
    if isinstance(style, (ColwiseParallel, RowwiseParallel, SequenceParallel)):
        return style
    name = type(style).__name__
    if not type(style).__module__.startswith("torch.distributed.tensor"):
        raise ArgumentError(
            f"the plan holds {short(style)}.\n  Use ColwiseParallel, RowwiseParallel or SequenceParallel."
        )
    if name == "SequenceParallel":
        return SequenceParallel()
    if name in ("ColwiseParallel", "RowwiseParallel") and getattr(style, "use_local_output", True):
        came, goes = _dim(style.input_layouts[0]), _dim(style.output_layouts[0])
        tokens, features = (came, goes) if name == "ColwiseParallel" else (goes, came)
        form: dict[str, Any] = {"sequence_parallel": False}
        if isinstance(tokens, int) and tokens >= 0:
            form = {"sequence_dim": tokens}
        if tokens == "all" or form != {"sequence_parallel": False}:
            if features == -1:
                return ColwiseParallel(**form) if name == "ColwiseParallel" else RowwiseParallel(**form)
            if features == "all" and name == "ColwiseParallel":
                return ColwiseParallel(gather_output=True, **form)
    raise ArgumentError(
        f"torch's {name} with these layouts is none of pk's layers: {getattr(style, '__dict__', style)}.\n"
        "  Use pk.nn's styles: sequence_parallel=True gathers and scatters tokens inside the products."
    )


def _dim(placement: Any) -> int | str:
    """The dimension of a torch placement, "all" for a replicated one."""
    if placement.is_replicate():
        return "all"
    return int(placement.dim) if placement.is_shard() else "partial"

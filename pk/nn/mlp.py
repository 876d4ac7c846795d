"""The feed-forward block of a transformer: a column layer, an activation, a row layer."""

from __future__ import annotations

from typing import Any

import torch

from pk.errors import ArgumentError
from pk.nn import arguments
from pk.nn.linear import ColumnParallelLinear, RowParallelLinear
from pk.runtime.group import current

FUNCTIONS = {
    "relu": torch.nn.functional.relu,
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


class ParallelMLP(torch.nn.Module):  # type: ignore[misc]
    """``down(activation(up(x)))``, or ``down(activation(gate(x)) * up(x))`` with ``gated``.

    ``up`` is a :class:`ColumnParallelLinear` of ``features`` to ``hidden`` with the activation in its epilogue,
    ``down`` a :class:`RowParallelLinear` back.  With ``gated``, ``up`` holds the gate in front of itself, when whole
    (2 * hidden, features): one product, and x is gathered once.  x and the result are alike: this rank's tokens in the
    sequence form, all tokens with ``sequence_parallel=False``.

    ``options`` are those that both layers have.  Raises :class:`pk.errors.ArgumentError` as they do.
    """

    def __init__(
        self, features: int, hidden: int, bias: bool = True, *, activation: str = "gelu", gated: bool = False,
        group: Any = None, save_gathered: bool = True, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()

        def look() -> str:
            self._set(activation, gated)
            extents = [arguments.whole_number(name, n) for name, n in (("features", features), ("hidden", hidden))]
            return f"ParallelMLP({extents[0]}, {extents[1]}, {activation=}, {gated=})"

        arguments.together(current(group), options.get("device"), "a ParallelMLP", look)
        up = {"save_gathered": save_gathered, **_of_up(activation, gated, hidden)}
        width = 2 * hidden if gated else hidden
        self.up = ColumnParallelLinear(features, width, bias, group=group, **up, **options)
        self.down = RowParallelLinear(hidden, features, bias, group=group, **options)

    def _set(self, activation: str, gated: bool) -> None:
        arguments.check_activation(activation, tuple(FUNCTIONS))
        arguments.flags(gated=gated)
        self.activation, self.gated = activation, gated

    @classmethod
    def from_linear(
        cls, up: torch.nn.Linear, down: torch.nn.Linear, gate: torch.nn.Linear | None = None, *,
        activation: str = "gelu", group: Any = None, device: Any = None, save_gathered: bool = True, **options: Any,
    ) -> ParallelMLP:  # fmt: skip
        """This rank's share of two layers of torch's, or of three, which all ranks hold alike."""
        for name, linear in (("up", up), ("down", down), *((("gate", gate),) if gate is not None else ())):
            arguments.check_linear(linear, name)
        if up.out_features != down.in_features:
            raise ArgumentError(
                f"`up` has {up.out_features} outputs and `down` {down.in_features} inputs.\n  They must be alike."
            )
        made = cls.__new__(cls)
        torch.nn.Module.__init__(made)
        made._set(activation, gate is not None)
        if gate is not None:
            given = {"group": group, "device": device, **_of_up(activation, True, up.out_features), **options}
            made.up = ColumnParallelLinear.from_linear(_stacked(gate, up), save_gathered=save_gathered, **given)
        else:
            made.up = ColumnParallelLinear.from_linear(
                up, group=group, device=device, activation=activation, save_gathered=save_gathered, **options
            )
        made.down = RowParallelLinear.from_linear(down, group=group, device=device, **options)
        return made.train(up.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        h = self.up(x)
        if self.gated:
            gate, h = h.chunk(2, -1)
            h = FUNCTIONS[self.activation](gate) * h
        return self.down(h)


def _of_up(activation: str, gated: bool, hidden: int) -> dict[str, Any]:
    return {"parts": (hidden, hidden)} if gated else {"activation": activation}


def _stacked(gate: torch.nn.Linear, up: torch.nn.Linear) -> torch.nn.Linear:
    """One layer with the outputs of both, one after the other."""
    if (gate.bias is None) != (up.bias is None) or gate.weight.shape != up.weight.shape:
        raise ArgumentError("`gate` and `up` differ in shape or bias.\n  Both must be alike.")
    both = torch.nn.Linear(up.in_features, 2 * up.out_features, up.bias is not None, device="meta")
    for name in ("weight", "bias"):
        first, second = getattr(gate, name), getattr(up, name)
        if first is not None:
            joined = torch.cat([first.detach(), second.detach()])
            setattr(both, name, torch.nn.Parameter(joined, requires_grad=second.requires_grad))
    return both.train(up.training)

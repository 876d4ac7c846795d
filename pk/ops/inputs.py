"""What every operator asks of its tensors."""

from __future__ import annotations

from typing import Any

import torch

from pk.errors import ArgumentError
from pk.runtime.tensors import plain


def tensors(operator: str, **given: Any) -> tuple[torch.Tensor, ...]:
    """The arguments as plain strided tensors, in order; lazily negated or conjugated ones are written out.

    Raises :class:`pk.errors.ArgumentError` for what is no tensor of memory.
    """
    return tuple(_one(operator, name, value) for name, value in given.items())


def _one(operator: str, name: str, value: Any) -> torch.Tensor:
    where = f"pk.ops.{operator}"
    if not isinstance(value, torch.Tensor):
        numpy = type(value).__module__.partition(".")[0] == "numpy"
        advice = f"Pass `torch.from_numpy({name})`" if numpy else f"Pass a tensor, such as `torch.as_tensor({name})`"
        raise ArgumentError(f"`{name}` of {where} is {type(value).__name__}, and must be a torch.Tensor.\n  {advice}.")
    if value.layout == torch.strided and value.device.type != "meta":
        value = value.resolve_neg().resolve_conj()
    plain(value, name, where)
    return value

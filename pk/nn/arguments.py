"""What layers and functions of pk.nn ask of their arguments, and how all ranks learn that one of them was refused."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from pk.errors import ArgumentError, made_of, short
from pk.runtime.rendezvous import differing
from pk.runtime.team import Group

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""Of parameters that torch can draw."""


def together(group: Group, device: Any, what: str, look: Callable[[], str]) -> None:
    """Run ``look()``, which checks the arguments of a layer on ``device`` and describes it.  Collective, but on "meta".

    Raises what it raises, and :class:`pk.errors.BackendError` on the other ranks; and
    :class:`pk.errors.ArgumentError` on all ranks if they do not describe the same.
    """
    if _on_meta(device):
        look()
        return
    told = group.attempt(f"making {what}", look)
    if len(set(told)) > 1:
        raise ArgumentError(
            f"the ranks make different layers, whose shares would not fit together:\n{differing(told)}\n"
            "  Make the same layer, with the same options, on every rank."
        )


def _on_meta(device: Any) -> bool:
    try:
        return torch.empty(0, device=device).is_meta
    except Exception:  # noqa: BLE001  no device: refused by `check_device`, on every rank
        return False


def check_device(device: Any) -> None:
    """Raise :class:`pk.errors.ArgumentError` if torch has no such device here."""
    try:
        torch.empty(0, device=device)
    except Exception as error:  # noqa: BLE001  torch raises TypeError, RuntimeError or AssertionError here
        why = str(error).partition("\n")[0]
        raise ArgumentError(
            f"device={short(device)} is no device of torch here: {why}\n  Pass `pk.device()`, or leave it away."
        ) from None


def check_dtype(dtype: Any) -> None:
    """Raise :class:`pk.errors.ArgumentError` if parameters cannot be of ``dtype``; None is torch's default."""
    if dtype is not None and dtype not in DTYPES:
        raise ArgumentError(
            f"dtype={short(dtype)} cannot be that of a layer's parameters, which are drawn at random.\n"
            "  Use torch.bfloat16 or torch.float16, or torch.float32 under torch.autocast."
        )


def whole_number(name: str, value: Any) -> int:
    """``value`` as an int; :class:`pk.errors.ArgumentError` if it is none."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    advice = f", such as {int(value)}" if isinstance(value, float) and value.is_integer() else ""
    raise ArgumentError(f"{name}={short(value)} is {_type(value)}, and must be a whole number.\n  Pass an int{advice}.")


def flags(**given: Any) -> None:
    """Raise :class:`pk.errors.ArgumentError` for an option that must be True or False and is neither."""
    for name, value in given.items():
        if not isinstance(value, bool):
            raise ArgumentError(f"{name}={short(value)} is {_type(value)}.\n  Pass True or False.")


def check_activation(activation: Any, known: tuple[str, ...]) -> None:
    """Raise :class:`pk.errors.ArgumentError` unless ``activation`` is the name of one that is ``known``."""
    if not isinstance(activation, str) or activation not in known:
        raise ArgumentError(
            f"activation={short(activation)} does not exist.\n  There are {', '.join(map(repr, known))}."
        )


def check_module(module: Any, function: str) -> None:
    """Raise :class:`pk.errors.ArgumentError` unless ``function`` got a module."""
    if not isinstance(module, torch.nn.Module):
        raise ArgumentError(
            f"{function} got {_of(module)} as the module, and needs a torch.nn.Module.\n"
            "  Pass the module itself, not its class, parameters or state dict."
        )


def check_linear(linear: Any, name: str) -> None:
    """Raise :class:`pk.errors.ArgumentError` unless ``linear`` is a ``torch.nn.Linear``."""
    if not isinstance(linear, torch.nn.Linear):
        raise ArgumentError(f"`{name}` is {_of(linear)}, and must be a torch.nn.Linear.\n  Pass such a layer.")


def check_tensor(x: Any, function: str) -> None:
    """Raise :class:`pk.errors.ArgumentError` unless ``function`` got a tensor of strided memory."""
    if not isinstance(x, torch.Tensor):
        raise ArgumentError(f"{function} got {_of(x)}, and needs a torch.Tensor.\n  Pass {made_of('x', x)}.")
    if x.layout != torch.strided:
        raise ArgumentError(f"{function} got a tensor of layout {x.layout}.\n  Pass `x.to_dense()`.")


def check_dim(x: torch.Tensor, dim: Any, function: str) -> int:
    """``dim`` as an int; :class:`pk.errors.ArgumentError` unless it is a dimension of ``x``, which has one."""
    dim = whole_number("dim", dim)
    if x.ndim == 0:
        raise ArgumentError(f"{function} got a tensor without dimensions.\n  Pass one with some, such as `x.view(1)`.")
    if not -x.ndim <= dim < x.ndim:
        raise ArgumentError(
            f"{function} got dim={dim} and a tensor of shape {tuple(x.shape)}.\n"
            f"  Pass a dimension from {-x.ndim} to {x.ndim - 1}."
        )
    return dim


def _of(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else _type(value)


def _type(value: Any) -> str:
    return type(value).__name__

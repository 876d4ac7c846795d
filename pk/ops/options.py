"""What the options of the operators may be: checked here, in one place, by every way that a call can go.

What needs no tensor is checked by :func:`check`; numbers of SMs against those that the rank has by :func:`within`.
All raise :class:`pk.errors.ArgumentError`, before anything is launched and before a rank waits for another one.
"""

from __future__ import annotations

from typing import Any

import torch

from pk.errors import ArgumentError, short
from pk.ops.model import CONFIGS, SMS, Config
from pk.runtime.group import Group

ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu")
RESULTS = (torch.bfloat16, torch.float16, torch.float32)
LIBRARY = "library"
MATMUL = ("matmul", "replicated_matmul")
_NAMES = {
    "matmul": ("bias", "activation", "out", "out_dtype", "scale_a", "scale_b", "config", "group", "sms"),
    "parallel": (
        "group", "bias", "activation", "out", "out_dtype", "deterministic", "comm_sms", "config", "scale_a", "scale_b",
    ),
}  # fmt: skip


def names_of(operator: str) -> tuple[str, ...]:
    """Of its keyword arguments."""
    if operator in MATMUL:
        return _NAMES["matmul"]
    return (*_NAMES["parallel"], *(["save_gathered"] if operator == "all_gather_matmul" else []))


def check(
    operator: str, *, activation: Any = None, out_dtype: Any = None, config: Any = None, deterministic: Any = False,
    comm_sms: Any = None, sms: Any = None, save_gathered: Any = True,
) -> None:  # fmt: skip
    """Raise unless every option can be, and together with the others; tiles are checked where they are looked up."""
    check_activation(activation)
    if out_dtype is not None:
        check_result(out_dtype)
    for name, value in (("deterministic", deterministic), ("save_gathered", save_gathered)):
        if not isinstance(value, bool):
            raise ArgumentError(f"{name}={short(value)} is {_type(value)}, and must be True or False.")
    whole("comm_sms", comm_sms, least=0)  # 0: a warp of every SM communicates
    whole("sms", sms)
    if comm_sms is not None and operator == "matmul_all_reduce":
        raise ArgumentError(
            f"comm_sms={comm_sms}: pk.ops.{operator} sets no SM aside, neither forward nor backward.\n  Leave it away."
        )
    if isinstance(config, str) and config == LIBRARY:  # an array would compare element by element
        _with_library(deterministic, comm_sms, sms)
    elif config is not None and not isinstance(config, (str, Config)):
        raise ArgumentError(
            f"config={short(config)} is {_type(config)}, and must be a name or one of `pk.ops.model.CONFIGS`."
        )


def _with_library(deterministic: bool, comm_sms: int | None, sms: int | None) -> None:
    """What the library cannot be asked for."""
    if deterministic:
        raise ArgumentError(
            'config="library" does not fix the order of its sums, and deterministic=True asks for that.\n'
            "  Leave one of them away."
        )
    for name, value in (("comm_sms", comm_sms), ("sms", sms)):
        if value is not None:
            raise ArgumentError(
                f'config="library" takes the SMs that it likes, and {name}={value} asks for some.\n'
                "  Leave one of them away."
            )


def check_activation(activation: Any) -> None:
    """Raise unless it is the name of one, or None."""
    if activation is not None and not (isinstance(activation, str) and activation in ACTIVATIONS):
        raise ArgumentError(
            f"activation={short(activation)} does not exist.\n"
            f"  There are {', '.join(map(repr, ACTIVATIONS[1:]))}; None or 'none' for no activation."
        )


def check_result(dtype: Any) -> None:
    """Raise unless a result can have ``dtype``."""
    if not isinstance(dtype, torch.dtype) or dtype not in RESULTS:
        shown = dtype if isinstance(dtype, torch.dtype) else f"{short(dtype)}, which is {_type(dtype)}"
        raise ArgumentError(f"the result cannot be {shown}.\n  out_dtype is one of {', '.join(map(str, RESULTS))}.")


def whole(name: str, value: Any, least: int = 1, what: str = "SMs") -> None:
    """Raise unless ``value`` is None or a whole number, at least ``least``."""
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise ArgumentError(
            f"{name}={short(value)} is {_type(value)}, and must be a number of {what}.\n"
            "  Pass a whole number, or leave it away."
        )
    if value < least:
        raise ArgumentError(f"{name}={value} must be at least {least}.\n  Pass a larger number, or leave it away.")


def within(group: Group, comm_sms: int | None = None, sms: int | None = None) -> None:
    """Raise unless this rank has as many SMs; those that communicate leave one to compute."""
    for name, value, most in (("comm_sms", comm_sms, limit(group) - 1), ("sms", sms, group.sms or MOST_SIMULATED)):
        if value is not None and value > most:
            raise ArgumentError(
                f"{name}={value}, and this rank has {most} for it.\n  Pass a smaller number, or leave it away."
            )


MOST_SIMULATED = 1024  # SMs, as pk.kernel has it


def limit(group: Group) -> int:
    """SMs of a rank: in the simulator those that the model plans with."""
    return group.sms or SMS


def check_named(config: Any) -> None:
    """Raise unless ``config`` can travel by its name, as it does where torch looks on."""
    if isinstance(config, Config) and CONFIGS.get(config.name) != config:
        raise ArgumentError(
            f"config={short(config)} is none of `pk.ops.model.CONFIGS`, and where a gradient, autocast or "
            "torch.compile is on, configurations travel by name.\n  Pass one of these, or its name."
        )


def check_known(operator: str, given: dict[str, Any]) -> None:
    """Raise TypeError, as a Python function does, for a keyword argument that ``operator`` does not have."""
    for name in given:
        if name not in names_of(operator):
            raise TypeError(f"{operator}() got an unexpected keyword argument {name!r}")


def _type(value: Any) -> str:
    return type(value).__name__

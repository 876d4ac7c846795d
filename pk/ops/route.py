"""Which way a call of a public operator goes: straight to the kernel, or through ``torch.ops.pk``.

The way through torch costs some 20 microseconds on the host.  It is taken where somebody other than the caller looks
on: a gradient is wanted, a trace is made (``torch.compile``, export, fake tensors), autocast is on, or a dispatch mode
or ``torch.func`` transform is active.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, cast

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode

from pk.errors import ArgumentError
from pk.ops import inputs
from pk.ops import options as allowed
from pk.runtime.names import name_of

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_UNWATCHED: Any = torch.Tensor.__torch_dispatch__
_TENSORS = ("bias", "scale_a", "scale_b")
_FUNCTIONS = {
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": functools.partial(torch.nn.functional.gelu, approximate="tanh"),
    "silu": torch.nn.functional.silu,
}


P = ParamSpec("P")


RECOMPUTED = tuple(_FUNCTIONS)
"""Activations whose gradient needs what went into them: :func:`through_torch` has it kept, ``torch.ops.pk`` computes
it again."""


class Operator(Protocol[P]):
    """A public operator, and the way past torch as ``direct``."""

    direct: Callable[..., torch.Tensor]

    def __call__(self, *args: P.args, **options: P.kwargs) -> torch.Tensor:
        """The call."""


def routed(fn: Callable[P, torch.Tensor]) -> Operator[P]:
    """Decorator: ``fn`` itself where nobody looks on, else the operator of its name in ``torch.ops.pk``."""
    operator = fn.__name__

    @functools.wraps(fn)
    def call(a: Any, b: Any, **options: Any) -> torch.Tensor:
        if torch.compiler.is_compiling() or watched(operator, a, b, options):
            allowed.check_known(operator, options)
            return through_torch(operator, a, b, **options)
        return fn(a, b, **options)

    call.direct = fn  # type: ignore[attr-defined]
    return cast(Operator[P], call)


def watched(operator: str, a: Any, b: Any, options: dict[str, Any]) -> bool:
    """Whether anybody but the caller needs to know of this call.

    Raises :class:`pk.errors.ArgumentError` for those who could not be told: forward-mode derivatives and
    ``torch.func.grad``.
    """
    given = [x for x in (a, b, *(options.get(name) for name in _TENSORS)) if isinstance(x, torch.Tensor)]
    if not given:
        return False
    if forward_ad._current_level >= 0 or torch._C._functorch.maybe_current_level() is not None:
        _refuse_transforms(operator, given)
        return True
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        return True
    device = given[0].device.type
    if device in ("cpu", "cuda") and torch.is_autocast_enabled(device):
        return True
    return _get_current_dispatch_mode() is not None or any(
        type(x) not in _PLAIN and type(x).__torch_dispatch__ is not _UNWATCHED for x in given
    )


def _refuse_transforms(operator: str, given: list[torch.Tensor]) -> None:
    interpreter = torch._C._functorch.peek_interpreter_stack()
    kinds = torch._C._functorch.TransformType
    derived = interpreter is not None and interpreter.key() in (kinds.Grad, kinds.Jvp)
    dual = forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in given)
    if derived or dual:
        raise ArgumentError(
            f"pk.ops.{operator} has a backward pass, but neither forward-mode derivatives nor those of torch.func.\n"
            "  Use backward() or torch.autograd.grad()."
        )


def through_torch(
    operator: str, a: torch.Tensor, b: torch.Tensor, *, bias: torch.Tensor | None = None,
    activation: str | None = None, out: torch.Tensor | None = None, out_dtype: torch.dtype | None = None,
    scale_a: torch.Tensor | None = None, scale_b: torch.Tensor | None = None, config: Any = None, group: Any = None,
    save_gathered: bool = True, **rest: Any,
) -> torch.Tensor:  # fmt: skip
    """The call as one of ``torch.ops.pk``.

    Where a gradient will need what goes into the activation, that is the operator's result, and the activation an
    operation of torch's.
    """
    name = "matmul" if operator in allowed.MATMUL else operator
    given = {"activation": activation, "out_dtype": out_dtype, "config": config, "save_gathered": save_gathered}
    allowed.check(name, **given, **rest)
    allowed.check_named(config)
    vectors = {"bias": bias, "scale_a": scale_a, "scale_b": scale_b}
    inputs.are_tensors(name, a=a, b=b, **{k: x for k, x in vectors.items() if x is not None})
    graded = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (a, b, bias, scale_a, scale_b))
    if out is not None:
        inputs.is_out(name, out)
        _check_out(operator, out, graded)
        if not torch.compiler.is_compiling():
            inputs.result(operator, out, a, b, bias, scale_a, scale_b)
        out_dtype = out_dtype or out.dtype
    apart = graded and activation in RECOMPUTED
    saving = graded and save_gathered and operator == "all_gather_matmul" and b.requires_grad
    op = getattr(torch.ops.pk, operator + "_saving" if saving else operator)
    if config is not None and not isinstance(config, str):
        config = config.name
    inner = "none" if apart or activation is None else activation
    found = op(a, b, bias, inner, out_dtype, scale_a, scale_b, config, name_of(group), **rest)
    result = found[0] if saving else found
    if apart and activation is not None:
        result = _FUNCTIONS[activation](result)
    if out is None:
        return result
    inputs.fits(out, (result.shape[0], result.shape[1]), result.dtype)
    return out.copy_(result)


def _check_out(operator: str, out: torch.Tensor, graded: bool) -> None:
    if graded:
        raise ArgumentError(
            f"pk.ops.{operator} with `out` has no backward pass, and an argument requires a gradient.\n"
            "  Leave `out` away, or call it under torch.no_grad()."
        )


def collective_through_torch(
    operator: str, x: torch.Tensor, dims: tuple[int, ...], group: Any, out: torch.Tensor | None
) -> torch.Tensor:
    """A collective as one of ``torch.ops.pk``."""
    if torch.is_grad_enabled():
        inputs.gradable(operator, x)
    if out is not None:
        inputs.is_out(operator, out)
        _check_out(operator, out, torch.is_grad_enabled() and x.requires_grad)
    found: torch.Tensor = getattr(torch.ops.pk, operator)(x, *dims, name_of(group))
    if out is None:
        return found
    inputs.fits_whole(out, tuple(found.shape), found.dtype)
    return out.copy_(found)

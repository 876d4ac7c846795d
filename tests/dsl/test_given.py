"""What decorators, calls and inspection are given: refused with a reason, or taken as what it means."""

from __future__ import annotations

import copy
import functools
import math
import pickle
import sys
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import pk
from pk import errors
from pk.dsl.frontend import typed
from pk.dsl.values import plain
from pk.ir.types import float16, int32
from tests.dsl.reading import body, refusal

SIZE, VALUE, SIZES = np.int64(64), np.float32(2.5), (np.int32(64), np.int64(64))


@pk.kernel
def filled(c: pk.Global, B: pk.constexpr = 64, value: pk.constexpr = 1.0, opt: pk.Global = None, scale: float = 1.0):
    """Writes a constant."""
    ring = pk.pipeline(1, t=pk.shared((B, B), c.dtype))
    for m, n in pk.tasks(pk.cdiv(c.rows, B), pk.cdiv(c.cols, B)):
        with pk.consumer():
            with ring.fill() as s:
                pk.store(s.t, pk.full((B, B), value, pk.int32 if c.dtype == pk.int32 else pk.float32))
        with pk.storer():
            with ring.drain() as s:
                pk.store_async(c, s.t, (m, n))


@pk.kernel
def captured(c: pk.Global):
    """Captures NumPy's scalars."""
    ring = pk.pipeline(1, t=pk.shared((SIZE, SIZE), c.dtype))
    for m, n in pk.tasks(pk.cdiv(c.rows, SIZE), pk.cdiv(c.cols, SIZES[1])):
        with pk.consumer():
            with ring.fill() as s:
                pk.store(s.t, pk.full(SIZES, VALUE) + VALUE)
        with pk.storer():
            with ring.drain() as s:
                pk.store_async(c, s.t, (m, n))


@pk.function
def helper(x):
    """Nothing."""
    return x


def plain_function(c: pk.Global) -> None:
    """Not decorated."""


class Some:
    """Not a function."""

    def method(self, c: pk.Global) -> None:
        """A method."""


async def coroutine(c: pk.Global) -> None:
    """No kernel."""


def generator(c: pk.Global) -> Any:
    """No kernel."""
    yield c


NOTHING = [
    (3, "is int 3."),
    (None, "is NoneType None."),
    (len, "is builtin_function_or_method <built-in function len>, which has no Python source."),
    (Some, "is the class `Some`."),
    (Some().method, "is the method `Some.method`."),
    (functools.partial(plain_function), "is functools.partial("),
    (lambda c: None, "is a lambda ("),
    (coroutine, "`coroutine` is `async def`."),
    (generator, "`generator` is a generator: it has `yield`."),
]


@pytest.mark.parametrize(("given", "text"), NOTHING)
@pytest.mark.parametrize("decorator", [pk.kernel, pk.function])
def test_what_is_no_function_is_refused_at_the_decoration(decorator: Any, given: Any, text: str) -> None:
    with pytest.raises(errors.ArgumentError) as caught:
        decorator(given)
    told = str(caught.value)
    assert told.startswith(f"what @pk.{decorator.__name__} is given ") and text in told and "\n  " in told


@pytest.mark.parametrize("dtype", [torch.float16, float16, "float16"])
def test_a_dtype_stands_for_a_2d_tensor_of_it(dtype: Any) -> None:
    expected = filled.ir(c=pk.spec(torch.float16, 2))
    assert filled.ir(dtype) == filled.ir(c=dtype) == expected and "float16" in expected


@pytest.mark.parametrize("given", [5, 2.5, (64, 64), [1], None, object])
def test_what_is_no_tensor_is_refused_by_inspection(given: Any) -> None:
    with pytest.raises(errors.ArgumentError, match=r"says nothing of a tensor's type\.\n  Pass a tensor, pk\.spec"):
        filled.ir(c=given)
    filled.ir(opt=None)


@pytest.mark.parametrize("ndim", [9, 0, -1, 2.0, "2", None, True])
def test_a_spec_has_1_to_4_dimensions(ndim: Any) -> None:
    with pytest.raises(errors.ArgumentError, match=r"pk.spec\('bfloat16', .*: pk's tensors have 1 to 4 dimensions"):
        pk.spec("bfloat16", ndim)


# ---------------------------------------------------------------------------------------------------- pickling
@pytest.mark.parametrize("made", [filled, captured, helper])
def test_kernels_and_helpers_are_pickled_by_name(made: Any) -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps((made,), protocol)) == (made,)
    assert copy.copy(made) is made and copy.deepcopy([made]) == [made]


def test_one_that_has_no_name_says_so() -> None:
    @pk.kernel
    def local(c: pk.Global):
        pass

    other = pk.kernel(plain_function)  # under another name
    for made, name in ((local, "local"), (other, "plain_function")):
        with pytest.raises(errors.ArgumentError, match=f"kernel `.*{name}` cannot be pickled: module `.*` has no such"):
            pickle.dumps(made)
    with pytest.raises(errors.ArgumentError, match=r"helper `.*` cannot be pickled"):
        pickle.dumps(pk.function(plain_function))


def test_a_kernel_of_another_module(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("elsewhere")
    made = pk.kernel(plain_function)
    made.__module__, made.__qualname__ = "elsewhere", "Box.inner"
    module.Box = type("Box", (), {"inner": made})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "elsewhere", module)
    assert pickle.loads(pickle.dumps(made)) is made


# ------------------------------------------------------------------------------------------------- numpy, nan, zero
def value(kernel: pk.Kernel, **kwargs: Any) -> float:
    """What ``kernel`` writes."""
    found: list[float] = []

    def rank(_: int) -> None:
        c = torch.zeros(64, 128)
        kernel(c, **kwargs)
        found.append(float(c[0, 0]))

    pk.spawn(rank, 1, backend="sim")
    return found[0]


def test_numpy_scalars_are_numbers() -> None:
    assert value(captured) == 5.0
    assert value(filled, B=np.int64(64), value=np.float32(2.5), scale=np.float32(1.5)) == 2.5
    assert value(filled, B=np.int8(64), value=np.float16(0.5), scale=np.float64(1.5)) == 0.5
    tensor = pk.spec("float32", 2)
    assert filled.specialise(tensor, np.int64(64)) is filled.specialise(tensor, 64)
    assert plain((np.int64(3), (np.float32(0.5), np.bool_(True)), "x")) == (3, (0.5, True), "x")
    assert type(plain(np.float64(1.5))) is float and plain(np.zeros(3)).shape == (3,)


def test_every_nan_is_the_same_constexpr_and_the_two_zeros_are_not() -> None:
    tensor = pk.spec("float32", 2)
    made = [filled.specialise(tensor, value=v) for v in (float("nan"), float("nan"), math.nan, np.float32("nan"))]
    assert len({id(p) for p in made}) == 1
    assert filled.specialise(tensor, value=0.0) is not filled.specialise(tensor, value=-0.0)
    assert math.isnan(value(filled, value=float("nan")))
    assert math.copysign(1, value(filled, value=0.0)) == 1 and math.copysign(1, value(filled, value=-0.0)) == -1
    assert typed((1, (0.0,))) != typed((1, (-0.0,))) and typed(float("nan")) == typed(float("nan"))


# ------------------------------------------------------------------------------------------------------ integers
INTEGERS = """
@pk.kernel
def k(c: pk.Global, x: int):
    for m, n in pk.tasks(8, 8):
        y = {e}
        if y > 0:
            pk.store(c, y, (m, n))
"""


def test_int32_constants_up_to_the_ends() -> None:
    assert "m + (-2147483648)" in body(INTEGERS.format(e="m - 2147483648"), dtype={"c": int32})
    assert "m - 2147483647" in body(INTEGERS.format(e="m - 2147483647"), dtype={"c": int32})
    for e in ("m + 2147483648", "m - 2147483649", "m * 4294967296"):
        told = refusal(errors.WrongOperand, INTEGERS.format(e=e), dtype={"c": int32})
        assert "does not fit int32" in told and "Integers of kernels are int32, -2147483648 to 2147483647." in told


def test_integers_beyond_float_are_infinite_and_full_int32_is_checked() -> None:
    assert value(filled, value=10**400) == math.inf
    for given in (2**31, 1e10, math.nan, math.inf):
        with pytest.raises(errors.WrongOperand, match=r"the value of pk.full is .* does not fit int32"):
            filled.ir("int32", value=given)

"""The call of ``cuLaunchKernelEx`` past cuda-bindings, with a stand-in for the driver's function."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from pk import errors
from pk.runtime import driver, driver_memory
from pk.runtime.driver_memory import CudaDriver
from pk.runtime.native import native

needs_native = pytest.mark.skipif(native() is None, reason="pk._C is not built")
ENTRY = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)


class Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60)]


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p), ("attrs", ctypes.POINTER(Attribute)), ("count", ctypes.c_uint),
    ]  # fmt: skip


class Library:
    """libcuda.so.1: one function, which notes what it gets."""

    def __init__(self, status: int = 0) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.cuLaunchKernelEx = ENTRY(lambda *args: self.call(status, *args))

    def call(self, status: int, config: int, function: int, params: int, extra: int | None) -> int:
        c = Config.from_address(config)
        first = ctypes.c_uint64.from_address(ctypes.c_uint64.from_address(params).value).value
        attributes = [(c.attrs[i].id, c.attrs[i].value) for i in range(c.count)]
        self.calls.append((list(c.grid), list(c.block), c.shared, c.stream, attributes, function, first, extra))
        return status


@needs_native
@pytest.mark.parametrize(("cooperative", "close"), [(True, False), (False, True), (True, True), (False, False)])
def test_the_driver_gets_what_was_bound(cooperative: bool, close: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import driver as api

    library = Library()
    for module in (driver, driver_memory):
        monkeypatch.setattr(module, "cu", lambda: api)
    address = ctypes.cast(library.cuLaunchKernelEx, ctypes.c_void_p).value
    monkeypatch.setattr(driver_memory, "_launch_address", lambda: address)
    block = ctypes.c_uint64(77)
    launch = CudaDriver().bind(
        0, api.CUfunction(0x5000), (66, 384, 200_000), ctypes.addressof(block), cooperative=cooperative, close=close
    )
    names = ["COOPERATIVE"] * cooperative + ["PROGRAMMATIC_STREAM_SERIALIZATION"] * close
    ids = [int(getattr(api.CUlaunchAttributeID, f"CU_LAUNCH_ATTRIBUTE_{name}")) for name in names]
    for stream in (0x10, 0x10, 0x20):
        launch(stream)
    block.value = 78  # parameters are read at every launch
    launch(0)
    assert library.calls == [
        ([66, 1, 1], [384, 1, 1], 200_000, stream or None, [(i, 1) for i in ids], 0x5000, first, None)
        for stream, first in ((0x10, 77), (0x10, 77), (0x20, 77), (0, 78))
    ]


@needs_native
def test_a_failure_is_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import driver as api

    library = Library(status=int(api.CUresult.CUDA_ERROR_INVALID_VALUE))
    for module in (driver, driver_memory):
        monkeypatch.setattr(module, "cu", lambda: api)
    address = ctypes.cast(library.cuLaunchKernelEx, ctypes.c_void_p).value
    monkeypatch.setattr(driver_memory, "_launch_address", lambda: address)
    told: list[str] = []
    monkeypatch.setattr(driver_memory, "check", lambda result, name: told.append(f"{name}: {result[0].name}"))
    block = ctypes.c_uint64(77)
    launch = CudaDriver().bind(0, api.CUfunction(0x5000), (66, 384, 0), ctypes.addressof(block))
    monkeypatch.setattr(driver_memory, "on_device", _no_context)
    with pytest.raises(errors.BackendError, match="no context"):
        launch(0x10)
    assert told == ["cuLaunchKernelEx: CUDA_ERROR_INVALID_VALUE"]


def _no_context(device: int) -> None:
    raise errors.BackendError("no context")


@needs_native
def test_arguments_are_checked() -> None:
    module = native()
    assert module is not None
    for args in ((), (1, 2, 3), (1, 2, 3, 4), (1, 2, 3, 4, print, 6), (1, 2, 3, "4", print), (1, 2, 3, -4, print)):
        with pytest.raises((TypeError, OverflowError)):
            module.launcher(*args)
    launch = module.launcher(1, 2, 3, 4, print)
    for stream in ("5", -5, None):
        with pytest.raises((TypeError, OverflowError)):
            launch(stream)
    for args in ((), (1, 2), (None, 0, 0, ((),), print, 0, print), (None, 0, 0, (), print, 0, print)):
        with pytest.raises((TypeError, AttributeError)):  # the last: a context without a lock
            module.Submit(*args)
    for args in ((), (1,) * 8, ((), int, {}, (), (), {}, (), 1, 2)):
        with pytest.raises(TypeError):
            module.finder(*args)
    assert module.finder((), int, {}, (), (), {}, (), print) is None

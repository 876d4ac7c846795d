"""What is said when driver or GPU are not as they must be, and what modules ask of the driver.  A fake stands in."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest

from pk.errors import BackendError, DriverError
from pk.runtime import driver, module
from pk.runtime.compile import Binary, Resources


class Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_NO_BINARY_FOR_GPU = 209


class Fake(SimpleNamespace):
    """Enough of ``cuda.bindings.driver``: one GPU of ``capability``, and a list of the calls that load modules."""

    def __init__(self, capability: tuple[int, int] = (9, 0), init: Result = Result.CUDA_SUCCESS) -> None:
        self.capability, self.init, self.calls = capability, init, []
        self.context = 1
        self.CUdevice_attribute = SimpleNamespace(
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR="major",
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR="minor",
            CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT="sms",
            CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN="shared",
        )
        self.CUfunction_attribute = SimpleNamespace(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="dynamic")

    def cuInit(self, flags: int) -> tuple[Result]:
        return (self.init,)

    def cuGetErrorString(self, status: Result) -> tuple[Result, bytes]:
        return Result.CUDA_SUCCESS, b"described"

    def cuDeviceGetCount(self) -> tuple[Result, int]:
        return Result.CUDA_SUCCESS, 1

    def cuDeviceGet(self, index: int) -> tuple[Result, int]:
        return Result.CUDA_SUCCESS, index

    def cuDeviceGetName(self, length: int, handle: int) -> tuple[Result, bytes]:
        return Result.CUDA_SUCCESS, b"NVIDIA Test GPU\0\0\0"

    def cuDeviceGetUuid(self, handle: int) -> tuple[Result, Any]:
        return Result.CUDA_SUCCESS, SimpleNamespace(bytes=bytes(16))

    def cuDeviceGetAttribute(self, attribute: str, handle: int) -> tuple[Result, int]:
        values = {"major": self.capability[0], "minor": self.capability[1], "sms": 132, "shared": 232448}
        return Result.CUDA_SUCCESS, values[attribute]

    def cuCtxGetCurrent(self) -> tuple[Result, int]:
        return Result.CUDA_SUCCESS, self.context

    def cuCtxGetId(self, context: int) -> tuple[Result, int]:
        return Result.CUDA_SUCCESS, context

    def cuModuleLoadData(self, cubin: bytes) -> tuple[Result, Any]:
        self.calls.append("load")
        return (Result.CUDA_SUCCESS, "module") if cubin == b"good" else (Result.CUDA_ERROR_NO_BINARY_FOR_GPU, None)

    def cuModuleGetFunction(self, handle: str, entry: bytes) -> tuple[Result, str]:
        self.calls.append("function")
        return Result.CUDA_SUCCESS, entry.decode()

    def cuFuncLoad(self, function: str) -> tuple[Result]:
        self.calls.append("eager")
        return (Result.CUDA_SUCCESS,)

    def cuFuncSetAttribute(self, function: str, attribute: str, value: int) -> tuple[Result]:
        self.calls.append(f"{attribute} {value}")
        return (Result.CUDA_SUCCESS if value <= 232448 else Result.CUDA_ERROR_INVALID_VALUE,)

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(
        self, function: str, threads: int, shared: int
    ) -> tuple[Result, int]:
        self.calls.append(f"occupancy {threads} {shared}")
        return Result.CUDA_SUCCESS, 1


def _clear() -> None:
    for function in (driver.cu, driver.devices, driver.primary_context):
        function.cache_clear()
    module._modules.clear()


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def use(fake: Any) -> Any:
        monkeypatch.setattr(driver, "_import", lambda name: fake)
        _clear()
        return fake

    yield use
    _clear()


def test_no_driver(install: Any) -> None:
    def missing(flags: int) -> None:
        raise RuntimeError('"cuda" is an NVIDIA driver library and can only be found via system search.')

    install(SimpleNamespace(cuInit=missing))
    with pytest.raises(BackendError) as caught:
        driver.cu()
    assert str(caught.value) == (
        "No NVIDIA driver (libcuda.so.1 cannot be loaded), so kernels cannot run on a GPU here.\n"
        '  Install the NVIDIA driver, or run in the simulator: PK_BACKEND=sim, or pk.spawn(..., backend="sim").'
    )
    assert not driver.available()


def test_no_gpu(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    install(Fake(init=Result.CUDA_ERROR_NO_DEVICE))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(BackendError, match=r"^No GPU: the NVIDIA driver found none \(CUDA_VISIBLE_DEVICES=''\)\.\n"):
        driver.devices()


@pytest.mark.parametrize("capability", [(7, 5), (8, 9), (10, 0)])
def test_no_hopper_class_gpu(capability: tuple[int, int], install: Any) -> None:
    install(Fake(capability))
    major, minor = capability
    with pytest.raises(BackendError) as caught:
        driver.require_hopper(0)
    assert str(caught.value).startswith(
        f"No Hopper-class GPU: GPU 0: NVIDIA Test GPU, sm_{major}{minor}, 132 SMs, and pk compiles for sm_90a, "
        "which runs on sm_90 alone.\n  Use an H100, H200 or GH200, or run in the simulator"
    )
    assert not driver.available()
    assert (driver.why_unavailable() or "").startswith("No Hopper-class GPU: ")


def test_facts_of_a_hopper(install: Any) -> None:
    install(Fake())
    found = driver.require_hopper(0)
    assert (found.capability, found.sms, found.shared_bytes, found.mig) == ((9, 0), 132, 232448, False)
    assert driver.available()
    with pytest.raises(BackendError, match=r"^There is no GPU 3: 1 visible\."):
        driver.device(3)


def test_check_names_call_and_error(install: Any) -> None:
    install(Fake())
    assert driver.check((Result.CUDA_SUCCESS,)) is None
    assert driver.check((Result.CUDA_SUCCESS, 5)) == 5
    assert driver.check((Result.CUDA_SUCCESS, 5, 6)) == (5, 6)
    with pytest.raises(DriverError) as caught:
        driver.check((Result.CUDA_ERROR_INVALID_VALUE, None), "cuThing")
    assert str(caught.value) == "cuThing failed: CUDA_ERROR_INVALID_VALUE (described)."


# ------------------------------------------------------------------------------------------------- modules
def binary(cubin: bytes = b"good") -> Binary:
    return Binary(cubin, "", Resources(32, 0, 0, 0))


def test_a_module_is_loaded_eagerly_and_once_a_context(install: Any) -> None:
    fake = install(Fake())
    first = module.load(binary(), "toy", 200_000)
    assert fake.calls == ["load", "function", "eager", "dynamic 200000"]
    assert module.load(binary(), "toy", 200_000) is first
    assert len(fake.calls) == 4
    fake.context = 2
    assert module.load(binary(), "toy") is not first


def test_occupancy_allows_the_shared_memory_first_and_is_remembered(install: Any) -> None:
    fake = install(Fake())
    loaded = module.load(binary(), "toy")
    assert [loaded.max_blocks_per_sm(384, 200_000) for _ in range(2)] == [1, 1]
    assert fake.calls[3:] == ["dynamic 200000", "occupancy 384 200000"]


def test_too_much_shared_memory(install: Any) -> None:
    install(Fake())
    with pytest.raises(BackendError, match="Kernel `toy` needs 300000 bytes of shared memory in a block"):
        module.load(binary(), "toy", 300_000)


def test_a_cubin_for_another_gpu(install: Any) -> None:
    install(Fake())
    with pytest.raises(
        DriverError, match=r"cuModuleLoadData failed: CUDA_ERROR_NO_BINARY_FOR_GPU .*\n  The cubin is for"
    ):
        module.load(binary(b"bad"), "toy")


def test_no_context(install: Any) -> None:
    install(Fake()).context = 0
    with pytest.raises(BackendError, match=r"^No CUDA context is current in this thread\."):
        module.load(binary(), "toy")

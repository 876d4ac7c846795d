"""What makes two calls the same: tensors that change under the cache, and the native keys against those of Python."""

from __future__ import annotations

import ctypes
import gc
import itertools
import math
import random
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import pk
from pk import errors
from pk.kernel import Kernel
from pk.runtime.group import Group
from pk.runtime.native import native
from tests.runtime.fake import FakeDriver
from tests.runtime.warm import driver, pair, pushed, scaled_copy

pytestmark = pytest.mark.usefixtures("no_compiler", "twin")
needs_native = pytest.mark.skipif(native() is None, reason="pk._C is not built")
needs_exchange = pytest.mark.skipif(
    native() is None or not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"), reason="no pk._C or torch before 2.10"
)


def told(group: Group, **tensors: torch.Tensor) -> bool:
    """Whether the last launch was told these tensors as they are now (the fake driver's tensor maps are text)."""
    data = driver(group).launches[-1][3]
    return all(
        f"{name}|{t.data_ptr():x}|{str(t.dtype)[6:]}|{tuple(t.shape)}|{tuple(t.stride())}|".encode() in data
        for name, t in tensors.items()
    )


def call(group: Group, x: torch.Tensor, y: torch.Tensor) -> None:
    """Twice, so that the second is warm."""
    for _ in range(2):
        scaled_copy(x, y, group=group)
        assert told(group, x=x, y=y)


# ----------------------------------------------------------------------------------------- tensors that change in place
IN_PLACE: dict[str, Callable[[torch.Tensor], Any]] = {
    "resize_": lambda x: x.resize_(64, 128),
    "resize_, as many elements": lambda x: x.resize_(64, 256),
    "resize_, larger": lambda x: x.resize_(256, 256),
    "set_, other memory": lambda x: x.set_(torch.zeros_like(x)),
    "set_, an offset": lambda x: x.set_(x.untyped_storage(), 1024, (64, 128), (128, 1)),
    "set_, other strides": lambda x: x.set_(x.untyped_storage(), 0, (64, 64), (256, 1)),
    "as_strided_": lambda x: x.as_strided_((64, 64), (256, 1)),
    "data": lambda x: setattr(x, "data", torch.zeros(192, 128, dtype=x.dtype)),
    "data, another dtype": lambda x: setattr(x, "data", x.data.view(torch.float16)),
    "requires_grad_": lambda x: x.requires_grad_(),
    "t_": lambda x: x.t_(),
    "transpose_": lambda x: x.transpose_(0, 1),
    "t_ twice": lambda x: x.t_().t_(),
}


@pytest.mark.parametrize("what", IN_PLACE)
def test_metadata_that_changes_in_place(what: str, solo: Group) -> None:
    x, y = pair()
    call(solo, x, y)
    IN_PLACE[what](x)
    if x.dtype != y.dtype:
        y = y.view(x.dtype)
    call(solo, x, y)


def test_another_number_of_dimensions_in_place(solo: Group) -> None:
    x, y = pair()
    call(solo, x, y)
    x.unsqueeze_(0)
    with pytest.raises(errors.PkError):
        scaled_copy(x, y, group=solo)
    x.squeeze_(0)
    call(solo, x, y)


# --------------------------------------------------------------------------------------------------- one address, twice
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_views_of_one_address(dtype: torch.dtype, solo: Group) -> None:
    memory, y = torch.zeros(1 << 16, dtype=torch.uint8), torch.zeros(128, 128, dtype=dtype)
    flat = memory.view(dtype)
    views = [
        flat.as_strided(shape, strides)
        for shape in ((64, 64), (64, 128), (128, 64), (1, 64))
        for strides in ((128, 1), (256, 1), (192, 1))
    ]
    for view in views + views[::-1]:
        scaled_copy(view, y, group=solo)
        assert told(solo, x=view)


def test_dtypes_of_one_address(solo: Group, packs: list[str]) -> None:
    memory = torch.zeros(2, 64 * 128, dtype=torch.int16)
    dtypes = (torch.float32, torch.int32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
    for _ in range(2):
        for dtype in dtypes:
            x, y = (half.view(dtype).view(64, -1)[:, :64] for half in memory)
            scaled_copy(x, y, group=solo)
            assert told(solo, x=x, y=y)
    assert len(packs) == len(dtypes)


def test_memory_that_is_freed_and_taken_by_another_shape(solo: Group) -> None:
    memory, y = bytearray(1 << 16), torch.zeros(128, 128, dtype=torch.bfloat16)
    addresses = set()
    for rows, cols in ((64, 128), (128, 64), (64, 64), (64, 128)):
        x = torch.frombuffer(memory, dtype=torch.bfloat16)[: rows * cols].view(rows, cols)
        call(solo, x, y)
        addresses.add(x.data_ptr())
        del x
        gc.collect()
    assert len(addresses) == 1
    for rows in range(64, 1024, 64):  # and as the allocator does it
        call(solo, torch.zeros(rows, 64, dtype=torch.bfloat16), y)


def test_random_views_are_never_mistaken(solo: Group) -> None:
    rng = random.Random(7)
    memory, y = torch.zeros(1 << 16, dtype=torch.bfloat16), torch.zeros(64, 64, dtype=torch.bfloat16)
    for _ in range(400):
        shape, stride = (rng.choice((8, 64, 72)), rng.choice((8, 64, 128))), rng.choice((128, 136, 256))
        view = memory[8 * rng.randrange(4) :].as_strided(shape, (stride, 1), 8 * rng.randrange(3))
        scaled_copy(view, y, group=solo)
        assert told(solo, x=view)


# ------------------------------------------------------------------------------------------------------ kinds of tensor
class Tagged(torch.Tensor):
    """A subclass."""


def test_parameters_and_subclasses_are_tensors(solo: Group, packs: list[str]) -> None:
    x, y = pair()
    for given in (x, torch.nn.Parameter(x), x.as_subclass(Tagged), x.detach().requires_grad_()):
        assert given.data_ptr() == x.data_ptr()
        call(solo, given, y)
    assert len(packs) == 1


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_tensor_without_memory_is_refused_each_time(solo: Group) -> None:
    x, y = pair()
    call(solo, x, y)
    for _ in range(2):
        with pytest.raises(errors.ArgumentError, match="is on meta"):
            scaled_copy(x.to("meta"), y, group=solo)
        with pytest.raises(errors.ArgumentError, match="which pk cannot move"):
            scaled_copy(torch.quantize_per_tensor(torch.zeros(64, 64), 1.0, 0, torch.quint8), y, group=solo)
    call(solo, x, y)


def test_a_lazily_negated_view_is_not_taken_for_its_memory(solo: Group) -> None:
    z, y = torch.zeros(64, 128, dtype=torch.complex64), torch.zeros(64, 64)
    plain, negated = z.imag.as_strided((64, 64), (256, 1)), z.conj().imag.as_strided((64, 64), (256, 1))
    assert negated.is_neg() and (plain.data_ptr(), plain.stride()) == (negated.data_ptr(), negated.stride())
    call(solo, plain, y)
    for _ in range(2):
        with pytest.raises(errors.ArgumentError, match="lazily negated"):
            scaled_copy(negated, y, group=solo)
    call(solo, plain, y)


def test_names_and_places_of_arguments(solo: Group, packs: list[str]) -> None:
    x, y = pair()
    for args, kwargs in (((x, y), {}), ((x,), {"y": y}), ((), {"x": x, "y": y}), ((), {"y": y, "x": x})):
        for _ in range(2):
            scaled_copy(*args, **kwargs, group=solo)
            assert told(solo, x=x, y=y)
    scaled_copy(y=x, x=y, group=solo)
    assert told(solo, x=y, y=x)
    assert len(packs) == 2


# ----------------------------------------------------------------------------------------------------------------- keys
class Answer:
    def submit(self, values: tuple[Any, ...]) -> bool:
        self.values = values
        return False


def key(kernel: Kernel, *args: Any, **kwargs: Any) -> Any:
    table: dict[Any, Any] = {}
    found = kernel._find(kernel, table, None, args, kwargs)
    if found is not None:
        answer = table[found] = Answer()
        assert kernel._find(kernel, table, None, args, kwargs) == found  # it was found, and refused
        assert answer.values == kernel._key(args, kwargs, None)[1]
    return found


def test_keys_differ_where_the_python_ones_do() -> None:
    x, y = pair()
    step, scale = SimpleNamespace(step=0), SimpleNamespace(scale=0)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        *((t, {}) for t in itertools.product((x, y, None, x[:64], x.view(torch.float16)), repeat=2)),
        *(((x, y, n), {}) for n in (1, 2, 1.0, True, None, x)),
        *(((x, y, 1, s), {}) for s in (1, 2.0, 0.5)),
        *(((x, y), {"B": b}) for b in (64, 64.0, "64", (64,), (64.0,), ((64,), 1), True, 1, x, None)),
        *(((x, y, 1, 1.0, b), {}) for b in (64, 64.0, "64", True, 1)),
        ((x,), {"y": y}), ((), {"x": x, "y": y}), ((), {"y": x, "x": y}), ((x, y), {"step": 1}),
        ((x, y), {"scale": 1.0}), ((x, y), {"step": 1, "scale": 2.0}), ((x, y), {"scale": 1.0, "step": 2}),
        ((x, y), {"B": 64, "step": 1}), ((), {}), ((x,), {}), ((x, y, 1, 1.0, 64, 5, 6), {}), ((step, scale), {}),
        ((x.as_subclass(Tagged), y), {}), ((torch.nn.Parameter(x), y), {}),
    ]  # fmt: skip
    mine = [key(scaled_copy, *args, **kwargs) for args, kwargs in calls]
    python = [scaled_copy._key(args, kwargs, None)[0] for args, kwargs in calls]
    subclass = len(calls) - 2  # goes to the Python twin, whose keys are its own
    for a, b in itertools.combinations(range(len(calls)), 2):
        if subclass not in (a, b):
            assert (mine[a] == mine[b]) == (python[a] == python[b]), (calls[a], calls[b])
    assert mine[subclass] == python[subclass]


def test_what_cannot_be_hashed_has_no_key() -> None:
    x, y = pair()
    assert key(scaled_copy, x, y, B=[64]) is None
    assert key(scaled_copy, x, y, B=([64],)) is None
    nested: Any = ()
    for _ in range(100_000):
        nested = (nested,)
    with pytest.raises(RecursionError):
        key(scaled_copy, x, y, B=nested)


@needs_exchange
def test_the_native_twin_is_used(twin: str) -> None:
    x, y = pair()
    assert (scaled_copy._find is Kernel._repeat) == (twin == "python")
    assert isinstance(key(pushed, x, y)[0], bytes) == (twin == "native")
    assert isinstance(key(pushed, torch.nn.Parameter(x), y)[0], bytes) == (twin == "native")
    many = (x,) * 70  # more than it has room for
    assert key(pushed, *many) == pushed._key(many, {}, None)[0]


# ------------------------------------------------------------------------------------------------------------ the table
@needs_native
def test_unchanged_variables(twin: str) -> None:
    module = native()
    if module is None:
        return
    space, value = {"a": 1000.5, "b": None}, 1000.5
    good = (space, "a", space["a"]), (space, "b", None)
    assert module.unchanged(()) and module.unchanged(good)
    for entry in ((space, "a", value * 1), (space, "c", None), good, (1, "a", 2), good[0][:2], None):
        assert not module.unchanged((good[0], entry))
    assert not module.unchanged(None) and not module.unchanged(list(good))
    space["a"] = value * 1
    assert not module.unchanged(good)
    with pytest.raises(TypeError):
        module.unchanged(((space, [], 1),))


Read = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)


class Api(ctypes.Structure):
    """DLPackExchangeAPI."""

    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("previous", ctypes.c_void_p),
                ("unused", ctypes.c_void_p * 3), ("read", ctypes.c_void_p), ("stream", ctypes.c_void_p)]  # fmt: skip


def tensor_type(api: Api, name: bytes = b"dlpack_exchange_api") -> type:
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    return type(
        "Other", (), {"__dlpack_c_exchange_api__": make(ctypes.addressof(api), name, None), "keep": (api, name)}
    )


def finder(kind: type, twin: Callable[..., Any] = lambda *_: "twin") -> Any:
    module = native()
    assert module is not None
    return module.finder((kind,), kind, {}, (), ("x",), {}, (), twin)


@needs_native
def test_tables_of_other_versions(twin: str) -> None:
    if twin == "python":
        return

    def read(tensor: object, out: int) -> int:
        ctypes.c_uint64.from_address(out).value = 0x1234
        return 0

    kept = Read(read)
    good = Api(1, 9, None, (ctypes.c_void_p * 3)(), ctypes.cast(kept, ctypes.c_void_p), None)
    newer = Api(2, 0, ctypes.addressof(good))
    for api, works in ((good, True), (newer, True), (Api(2, 0), False), (Api(0, 8), False), (Api(1, 2), False)):
        kind = tensor_type(api)
        found = finder(kind)
        assert (found is not None) == works
        if found is not None:
            (layout,) = found("kernel", {}, None, (kind(),), {})[:1]
            assert (0x1234).to_bytes(8, "little") in layout
    assert finder(tensor_type(good, b"another name")) is None
    assert finder(int) is None
    assert finder(type("Odd", (), {"__dlpack_c_exchange_api__": 5})) is None


@needs_native
def test_a_tensor_that_cannot_be_read_goes_to_the_twin(twin: str) -> None:
    if twin == "python":
        return
    fields: dict[int, int] = {}

    def read(tensor: object, out: int) -> int:
        for offset, value in fields.items():
            ctypes.c_int32.from_address(out + offset).value = value
        return -1 if 0 in fields else 0

    kept = Read(read)
    kind = tensor_type(Api(1, 3, None, (ctypes.c_void_p * 3)(), ctypes.cast(kept, ctypes.c_void_p), None))
    find = finder(kind)
    arguments = ("kernel", {}, None, (kind(),), {})
    assert find(*arguments) != "twin"
    for odd in ({0: 1}, {8: 300}, {8: -1}, {12: 256}, {12: -1}, {16: 9}, {16: -1}, {16: 2}):
        fields.clear()
        fields.update(odd)  # data; device type; device id; ndim; ndim without a shape
        assert find(*arguments) == "twin", odd
    for wrong in ((), arguments[:4], ("kernel", [], None, (), {}), ("kernel", {}, None, [], {}), (1, {}, 1, (), None)):
        with pytest.raises(TypeError):
            find(*wrong)


# -------------------------------------------------------------------------------------------------------------- scalars
NUMBERS = (
    0, -1, 2**31 - 1, -(2**31), 2**31, -(2**31) - 1, 10**30, 10**400, True, 1.5, -0.0, 1e39, -1e39, 3.4028234e38,
    3.40282357e38, math.inf, -math.inf, 1e-46, np.int64(3), np.int64(2**40), np.float32(0.5), "x", None,
)  # fmt: skip


def test_scalars_are_stored_as_struct_does(solo: Group) -> None:
    x, y = pair()
    packed = scaled_copy.prepare(x, y, group=solo)._packed  # type: ignore[attr-defined]
    for step, scale in [*((n, 1.0) for n in NUMBERS), *((1, n) for n in NUMBERS)]:
        count = len(driver(solo).launches)
        done = packed.submit((step, scale))
        seen = [data for *_, data in driver(solo).launches[count:]]
        packed.fill((7, 7.0))
        assert packed.fill((step, scale)) == done, (step, scale)
        assert seen == ([packed._buffer.raw] if done else []), (step, scale)
    with pytest.raises(IndexError):
        packed.submit((1,))
    assert not solo.context.order.locked()  # type: ignore[union-attr]


# --------------------------------------------------------------------------------------------------------------- errors
def test_a_launch_that_fails_is_told_and_leaves_no_lock(solo: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = pair()
    call(solo, x, y)
    prepared = scaled_copy.prepare(x, y, group=solo)
    context = solo.context
    assert context is not None
    refused: list[Exception] = []
    monkeypatch.setattr(context, "refuse", refused.append)
    attempts = context.attempts
    with monkeypatch.context() as patch:
        patch.setattr(driver(solo), "launch", lambda *_: (_ for _ in ()).throw(errors.BackendError("no launch")))
        for act in (prepared, lambda: scaled_copy(x, y, group=solo)):
            with pytest.raises(errors.BackendError, match="no launch") as caught:
                act()
            assert refused.pop() is caught.value
            assert not context.submitted
            assert not context.order.locked()
        patch.setattr(driver(solo), "launch", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepared()
        assert not refused
        assert not context.order.locked()
    assert context.attempts == attempts + 3
    call(solo, x, y)
    assert context.submitted


def test_dropped_groups_and_kernels_are_collected() -> None:
    @pk.kernel
    def brief(x: pk.Global, y: pk.Parallel, n: int = 1):
        done = pk.signals(1)
        for m in pk.tasks(pk.cdiv(x.rows, 64)):
            with pk.storer():
                pk.signal(done, 0, pk.rank())

    group = Group(0, 1, "cuda", device=0, driver=FakeDriver())
    x, y = pair()
    for _ in range(2):
        brief(x, y, group=group)
    call(group, x, y)
    watched = [weakref.ref(o) for o in (brief, group, group.context)]
    del brief, group
    end = time.monotonic() + 10  # the watching thread looks at contexts now and then
    while any(ref() is not None for ref in watched) and time.monotonic() < end:
        time.sleep(0.01)
        gc.collect()
    assert [ref() for ref in watched] == [None] * 3

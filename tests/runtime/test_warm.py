"""The warm path: what a repeated call costs on the host, and everything after which it must pack again."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import pk
from pk import errors
from pk.runtime import compile as compiler
from pk.runtime import group as groups
from pk.runtime import module, params, records, symm
from pk.runtime.group import Group
from pk.runtime.spawn import run_threads
from tests.runtime.fake import FakeDriver, FakeModule


@pk.kernel
def scaled_copy(x: pk.Global, y: pk.Parallel, step: int = 1, scale: float = 1.0, B: pk.constexpr = 64):
    """Something with a tensor map, pointers to peers, signals, scratch and both kinds of scalars."""
    ring = pk.pipeline(2, t=pk.shared((B, B), x.dtype))
    tmp = pk.scratch((x.rows, x.cols), x.dtype)
    done = pk.signals(pk.cdiv(x.rows, B), pk.cdiv(x.cols, B))
    for m, n in pk.tasks(pk.cdiv(x.rows, B), pk.cdiv(x.cols, B)):
        with pk.loader():
            if step < 7 and scale < 3.0:
                with ring.fill() as s:
                    pk.load_async(s.t, x, (m, n))
        with pk.storer():
            if step < 7 and scale < 3.0:
                with ring.drain() as s:
                    pk.store_async(y[pk.rank()], s.t, (m, n))
                    pk.store_async(tmp[pk.rank()], s.t, (m, n))
                pk.signal_all(done, (m, n))


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are neither compiled nor loaded."""
    modules: dict[str, FakeModule] = {}

    def compile(source: Any, ir_text: str = "") -> Any:
        return SimpleNamespace(source=source, digest=id(source))

    monkeypatch.setattr(compiler, "compile", compile)
    monkeypatch.setattr(module, "loaded", lambda binary, entry: True)
    monkeypatch.setattr(module, "load", lambda binary, entry: modules.setdefault(entry, FakeModule(binary.source)))


@pytest.fixture
def packs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by a name whenever parameters are packed."""
    found: list[str] = []
    original = params.pack

    def pack(source: Any, *rest: Any) -> bytes:
        found.append(source.name)
        return original(source, *rest)

    monkeypatch.setattr(params, "pack", pack)
    return found


@pytest.fixture
def solo() -> Iterator[Group]:
    group = Group(0, 1, "cuda", device=0, driver=FakeDriver())
    yield group
    group.close()


def driver(group: Group) -> FakeDriver:
    assert isinstance(group.driver, FakeDriver)
    return group.driver


def pair(rows: int = 128, cols: int = 128, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(rows, cols, dtype=dtype), torch.zeros(rows, cols, dtype=dtype)


def scalars(group: Group, launch: int = -1) -> tuple[int, float]:
    """What a launch was told as `step` and `scale`."""
    source = scaled_copy.specialise(x=pk.spec(torch.bfloat16, 2), y=pk.spec(torch.bfloat16, 2)).source
    data = driver(group).launches[launch][3]
    found = {f.key: struct.unpack_from("<f" if f.kind == "float" else "<i", data, f.offset)[0]
             for f in source.fields if f.kind in ("int", "float")}  # fmt: skip
    return found["step"], found["scale"]


# ----------------------------------------------------------------------------------------------------------- reuse
def test_the_same_call_is_packed_once(solo: Group, packs: list[str]) -> None:
    x, y = pair()
    for _ in range(3):
        scaled_copy(x, y, group=solo)
    assert packs == ["scaled_copy"]
    datas = [data for _, _, _, data in driver(solo).launches]
    assert len(datas) == 3 and len(set(datas)) == 1


def test_contents_and_views_of_the_same_memory_are_the_same_call(solo: Group, packs: list[str]) -> None:
    x, y = pair()
    scaled_copy(x, y, group=solo)
    x.fill_(3)
    scaled_copy(x.view(128, 128), y[:], group=solo)
    assert len(packs) == 1


CHANGES: dict[str, Callable[[torch.Tensor, torch.Tensor], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "pointer": lambda x, y: ((x.clone(), y), {}),
    "pointer of a Parallel": lambda x, y: ((x, y.clone()), {}),
    "offset": lambda x, y: ((x[8:], y), {}),
    "shape": lambda x, y: ((x[:64], y), {}),
    "strides": lambda x, y: ((x.view(64, 256)[:, :128], y), {}),
    "shape, of as many elements": lambda x, y: ((x.view(64, 256), y), {}),
    "dtype": lambda x, y: ((x.view(torch.float16), y.view(torch.float16)), {}),
    "constexpr": lambda x, y: ((x, y), {"B": 32}),
    "constexpr, through config": lambda x, y: ((x, y), {"config": {"B": 32}}),
    "number of SMs": lambda x, y: ((x, y), {"sms": 8}),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_packed_again_and_back_is_not(what: str, solo: Group, packs: list[str]) -> None:
    x, y = pair()
    scaled_copy(x, y, group=solo)
    first = driver(solo).launches[0][1:]
    args, kwargs = CHANGES[what](x, y)
    scaled_copy(*args, **kwargs, group=solo)
    assert len(packs) == 2 and driver(solo).launches[1][1:] != first
    scaled_copy(x, y, group=solo)
    scaled_copy(*args, **kwargs, group=solo)
    assert len(packs) == 2 and [entry[1:] for entry in driver(solo).launches[2:]] == [
        first, driver(solo).launches[1][1:],
    ]  # fmt: skip


def test_memory_that_changes_in_place_is_noticed(solo: Group, packs: list[str]) -> None:
    x, y = pair()
    scaled_copy(x, y, group=solo)
    x.data = torch.ones(64, 128, dtype=torch.bfloat16)
    scaled_copy(x, y, group=solo)
    x.resize_(32, 128)
    scaled_copy(x, y, group=solo)
    assert len(packs) == 3


def test_scalars_are_refilled(solo: Group, packs: list[str]) -> None:
    x, y = pair()
    told = []
    for args, kwargs in (((), {}), ((2,), {}), ((3, 2.5), {}), ((), {"scale": 0.25}), ((), {}), ((-(2**31), -0.0), {})):
        scaled_copy(x, y, *args, **kwargs, group=solo)
        told.append(scalars(solo))
    assert told == [(1, 1.0), (2, 1.0), (3, 2.5), (1, 0.25), (1, 1.0), (-(2**31), 0.0)]
    assert len(packs) == 1
    assert struct.pack("<f", told[-1][1]) == struct.pack("<f", -0.0)


def test_a_warm_scalar_that_does_not_fit_is_refused(solo: Group) -> None:
    x, y = pair()
    scaled_copy(x, y, 1, group=solo)
    with pytest.raises(errors.ArgumentError, match="does not fit int32"):
        scaled_copy(x, y, 2**31, group=solo)
    with pytest.raises(errors.ArgumentError, match="must be an int"):
        scaled_copy(x, y, 2.0, group=solo)
    with pytest.raises(errors.ArgumentError, match="cannot be hashed"):
        scaled_copy(x, y, B=[64], group=solo)
    with pytest.raises(errors.ArgumentError, match="takes 5 arguments"):
        scaled_copy(x, y, 1, 1.0, 64, 5, group=solo)
    assert len(driver(solo).launches) == 1
    scaled_copy(x, y, 4, group=solo)
    assert scalars(solo) == (4, 1.0)


def test_empty_tensors_are_never_taken_for_each_other(solo: Group, packs: list[str]) -> None:
    x, y = pair()
    for _ in range(2):
        scaled_copy(x[:, :0], y[:, :0], group=solo)
    assert solo.context is not None and not solo.context.warm


def test_the_cache_is_bounded(solo: Group) -> None:
    x, y = pair(2100, 64)
    scaled_copy(x[:8], y, group=solo)
    assert solo.context is not None
    for row in range(1030):
        scaled_copy(x[row : row + 8], y, group=solo)
    assert len(solo.context.warm) == 1024 and len(solo.context.cache) == 1024


# -------------------------------------------------------------------------------------------- what must not be cached
def test_streams_are_followed(solo: Group) -> None:
    x, y = pair()
    me = groups.threading.get_ident()
    for stream in (5, 5, 6, 6, 5):
        driver(solo).current_stream[me] = stream
        scaled_copy(x, y, group=solo)
    assert [entry[2] for entry in driver(solo).launches] == [5, 5, 6, 6, 5]
    assert [e for e in driver(solo).machine.log if e[0] == "follow"] == [("follow", 6, 5), ("follow", 5, 6)]


def test_time_limits_are_those_of_the_call(solo: Group, packs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = pair()
    scaled_copy(x, y, group=solo)
    monkeypatch.setenv("PK_TIMEOUT_S", "2.5")
    scaled_copy(x, y, group=solo)
    monkeypatch.setenv("PK_ENTRY_TIMEOUT_S", "7")
    scaled_copy(x, y, group=solo)
    scaled_copy(x, y, group=solo)
    assert len(packs) == 3
    assert struct.pack("<QQ", 2_500_000_000, 7_000_000_000) in driver(solo).launches[-1][3]


def _hang(group: Group) -> None:
    assert group.context is not None
    record = struct.pack("<7I2i5I4i2Q40x", 1, records.COUNTER, 0, 0, 0, 0, 0, 0, 1, 0, 0, 1, 1, 0, 0, 0, 0, 0, 5, 9)
    driver(group).write(0, group.context.host_page, record)


def test_a_hang_is_raised_by_the_next_warm_call_and_reset_clears_it(solo: Group, packs: list[str]) -> None:
    x, y = pair()
    scaled_copy(x, y, group=solo)
    prepared = scaled_copy.prepare(x, y, group=solo)
    _hang(solo)
    for call in (lambda: scaled_copy(x, y, group=solo), prepared, lambda: scaled_copy(x, y, group=solo)):
        with pytest.raises(errors.HangError):
            call()
    assert len(driver(solo).launches) == 1
    solo.reset()
    scaled_copy(x, y, group=solo)
    prepared()
    assert len(driver(solo).launches) == 3 and len(packs) == 2  # once before and once after the reset


def test_growth_moves_every_launch_to_the_new_counters(solo: Group, packs: list[str]) -> None:
    x, y = pair()
    prepared = scaled_copy.prepare(x, y, group=solo)
    scaled_copy(x, y, group=solo)
    assert solo.context is not None
    old = solo.context._segment()
    big = torch.zeros(8 * 70_000, 8, dtype=torch.bfloat16)
    scaled_copy(big, torch.zeros_like(big), B=8, group=solo)
    new = solo.context._segment()
    assert new is not old and solo.context.outgrown == [old]
    scaled_copy(x, y, group=solo)
    prepared()
    headers = [struct.pack("<Q", s.base) for s in (old, new)]
    for number, (_, _, _, data) in enumerate(driver(solo).launches):
        assert (headers[0] in data, headers[1] in data) == ((True, False) if number == 0 else (False, True))
    assert len(packs) == 3  # before, the large one, after


def test_reset_clears_the_counters_that_captured_launches_still_use(solo: Group) -> None:
    x, y = pair()
    scaled_copy(x, y, group=solo)
    big = torch.zeros(8 * 70_000, 8, dtype=torch.bfloat16)
    scaled_copy(big, torch.zeros_like(big), B=8, group=solo)
    assert solo.context is not None
    (old,) = solo.context.outgrown
    solo.context.abort(0)
    assert driver(solo).read(0, old.base + 256, 4) == b"\1\0\0\0"
    assert solo.context.aborted()
    solo.reset()
    assert driver(solo).read(0, old.base + 256, 4) == bytes(4)
    assert not solo.context.aborted()


def test_a_closed_group_is_not_launched_on() -> None:
    group = Group(0, 1, "cuda", device=0, driver=FakeDriver())
    x, y = pair()
    scaled_copy(x, y, group=group)
    prepared = scaled_copy.prepare(x, y, group=group)
    group.close()
    for call in (prepared, lambda: scaled_copy(x, y, group=group)):
        with pytest.raises(errors.BackendError, match="was closed"):
            call()
    assert len(driver(group).launches) == 1


# ------------------------------------------------------------------------------------------------------------ capture
def test_capture_records_and_leaves_eager_ordering_alone(solo: Group) -> None:
    x, y = pair()
    fake, me = driver(solo), groups.threading.get_ident()

    def launch(stream: int) -> None:
        fake.current_stream[me] = stream
        scaled_copy(x, y, group=solo)

    launch(5)
    fake.captured = {8, 9}
    for stream in (8, 8, 9, 8):  # a capture that forks to a second stream and comes back
        launch(stream)
    fake.captured = set()
    launch(6)  # after the eager launch on 5, not after what the graph holds
    assert [e[1:] for e in fake.machine.log if e[0] == "follow"] == [(9, 8), (8, 9), (6, 5)]
    assert [entry[2] for entry in fake.launches] == [5, 8, 8, 9, 8, 6]


def test_capture_on_the_stream_of_the_last_launch_then_on_a_fork(solo: Group) -> None:
    x, y = pair()
    fake, me = driver(solo), groups.threading.get_ident()
    for stream, captured in ((5, set()), (5, {5, 7}), (7, {5, 7}), (5, {5, 7}), (5, set()), (6, set())):
        fake.current_stream[me], fake.captured = stream, captured
        scaled_copy(x, y, group=solo)
    assert [e[1:] for e in fake.machine.log if e[0] == "follow"] == [(7, 5), (5, 7), (6, 5)]


def test_what_cannot_happen_during_capture(solo: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = pair()
    fake = driver(solo)
    fake.captured = {100}
    with pytest.raises(errors.BackendError, match=r"first launch needs memory, .*while a CUDA graph is being captured"):
        scaled_copy(x, y, group=solo)
    fake.captured = set()
    scaled_copy(x, y, group=solo)
    fake.captured = {100}
    scaled_copy(x, y, group=solo)
    scaled_copy(x[:64], y[:64], group=solo)  # a new shape that fits needs nothing
    with pytest.raises(errors.BackendError, match=r"bytes of scratch needs .*while a CUDA graph is being captured"):
        scaled_copy(*pair(8192, 8192), group=solo)
    with pytest.raises(errors.BackendError, match=r"pk.synchronize\(\) waits"):
        pk.synchronize(solo)
    monkeypatch.setattr(module, "loaded", lambda binary, entry: False)
    with pytest.raises(errors.BackendError, match="called for the first time and has to be loaded"):
        scaled_copy(x, y, B=32, group=solo)
    scaled_copy(x, y, group=solo)
    assert len(fake.launches) == 4


# ------------------------------------------------------------------------------------------------------------ prepare
def test_prepared_launches_what_the_call_launches(solo: Group, packs: list[str]) -> None:
    x, y = pair()
    prepared = scaled_copy.prepare(x, y, 3, scale=0.5, sms=8, group=solo)
    assert driver(solo).launches == []
    for _ in range(2):
        prepared()
    scaled_copy(x, y, 3, scale=0.5, sms=8, group=solo)
    scaled_copy(x, y, 4, scale=0.75, sms=8, group=solo)
    prepared()
    launches = driver(solo).launches
    assert launches[0] == launches[1] == launches[2] == launches[4] != launches[3]
    assert launches[0][1][0] == 8
    assert len(packs) == 1
    assert "scaled_copy" in repr(prepared)


def test_prepared_keeps_its_tensors(solo: Group) -> None:
    import weakref

    x, y = pair()
    watch = weakref.ref(x)
    prepared = scaled_copy.prepare(x, y, group=solo)
    scaled_copy(x, y, group=solo)
    del x
    assert watch() is not None
    prepared()
    del prepared
    assert watch() is None  # and the cache of warm calls does not


def test_ranks_as_threads_prepare_and_launch_together() -> None:
    fake = FakeDriver()

    def run(rank: int) -> None:
        x, y = torch.zeros(64, 64), symm.empty((64, 64), torch.float32, groups.current())
        prepared = scaled_copy.prepare(x, y, 5)
        prepared()
        scaled_copy(x, y, 6)
        scaled_copy(x, y, 7)
        prepared()
        if rank == 0:  # a prepared call and an ordinary one meet, before and after growth
            scaled_copy(x, y, 5)
        else:
            prepared()
        big = torch.zeros(8 * 70_000, 8, dtype=torch.bfloat16)
        scaled_copy(big, symm.empty((8 * 70_000, 8), torch.bfloat16, groups.current()), B=8)
        if rank == 0:
            scaled_copy(x, y, 5)
        else:
            prepared()

    run_threads(run, (), groups.threads(2, "cuda", [0, 0], fake))
    assert len(fake.launches) == 14


def test_sim_prepares_too() -> None:
    x, y = torch.randn(128, 64).bfloat16(), torch.zeros(128, 64).bfloat16()
    group = Group(0, 1, "sim")
    prepared = scaled_copy.prepare(x, y, group=group, sms=2)
    assert not y.any()
    prepared()
    assert torch.equal(x, y)


def test_sms_is_checked(solo: Group) -> None:
    x, y = pair()
    for sms in (0, -1, 133, 2.0, True):
        with pytest.raises(errors.ArgumentError, match="this rank may fill 1 to 132 SMs"):
            scaled_copy(x, y, sms=sms, group=solo)
    scaled_copy(x, y, sms=132, group=solo)


@pk.kernel
def pushed(x: pk.Global, y: pk.Parallel, B: pk.constexpr = 64):
    """With a communicator."""
    ring = pk.pipeline(2, t=pk.shared((B, B), x.dtype))
    done = pk.signals(1)
    with pk.communicator(sms=4):
        for m, n in pk.tasks(pk.cdiv(x.rows, B), pk.cdiv(x.cols, B)):
            with pk.loader():
                with ring.fill() as s:
                    pk.load_async(s.t, x, (m, n))
            with pk.storer():
                with ring.drain() as s:
                    pk.store_async(y[pk.rank()], s.t, (m, n))
                pk.signal(done, 0, pk.rank())
    for i in pk.tasks(1):
        with pk.storer():
            pk.wait(done, 0, pk.cdiv(x.rows, B) * pk.cdiv(x.cols, B))


def test_a_communicator_needs_a_second_block(solo: Group) -> None:
    with pytest.raises(errors.BackendError) as error:
        pushed(*pair(), sms=1, group=solo)
    assert str(error.value) == (
        "kernel `pushed` has a communicator, which fills SMs of its own: it needs at least 2 blocks, and rank 0 may "
        "launch 1.\n  Pass sms=2 or more."
    )
    pushed(*pair(), sms=2, group=solo)


# -------------------------------------------------------------------------------------------------------------- groups
def test_the_group_of_a_caller_without_one_is_looked_up_once_and_again_after_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PK_BACKEND", "sim")
    group = groups.current()
    monkeypatch.setattr(groups, "_alone", lambda: pytest.fail("looked up again"))
    assert groups.current() is group
    looked_up = Group(0, 1, "sim")
    monkeypatch.setattr(groups, "_alone", lambda: looked_up)
    assert groups.current() is group
    monkeypatch.setenv("PK_BACKEND", " sim")  # another text
    assert groups.current() is looked_up
    looked_up.closed = True
    other = Group(0, 1, "sim")
    monkeypatch.setattr(groups, "_alone", lambda: other)
    assert groups.current() is other
    world = Group(0, 1, "sim")  # any object will do for torch's default process group
    monkeypatch.setattr(groups, "_world", lambda: world)
    third = Group(0, 1, "sim")
    monkeypatch.setattr(groups, "_alone", lambda: third)
    assert groups.current() is third
    other.closed = third.closed = True  # nothing of this test is found by the next


def test_another_device_is_another_group(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = [Group(0, 1, "cuda", device=index, driver=FakeDriver()) for index in (0, 1)]
    now = 0
    monkeypatch.setattr(groups, "_device_reader", lambda: lambda: now)
    monkeypatch.setattr(groups, "_alone", lambda: pair[now])
    assert groups.current() is pair[0]
    now = 1
    assert groups.current() is pair[1]
    now = 0
    assert groups.current() is pair[0]
    for group in pair:
        group.close()


# --------------------------------------------------------------------------------------------------------------- cost
def test_a_warm_call_is_a_few_python_calls(solo: Group) -> None:
    """Not time, which a busy machine stretches, but work: Python functions entered from call to driver."""
    x, y = pair()
    prepared = scaled_copy.prepare(x, y, group=solo)
    scaled_copy(x, y, group=solo)
    scaled_copy(x, y, 1, group=solo)
    pushed(x, y, group=solo)
    calls = {"no scalars": lambda: pushed(x, y, group=solo), "scalars": lambda: scaled_copy(x, y, 3, group=solo)}
    assert len(entered(calls["no scalars"])) <= 5
    assert len(entered(calls["scalars"])) <= 15
    assert len(entered(prepared)) <= 4


def entered(call: Callable[[], Any]) -> list[str]:
    """The functions of pk that ``call`` enters, in order."""
    found = []

    def note(frame: Any, event: str, arg: Any) -> None:
        if event == "call" and frame.f_globals.get("__name__", "").startswith("pk."):
            found.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found

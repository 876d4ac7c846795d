"""From arguments to submitted launches, with a driver made of host memory."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pk.errors import ArgumentError, BackendError, HangError, RankError, RanksDisagree
from pk.runtime import group as groups
from pk.runtime import records, symm
from pk.runtime.group import Group
from pk.runtime.launch import Call, launch, refuse, synchronize
from pk.runtime.spawn import run_threads
from tests.runtime.fake import FakeDriver, FakeModule, Machine, source

SOURCE = source()
SIGNALS = {"begun": (2, 3, 5), "done": (4,)}


def threads(
    fn: Callable[..., Any], world: int, driver: FakeDriver | None = None, devices: list[int] | None = None
) -> list[Any]:
    driver = driver or FakeDriver()
    return run_threads(fn, (), groups.threads(world, "cuda", devices or [0] * world, driver))


def solo(driver: FakeDriver | None = None) -> Group:
    return Group(0, 1, "cuda", device=0, driver=driver or FakeDriver())


def call(group: Group, module: FakeModule | None = None, identity: str = "gather(c (64, 128))", **changes: Any) -> None:
    c = changes.pop("c", None)
    tensors = {"a": changes.pop("a", A), "c": c if c is not None else symm.empty((64, 128), torch.bfloat16, group)}
    scratch = changes.pop("scratch", {"parts": ((8, 64), torch.float32)})
    loaded = module or FakeModule(SOURCE)
    launch(Call(group, SOURCE, loaded, tensors, {"n": -7, "x": 0.5}, SIGNALS, scratch, identity))


A = torch.zeros(256, 192, dtype=torch.float16)[:200, :128]  # strides (192, 1)


def fields(data: bytes) -> dict[str, bytes]:
    named = {}
    for f in SOURCE.fields:
        key = f.key or (f.map.tensor if f.map else "")
        named[f"{f.kind} {key}".strip()] = data[f.offset : f.offset + f.size]
    return named


def test_parameters_of_one_rank() -> None:
    driver = FakeDriver()
    group = solo(driver)
    c = symm.empty((64, 128), torch.bfloat16, group)
    call(group, c=c)
    (device, shape, stream, data), got = driver.launches[0], fields(driver.launches[0][3])
    assert (device, shape, stream) == (0, (132, 384, 200_000), 100)
    assert len(data) == SOURCE.params_size
    assert got["map a"].rstrip(b"\0").decode() == f"a|{A.data_ptr():x}|float16|(200, 128)|(192, 1)|(64, 64)|128"
    own = f"c|{c.data_ptr():x}|bfloat16|(64, 128)|(128, 1)|(64, 64)|128".encode()
    assert got["maps c"] == own.ljust(1024, b"\0")
    assert group.context is not None and group.context.scratch is not None
    scratch = group.context.scratch.base
    assert got["map parts"].rstrip(b"\0").decode() == f"parts|{scratch:x}|float32|(8, 64)|(64, 1)|(64, 64)|128"
    assert got["pointer a"] == struct.pack("<Q", A.data_ptr())
    assert got["pointers c"] == struct.pack("<8Q", c.data_ptr(), *[0] * 7)
    ints = {key: struct.unpack("<i", got[f"int {key}"])[0] for key in ("a.0", "a.stride.0", "c.1", "begun.1", "n")}
    assert ints == {"a.0": 200, "a.stride.0": 192, "c.1": 128, "begun.1": 3, "n": -7}
    assert [struct.unpack("<i", got[f"int {k}.offset"])[0] for k in ("begun", "done")] == [0, 30]
    assert got["float x"] == struct.pack("<f", 0.5)


def test_context_struct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PK_TIMEOUT_S", "2.5")
    driver = FakeDriver()

    def run(rank: int) -> None:
        call(groups.current())

    threads(run, 2, driver)
    structs = [fields(data)["context"] for _, _, _, data in driver.launches]
    headers = [struct.unpack_from("<8Q", s) for s in structs]
    assert headers[0] == headers[1]
    assert 0 not in headers[0][:2] and headers[0][2:] == (0,) * 6
    for rank, s in enumerate(structs):
        page, timeout, entry, *words = struct.unpack_from("<QQQ7I", s, 64)
        assert page > 1 << 50
        assert (timeout, entry) == (2_500_000_000, 600_000_000_000)
        assert words[0:2] == [rank, 2]
        assert words[3:] == [0, 34, 65536, 1]  # kernel, counters, capacity, exit words
        assert s[116:] == bytes(12)
    assert structs[0][96:100] == structs[1][96:100] != bytes(4)


def test_header_and_counters_are_zero_before_the_first_launch() -> None:
    group = solo()
    call(group)
    assert group.context is not None and group.context.segment is not None
    segment = group.context.segment
    assert group.driver.read(0, segment.base, 512 + 8 * 65536 + 256) == bytes(512 + 8 * 65536 + 256)


def test_a_warm_call_packs_nothing() -> None:
    group, packed = solo(), []
    driver = group.driver
    c = symm.empty((64, 128), torch.bfloat16, group)
    encode = driver.encode
    driver.encode = lambda *a: packed.append(1) or encode(*a)  # type: ignore[method-assign, func-returns-value]
    module = FakeModule(SOURCE)
    call(group, module, c=c)
    first = len(packed)
    call(group, module, c=c)
    assert len(packed) == first
    call(group, module, c=c, a=A[1:])
    assert len(packed) > first


def test_ranks_launch_together_with_each_others_addresses() -> None:
    machine, driver = Machine(gpus=2), FakeDriver(Machine(gpus=2))
    assert machine.gpus == 2

    def run(rank: int) -> int:
        group = groups.current()
        driver.current_stream[_ident()] = 7 + rank
        c = symm.empty((64, 128), torch.bfloat16, group)
        call(group, c=c)
        return c.data_ptr()

    addresses = threads(run, 4, driver, [0, 1, 0, 1])
    assert [(d, shape[0], stream) for d, shape, stream, _ in driver.launches] == [
        (0, 66, 7), (1, 66, 8), (0, 66, 9), (1, 66, 10),
    ]  # fmt: skip
    for _, _, _, data in driver.launches:
        assert struct.unpack("<8Q", fields(data)["pointers c"]) == (*addresses, 0, 0, 0, 0)


def _ident() -> int:
    import threading

    return threading.get_ident()


def test_empty_tensors_point_to_zeros() -> None:
    group = solo()
    driver = group.driver
    call(group, a=A[:, :0], c=symm.empty((0, 128), torch.bfloat16, group))
    got = fields(driver.launches[0][3])  # type: ignore[attr-defined]
    assert group.context is not None
    pad = group.context.pad
    assert got["map a"].rstrip(b"\0").decode() == f"a|{pad:x}|float16|(1, 1)|(1, 1)|(64, 64)|128"
    assert struct.unpack_from("<Q", got["pointers c"])[0] == pad
    assert driver.read(0, pad, 256) == bytes(256)


def test_many_counters_and_scratch_grow_collectively() -> None:
    driver = FakeDriver()

    def run(rank: int) -> tuple[int, int]:
        group = groups.current()
        c = symm.empty((64, 128), torch.bfloat16, group)
        call(group, c=c)
        launch(Call(
            group, SOURCE, FakeModule(SOURCE), {"a": A, "c": c}, {"n": 0, "x": 0.0},
            {"begun": (100, 1000, 1), "done": (1,)}, {"parts": ((4096, 64), torch.float32)}, "bigger",
        ))  # fmt: skip
        assert group.context is not None and group.context.scratch is not None
        return group.context.capacity, group.context.scratch.nbytes

    assert threads(run, 2, driver) == [(131072, 1 << 20)] * 2
    assert len(driver.launches) == 4


def test_no_growth_during_capture() -> None:
    group = solo()
    call(group, scratch={"parts": ((8, 64), torch.float32)})
    group.driver.captured.add(100)  # type: ignore[attr-defined]
    c = torch.zeros(64, 128, dtype=torch.bfloat16)
    call(group, c=c)  # it fits what is there
    with pytest.raises(BackendError, match="cannot be allocated while a CUDA graph is being captured"):
        call(group, c=c, scratch={"parts": ((8000, 64), torch.float32)})


def test_streams_are_chained() -> None:
    driver = FakeDriver()
    group = solo(driver)
    module = FakeModule(SOURCE)
    c = symm.empty((64, 128), torch.bfloat16, group)
    for stream in (5, 5, 6):
        driver.current_stream[_ident()] = stream
        call(group, module, c=c)
    assert [e for e in driver.machine.log if e[0] == "follow"] == [("follow", 6, 5)]


# ------------------------------------------------------------------------------------------------------------ mistakes
def error_of(
    fn: Callable[[int], Any], world: int = 2, driver: FakeDriver | None = None, devices: list[int] | None = None
) -> Any:
    caught: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            fn(rank)
        except BaseException as error:
            caught[rank] = error
            raise

    with pytest.raises(RankError):
        threads(run, world, driver, devices)
    assert sorted(caught) == list(range(world))
    return caught


def test_cpu_tensor() -> None:
    driver = FakeDriver()
    driver.device_name = lambda device: "cuda:0"  # type: ignore[method-assign]
    group = solo(driver)
    with pytest.raises(ArgumentError) as error:
        call(group)
    assert str(error.value) == (
        "`a` of kernel `gather` is a CPU tensor of shape (200, 128), but rank 0 runs on GPU 0.\n"
        "  Move it with `a.to(pk.device())`."
    )


def test_not_symmetric_on_one_rank_ends_all() -> None:
    def run(rank: int) -> None:
        group = groups.current()
        c = symm.empty((64, 128), torch.bfloat16, group)
        call(group, c=c if rank == 0 else torch.zeros(64, 128, dtype=torch.bfloat16))

    caught = error_of(run)
    assert str(caught[1]) == (
        "`c` is not symmetric: the memory of this tensor of shape (64, 128) belongs to rank 1 alone, so its peers "
        "cannot reach it.\n"
        "  On every rank, allocate it with pk.empty(shape, dtype), or share it once with pk.symmetric(tensor)."
    )
    assert str(caught[0]) == f"rank 1 could not launch: ArgumentError: {caught[1]}"


def test_ranks_disagree_on_a_shape() -> None:
    driver = FakeDriver()

    def run(rank: int) -> None:
        group = groups.current()
        c = symm.empty((64, 128), torch.bfloat16, group)
        call(group, c=c[: 32 + rank], identity=f"gather() symmetric: c ({32 + rank}, 128)")

    for error in error_of(run, driver=driver).values():
        assert isinstance(error, RanksDisagree)
        assert str(error) == (
            "the ranks launch different kernels, or one kernel with different shapes:\n"
            "  rank 0: gather() symmetric: c (32, 128)\n"
            "  rank 1: gather() symmetric: c (33, 128)\n"
            "  All ranks launch the same kernel with the same constants and the same shapes of what peers address."
        )
    assert driver.launches == []


def test_ranks_pass_different_symmetric_tensors() -> None:
    def run(rank: int) -> None:
        group = groups.current()
        pair = [symm.empty((64, 128), torch.bfloat16, group) for _ in range(2)]
        call(group, c=pair[rank])

    for error in error_of(run).values():
        assert str(error) == (
            "the ranks call kernel `gather` with different tensors as `c`:\n"
            "  rank 0: symmetric memory 0, byte 0\n"
            "  rank 1: symmetric memory 1, byte 0\n"
            "  A Parallel argument is the same pk.empty tensor, or the same view of it, on every rank."
        )


def test_blocks_that_cannot_be_resident() -> None:
    group = solo()
    with pytest.raises(BackendError) as error:
        call(group, FakeModule(SOURCE, per_sm=0))
    assert str(error.value) == (
        "kernel `gather` does not fit GPU 0: 384 threads and 200000 bytes of shared memory a block, 132 SMs for "
        "this rank.\n"
        "  Use smaller tiles or fewer stages."
    )


def test_sum_of_blocks_is_checked() -> None:
    def run(rank: int) -> None:
        group = groups.current()
        group.sms = 132
        call(group)

    for error in error_of(run).values():
        assert str(error) == (
            "kernel `gather`: 2 ranks share GPU 0 and launch 264 blocks together, but only 132 fit (1 on each of 132 "
            "SMs), so they would wait for each other for ever.\n"
            "  Use fewer ranks on this GPU, or smaller tiles or fewer stages."
        )


def test_legacy_default_stream_of_a_shared_gpu() -> None:
    driver = FakeDriver()

    def run(rank: int) -> None:
        driver.current_stream[_ident()] = 0
        call(groups.current())

    assert "is on the legacy default stream" in str(error_of(run, driver=driver)[0])


def test_launch_blocking_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    for error in error_of(lambda rank: call(groups.current())).values():
        assert str(error).startswith("CUDA_LAUNCH_BLOCKING is set: ")


def test_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "2")
    for error in error_of(lambda rank: call(groups.current()), 3).values():
        assert str(error) == (
            "3 ranks share GPU 0, but CUDA_DEVICE_MAX_CONNECTIONS=2 lets only 2 of their kernels run side by side.\n"
            "  Set CUDA_DEVICE_MAX_CONNECTIONS=32 before the process first uses CUDA."
        )


def test_p2p_impossible() -> None:
    for rank, error in error_of(
        lambda rank: call(groups.current()), 2, FakeDriver(Machine(2, p2p=False)), [0, 1]
    ).items():
        assert isinstance(error, BackendError)
        assert str(error).startswith(f"GPU {rank} cannot access the memory of GPU {1 - rank}: ")


def test_refuse_releases_the_others() -> None:
    def run(rank: int) -> None:
        group = groups.current()
        c = symm.empty((64, 128), torch.bfloat16, group)
        if rank == 1:
            refuse(group, "gather", ArgumentError("`a` is wrong."))
        call(group, c=c)

    caught = error_of(run)
    assert str(caught[1]) == "`a` is wrong."
    assert str(caught[0]) == "rank 1 could not launch: ArgumentError: `a` is wrong."


def test_a_failing_launch_stops_the_ranks_already_launched() -> None:
    driver = FakeDriver()
    headers: dict[int, int] = {}

    def second_fails(driver: FakeDriver, data: bytes) -> None:
        header = struct.unpack_from("<8Q", fields(data)["context"])
        headers[len(headers)] = header[len(headers)]
        if len(headers) == 2:
            raise BackendError("cuLaunchKernelEx failed.")

    module = FakeModule(SOURCE, second_fails)
    error_of(lambda rank: call(groups.current(), module), driver=driver)
    assert driver.read(0, headers[0] + 256, 4) == b"\2\0\0\0"


# --------------------------------------------------------------------------------------------------------------- hangs
def record(rank: int, reason: int = records.COUNTER, site: int = 0, **changes: Any) -> bytes:
    values = {
        "block": 17,
        "flat": 13,
        "seen": 0,
        "needed": 1,
        "gen": 3,
        "peer": 0,
        "tile": (0, 2, 3),
        "seconds": 30.0,
    } | changes
    tile = values["tile"]
    return struct.pack(
        "<7I2i5I4i2Q40x", 1, reason, 0, site, rank, values["block"], values["flat"], values["seen"], values["needed"],
        values["gen"], values["peer"], 1, 2, len(tile), *tile, *(0,) * (4 - len(tile)), 5,
        5 + int(values["seconds"] * 1e9),
    )  # fmt: skip


def hanging(*which: bytes) -> Callable[[FakeDriver, bytes], None]:
    """A kernel that leaves these records, each on the page of its rank."""

    def run(driver: FakeDriver, data: bytes) -> None:
        context = fields(data)["context"]
        page = struct.unpack_from("<Q", context, 64)[0] - (1 << 50)
        rank = struct.unpack_from("<I", context, 88)[0]
        mine = [r for r in which if struct.unpack_from("<I", r, 16)[0] == rank]
        for slot, data in enumerate(mine):
            driver.write(0, page + 128 * slot, data)

    return run


TEXT = """kernel `gather`: rank 1 waited 30.0 s for begun[0, 2, 3], which is 0 and must reach 1.
  rank 1, block 17, storer, tile (0, 2, 3)
  File "/home/me/kernels.py", line 41
    pk.wait(begun, (owner, m, n), 1)
  1 more is due.  What signals `begun`:
    storer, kernels.py:50: pk.signal_all(begun, (me, m, n))
  Blocked at that time:
    rank 0 loader, block 3, tile (0, 2, 3): waiting for inputs (kernels.py:20)
  Limits: PK_TIMEOUT_S=30, PK_ENTRY_TIMEOUT_S=600 (a late rank).  Outputs of this launch are NaN.
  The group launches nothing until every rank calls pk.reset()."""


def test_hang_is_raised_on_every_rank_until_reset(capfd: pytest.CaptureFixture[str]) -> None:
    driver = FakeDriver()
    stuck = FakeModule(SOURCE, hanging(record(1), record(0, records.TOLD, 1, block=3, flat=0, needed=0)))

    def run(rank: int) -> list[str]:
        group = groups.current()
        c = symm.empty((64, 128), torch.bfloat16, group)
        call(group, stuck, c=c)
        texts = []
        for attempt in (lambda: synchronize(group), lambda: call(group, c=c)):
            with pytest.raises(HangError) as error:
                attempt()
            texts.append(str(error.value))
        group.reset()
        synchronize(group)
        call(group, c=c)
        return texts

    assert threads(run, 2, driver) == [[TEXT, TEXT]] * 2


def test_solo_hang_is_said_at_once_and_raised_by_the_next_call(capfd: pytest.CaptureFixture[str]) -> None:
    import time

    group = solo()
    call(group, FakeModule(SOURCE, hanging(record(0))))
    end, said = time.monotonic() + 5, ""
    while not said and time.monotonic() < end:
        time.sleep(0.02)
        said = capfd.readouterr().err
    assert said == (
        "pk: kernel `gather`: rank 0 waited 30.0 s for begun[0, 2, 3], which is 0 and must reach 1; see HangError\n"
    )
    with pytest.raises(HangError):
        call(group)
    group.close()

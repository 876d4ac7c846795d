"""The native watchdog: what it reports, that it needs no GIL, and that it ends when it should."""

from __future__ import annotations

import ctypes
import os
import random
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pk import env
from pk.runtime import native, records
from pk.runtime import watch as watching

ROOT = Path(__file__).parent.parent.parent
SLOT, SLOTS = 128, 16

pytestmark = pytest.mark.skipif(native.native() is None, reason=native.reason() or "present")


class Page:
    """A page of records in ordinary memory, written as the device writes it: the state last."""

    def __init__(self) -> None:
        self.memory = (ctypes.c_uint64 * (SLOT * SLOTS // 8))()
        self.address = ctypes.addressof(self.memory)

    def post(self, slot: int, **fields: int) -> None:
        at = self.address + slot * SLOT
        values = {"reason": 1, "kernel_id": 3, "site": 4, "rank": 1, "block": 7, "index": 12, "seen": -1, "needed": 2}
        values |= fields
        ctypes.memmove(at + 4, struct.pack("<6I2i", *values.values()), 32)
        ctypes.memmove(at + 36, struct.pack("<5I4iQQ", 5, 2, 0xAB, 0xAB, 2, 8, 9, 0, 0, 10**9, 3 * 10**9), 52)
        ctypes.c_uint32.from_address(at).value = 1

    def fill(self, slot: int, rest: bytes) -> None:
        """Everything of a record but its state, then the state."""
        ctypes.memmove(self.address + slot * SLOT + 4, rest, SLOT - 4)
        ctypes.c_uint32.from_address(self.address + slot * SLOT).value = 1

    def bytes(self) -> bytes:
        return bytes(self.memory)

    def clear(self, slot: int) -> None:
        ctypes.c_uint32.from_address(self.address + slot * SLOT).value = 0


REASONS = ("none", "counter", "entry", "exit", "pipeline", "ranks disagree", "assert", "told by a peer")
LINE = (
    "pk: kernel gemm (id 3) gave up on rank 1: reason 1 (counter), slot {slot}, block 7, site 4, index 12, seen -1, "
    "needed 2, peer 2, gen 5, hash 000000ab/000000ab, tile [8, 9], waited 2000.000 ms\n"
)


@pytest.fixture
def pipe() -> Iterator[tuple[int, Callable[[], str]]]:
    """The writing end of a pipe, and a function that returns what has been written to it."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)

    def read() -> str:
        try:
            return os.read(reader, 1 << 16).decode()
        except BlockingIOError:
            return ""

    yield writer, read
    os.close(reader)
    os.close(writer)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end, "nothing happened for 10 s"
        time.sleep(0.001)


def watch(page: Page, fd: int, interval_ms: int = 1, grace_ms: int = 0):
    made = native.native().Watch(page.address, SLOTS, interval_ms, grace_ms, fd)
    made.name(3, "gemm")
    return made


def test_thread_reports_each_record_once_and_again_after_a_reset(pipe) -> None:
    fd, read = pipe
    page = Page()
    w = watch(page, fd)
    assert (w.running, w.reported) == (False, 0)
    w.start()
    w.start()  # no second thread
    assert w.running
    page.post(5)
    until(lambda: w.reported == 1)
    assert read() == LINE.format(slot=5)
    page.post(9)
    until(lambda: w.reported == 2)
    assert read() == LINE.format(slot=9)

    page.clear(5)
    w.poll()
    page.post(5)
    until(lambda: w.reported == 3)
    w.stop()
    assert not w.running
    assert read() == LINE.format(slot=5)


def test_poll_needs_no_thread(pipe) -> None:
    fd, read = pipe
    page = Page()
    w = watch(page, fd)
    assert w.poll() == 0
    page.post(0)
    page.post(15)
    assert w.poll() == 2
    assert w.poll() == 0
    assert read() == LINE.format(slot=0) + LINE.format(slot=15)


def test_unnamed_kernel_and_numbers_out_of_range_do_not_matter(pipe) -> None:
    fd, read = pipe
    page = Page()
    w = watch(page, fd)
    page.post(2, reason=99, kernel_id=77)
    ctypes.c_uint32.from_address(page.address + 2 * SLOT + 52).value = 2**32 - 1  # ntile
    assert w.poll() == 1
    text = read()
    assert text.startswith("pk: kernel ? (id 77) gave up on rank 1: reason 99 (unknown), slot 2,")
    assert "tile [8, 9, 0, 0]" in text
    w.name(77, "x" * 10_000)
    page.clear(2)
    w.poll()
    page.post(2, kernel_id=77)
    assert w.poll() == 1
    assert read().count("\n") == 1


def line_of(slot: int, record: records.Record) -> str:
    """What the native watchdog writes for a record, from the fields that Python reads."""
    reason = REASONS[record.reason] if record.reason < len(REASONS) else "unknown"
    waited = max(record.end - record.begin, 0) / 1e6
    return (
        f"pk: kernel ? (id {record.kernel}) gave up on rank {record.rank}: reason {record.reason} ({reason}), "
        f"slot {slot}, block {record.block}, site {record.site}, index {record.flat}, "
        f"seen {record.seen}, needed {record.needed}, "
        f"peer {record.peer}, gen {record.gen}, hash {record.hash_mine:08x}/{record.hash_theirs:08x}, "
        f"tile [{', '.join(map(str, record.tile))}], waited {waited:.3f} ms\n"
    )


def test_reads_a_record_as_python_does(pipe) -> None:
    fd, read = pipe
    page = Page()
    rng = random.Random(0)
    for slot in range(SLOTS):
        page.fill(slot, bytes(rng.choice((rng.randrange(256), 0, 255)) for _ in range(SLOT - 4)))
    assert watch(page, fd).poll() == SLOTS
    found = records.read(page.bytes())
    assert len(found) == SLOTS
    for slot, (line, record) in enumerate(zip(read().splitlines(keepends=True), found, strict=True)):
        assert line == line_of(slot, record)


class Context:
    """As much of ``pk.runtime.context.Context`` as the watchdogs use, over a page in ordinary memory."""

    def __init__(self, page: Page) -> None:
        self.host_page, self.incarnation, self.reports = page.address, 0, 0
        self._page = page

    def findings(self) -> list[records.Finding]:
        return [records.describe(record, []) for record in records.read(self._page.bytes())]

    def report(self, *_: object) -> None:
        self.reports += 1


@pytest.mark.parametrize("twin", ["native", "python"])
def test_both_watchdogs_say_once_what_a_page_holds(twin: str, pipe, capfd: pytest.CaptureFixture[str]) -> None:
    fd, read = pipe
    page = Page()
    context = Context(page)
    if twin == "native":
        w = watch(page, fd)
        look, said = w.poll, read
    else:
        seen: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()
        look, said = lambda: watching.look(context, seen), lambda: capfd.readouterr().err

    look()
    assert said() == ""
    page.post(5, seen=-1, needed=2)
    look()
    text = said()
    assert text.startswith("pk: kernel ")
    assert text.count("\n") == 1
    for what in ("rank 1", "-1", "2"):
        assert what in text
    look()
    assert said() == "", "once is enough"

    page.clear(5)  # pk.reset()
    context.incarnation += 1
    look()
    assert said() == ""
    page.post(5)
    look()
    assert said().startswith("pk: kernel ")


def test_the_runtime_starts_the_native_watchdog_and_stops_it_before_the_page_goes(capfd) -> None:
    page = Page()
    context = Context(page)
    watching.add(context)
    guard = watching._guards[context]
    assert guard.running
    watching.name(context, 3, "gemm")
    page.post(5)
    until(lambda: "rank 1 waited" in capfd.readouterr().err)  # Python's words, not the raw record
    watching.remove(context)
    assert not guard.running
    assert guard.reported == 0
    assert context not in watching._guards


def test_what_python_reported_in_time_is_not_reported_again(pipe) -> None:
    fd, read = pipe
    page = Page()
    w = watch(page, fd, grace_ms=3_600_000)
    page.post(5)
    assert w.poll() == 0  # Python's turn
    w.acknowledge()
    now = watch(page, fd, grace_ms=0)
    now.acknowledge()
    assert now.poll() == 0
    assert read() == ""
    page.post(6)
    assert now.poll() == 1
    assert read() == LINE.format(slot=6)


def test_what_python_did_not_report_in_time_is_reported(pipe) -> None:
    fd, read = pipe
    page = Page()
    w = watch(page, fd, grace_ms=20)
    page.post(5)
    assert w.poll() == 0
    w.start()
    until(lambda: w.reported == 1)
    w.stop()
    assert read() == LINE.format(slot=5)


def test_reports_while_the_gil_is_held(pipe) -> None:
    fd, read = pipe
    page = Page()
    w = watch(page, fd)
    w.start()
    hold = ctypes.PyDLL(None).usleep  # PyDLL keeps the GIL, unlike CDLL
    page.post(5)
    for _ in range(200):  # 10 s at most, without ever giving the GIL away on purpose
        hold(50_000)
        text = read()
        if text:
            break
    w.stop()
    assert text == LINE.format(slot=5)


def test_a_record_that_arrives_with_the_order_to_stop_is_reported(pipe) -> None:
    fd, read = pipe
    page = Page()
    w = watch(page, fd, interval_ms=3_600_000)  # stop must not wait for the next look
    w.start()
    page.post(1)
    w.stop()
    assert w.reported == 1
    assert read() == LINE.format(slot=1)
    w.start()
    assert w.running
    w.stop()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 16, 10, 0, 2), "address must be a multiple of 8 and not 0"),
        ((12, 16, 10, 0, 2), "address must be a multiple of 8 and not 0"),
        ((4096, 0, 10, 0, 2), "slots must be 1 to 64, not 0"),
        ((4096, 65, 10, 0, 2), "slots must be 1 to 64, not 65"),
        ((4096, 16, 0, 0, 2), "interval_ms must be at least 1"),
    ],
)
def test_values_that_cannot_work(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        native.native().Watch(*arguments)


EXIT = """
import ctypes, os, sys
from pk.runtime import native
page = (ctypes.c_uint64 * 256)()
w = native.native().Watch(ctypes.addressof(page), 16, 3_600_000)
w.start()
if sys.argv[1] == "fork":  # the child has the object but not the thread
    child = os.fork()
    if child == 0:
        assert not w.running
        w.stop()
        w.start()
        assert w.running
        sys.exit(0)  # joins its own thread
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
if sys.argv[1] == "error":
    raise SystemExit(3)
page[0] = 1
print("end", flush=True)
"""


@pytest.mark.parametrize(("how", "code"), [("return", 0), ("error", 3), ("fork", 0)])
def test_interpreter_exit_joins_the_thread(how: str, code: int) -> None:
    command = [sys.executable, "-c", EXIT, how]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    if code == 0:
        assert done.stdout == "end\n"
        assert "pk: kernel ? (id 0) gave up on rank 0: reason 0 (none), slot 0," in done.stderr


def test_switched_off() -> None:
    with env.overriding(PK_NATIVE="0"):
        assert native.native() is None
        assert native.reason() == "PK_NATIVE=0 is set"
    with env.overriding(PK_NATIVE="require"):  # left over from a build
        assert native.native() is not None
    assert native.native() is not None
    assert native.reason() == ""

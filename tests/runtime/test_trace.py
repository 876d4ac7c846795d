"""``pk.trace``: what the device notes, what the host makes of it, and what users are told when it cannot be."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pk
from pk import tracing
from pk.artifact import Site
from pk.codegen import generate
from pk.errors import ArgumentError, BackendError, TraceError
from pk.ops import parallel_kernels
from pk.runtime import symm
from pk.runtime import tracing as device
from pk.runtime.compile import compile
from pk.runtime.context import CONTEXT_BYTES
from pk.runtime.group import Group
from pk.runtime.launch import Call, launch
from pk.timeline import Launch, Row, Span, Timeline
from tests.runtime.fake import FakeDriver, FakeModule, source
from tests.runtime.test_launch import SIGNALS, A

INCLUDE = Path(pk.__file__).parent / "include"
FILL = Site("loader", "fill", "inputs", "k.py", 12, "with inputs.fill() as s:")
WAIT = Site("loader", "wait", "ready", "k.py", 14, "pk.wait(ready, m, 1)")
ENTRY = Site("launch", "entry", "every rank has begun", "", 0, "")
SITES = (FILL, WAIT, ENTRY)

# ---------------------------------------------------------------------------------------------------- the device's part
STUBS = {
    "pk/comm/context.cuh": """
#pragma once
#include <cstdint>
#include <cstdio>
#define PK_DEVICE inline
namespace pk {
using u32 = uint32_t; using s32 = int32_t; using u64 = uint64_t;
struct context { u64 trace; u32 trace_notes; };
}
struct { unsigned x; } blockIdx;
""",
    "pk/ptx/misc.cuh": """
#pragma once
namespace pk {
inline u32 cycles = 0xfffffff0u;  // the clock's low word is about to turn
inline u32 clock_low() { return cycles += 10; }
inline u64 global_timer() { return 1796000000000000001ull + 2 * u64(u32(cycles - 0xfffffff0u)); }
}
""",
}
MAIN = """
#include "pk/comm/trace.cuh"
#include <cstdlib>
#include <initializer_list>
using namespace pk;
int main(int argc, char** argv) {
    const u32 room = atoi(argv[1]);
    static trace_note notes[2 * trace_logs * 64];
    const context ctx = {reinterpret_cast<u64>(notes), room};
    blockIdx.x = 1;
    trace_log log, silent;
    silent.open(ctx, false, 0);
    log.open(ctx, true, 0);
    for (trace_log* l : {&silent, &log}) {
        const int first[4] = {3, 70000 & 0xffff, 0, 0}, second[4] = {4, 1, 2, 5};
        l->task(2, first);
        for (int i = 0; i < 3; ++i) l->passed(l->comes(0, i));
        l->passed(l->comes(1, 7));
        l->passed(l->comes(0, 0));
        l->task(4, second);
        l->passed(l->comes(0, 1));
        l->close();
    }
    if (argc > 2) {  // the block joins
        trace_log again;
        again.open(ctx, true, 0);
        again.passed(again.comes(1, 2));
        again.close();
    }
    fwrite(notes, sizeof(trace_note), 2 * trace_logs * room, stdout);
}
"""


@pytest.fixture(scope="module")
def noted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs the device's log on the host, and returns its notes as an array (blocks, logs, notes)."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("trace")
    for name, text in {**STUBS, "main.cpp": MAIN}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    flags = ["-std=c++17", "-DPK_TRACE", f"-I{folder}", f"-I{INCLUDE}"]
    subprocess.run([compiler, *flags, folder / "main.cpp", "-o", folder / "main"], check=True)

    def run(room: int, *joins: str) -> Any:
        done = subprocess.run([folder / "main", str(room), *joins], check=True, capture_output=True)
        return np.frombuffer(done.stdout, device._NOTE).reshape(2, device.LOGS, room)

    return run


def test_the_device_notes_sites_tasks_and_waits(noted: Any) -> None:
    logs = noted(64)
    assert [tuple(at) for at in np.argwhere(logs["begin"][:, :, 0])] == [(1, 0)]  # the silent thread wrote nothing
    log = logs[1, 0]
    count, lost = int(log[0]["begin"]), int(log[0]["waited"])
    assert (count, lost) == (1 + 8, 0)
    row = device.row(log[1:count], SITES, 0, 1, 0)
    assert row.role == "loader"
    assert [task for _, task in row.tasks] == [(3, 70000 & 0xFFFF), (4, 1, 2, 5)]
    assert [(s.site, s.task, s.index) for s in row.spans] == [
        (FILL, (3, 4464), 0), (WAIT, (3, 4464), 7), (FILL, (3, 4464), 0), (FILL, (4, 1, 2, 5), 1),
    ]  # fmt: skip
    # Each read of the clock takes 10 cycles of 2 ns: three passes of the first site are one span.
    assert [s.waited for s in row.spans] == [60, 20, 20, 20]
    assert [s.end - s.begin for s in row.spans] == [120, 40, 40, 40]
    assert row.begin == 1796000000000000001 and row.end - row.begin == 2 * 10 * 15


def test_a_block_that_joins_has_two_rows(noted: Any) -> None:
    for room, rows in ((64, 2), (10, 1), (5, 1)):
        log = noted(room, "joins")[1, 0]
        found = [device.row(p, SITES, 0, 1, 0) for p in device.parts(log[1 : int(log[0]["begin"])])]
        assert len(found) == rows
        assert found[0].role == "loader"
        assert all(r.begin <= s.begin <= s.end <= r.end for r in found for s in r.spans)
    first, second = (device.row(p, SITES, 0, 1, 0) for p in device.parts(noted(64, "joins")[1, 0][1:12]))
    assert len(first.spans) == 4
    assert [(s.site, s.index) for s in second.spans] == [(WAIT, 2)]
    assert first.end < second.begin


def test_notes_without_room_are_counted_and_the_end_is_kept(noted: Any) -> None:
    log = noted(5)[1, 0]
    count, lost = int(log[0]["begin"]), int(log[0]["waited"])
    assert (count, lost) == (5, 4)
    row = device.row(log[1:count], SITES, 0, 1, 0, lost)
    assert row.lost == 4 and len(row.spans) == 1 and row.end > row.spans[0].begin


def test_kernels_are_compiled_with_notes_and_without_spills() -> None:
    program = parallel_kernels.matmul_reduce_scatter_ordered.specialise(a=pk.spec("bfloat16", 3))
    plain, traced = generate(program.ir), generate(program.ir, trace=True)
    assert traced.trace and not plain.trace
    texts = [[line for line in s.text.splitlines() if not line.startswith("#line")] for s in (plain, traced)]
    assert [line for line in texts[1] if line not in texts[0]] == ["#define PK_TRACE"]
    assert compile(traced).resources.spill_bytes == 0


# ------------------------------------------------------------------------------------------------------ the host's part
def span(site: Site, begin: int, end: int, waited: int = 0) -> Span:
    return Span(site, begin, end, waited)


def row(rank: int, begin: int, end: int, *spans: Span, role: str = "loader", block: int = 0, **more: Any) -> Row:
    return Row(rank, block, role, begin, end, spans, **more)


def test_clocks_of_two_gpus_meet_where_the_ranks_begin() -> None:
    def launches(offset: int, begins: list[int]) -> list[tuple[str, list[Row]]]:
        found = []
        for begin, known in zip(begins, (1000, 5000, 9000), strict=True):
            entry = span(ENTRY, offset + begin, offset + known + 50, known - begin)
            late = span(ENTRY, offset + begin, offset + known + 90, known + 40 - begin)
            rows = [
                row(int(offset != 0), offset + begin, offset + known + 600, entry, role="launch"),
                row(int(offset != 0), offset + begin, offset + known + 700, late, role="launch", block=1),
            ]
            found.append(("k", rows))
        return found

    merged = tracing.merged([("a", launches(0, [0, 4000, 8900])), ("b", launches(123456, [900, 4900, 8000]))])
    assert [launch.number for launch in merged] == [0, 1, 2]
    assert [min(r.begin for r in launch.rows) for launch in merged] == [0, 0, 0]
    begins = [[r.begin for r in launch.rows if r.block == 0] for launch in merged]
    assert begins == [[0, 900], [0, 900], [900, 0]]
    same = tracing.merged([("a", launches(0, [0, 4000, 8900])), ("a", launches(123456, [900, 4900, 8000]))])
    assert [r.begin for r in same[0].rows if r.block == 0] == [0, 124356]  # one clock: nothing to align


def test_ranks_may_differ_in_what_meets_no_other() -> None:
    mine, other = [row(0, 0, 5)], [row(1, 0, 7)]
    merged = tracing.merged([("a", [("k", mine)]), ("a", [("local", other), ("k", other)])])
    assert [(launch.kernel, [r.rank for r in launch.rows]) for launch in merged] == [("k", [0, 1]), ("local", [1])]


def example() -> Timeline:
    rows = [
        row(0, 0, 1000, span(FILL, 0, 600, 500), span(WAIT, 600, 1000, 300), tasks=((10, (1, 2)), (600, (1, 3)))),
        row(0, 0, 800, span(FILL, 0, 800, 100), block=1, lost=3),
        row(0, 0, 100, span(ENTRY, 0, 100, 90), role="launch"),
        row(1, 0, 1000, span(FILL, 0, 1000, 5)),
    ]
    return Timeline([Launch("k", 0, rows), Launch("k", 1, rows)], missed=2)


def test_the_table_says_what_roles_wait_for() -> None:
    text = str(example())
    assert (
        "k, launch 1, rank 0: 2 blocks, 1.0 us; blocks end 0.2 us before the last at most, 10.0 % of their time" in text
    )
    assert "loader                  50 %  inputs.fill:12 33.3 %; ready.wait:14 16.7 %" in text
    assert "launch                  10 %  every rank has begun 90.0 %" in text
    assert "loader                 100 %  -" in text  # rank 1 waits for half a percent
    assert "3 notes found no room" in text
    assert "2 more launches found no room: pk.trace(launches=4) keeps them all" in text
    assert str(Timeline()) == "no launch was recorded"


def test_the_file_holds_every_event(tmp_path: Path) -> None:
    path = tmp_path / "timeline.json"
    example().save(path)
    events = json.loads(path.read_text())["traceEvents"]
    named = [e["args"]["name"] for e in events if e["name"] == "thread_name"]
    assert named == ["block 0 launch", "block 0 loader", "block 1 loader", "block 0 loader"]
    spans = [e for e in events if e["ph"] == "X"]
    assert {e["pid"] for e in spans} == {0, 1}
    first = next(e for e in spans if e["name"] == "ready.wait:14")
    assert (first["ts"], first["dur"], first["args"]["waited_us"]) == (0.6, 0.4, 0.3)
    assert first["args"]["text"] == "pk.wait(ready, m, 1)"
    tasks = [(e["name"], e["ts"], e["dur"]) for e in spans if e["name"].startswith("task") and e["ts"] < 1]
    assert tasks == [("task 1, 2", 0.01, 0.59), ("task 1, 3", 0.6, 0.4)]
    assert max(e["ts"] for e in spans) == 2.6  # the second launch stands apart
    with pytest.raises(TraceError, match="cannot be written"):
        example().save(tmp_path / "none" / "timeline.json")


# ------------------------------------------------------------------------------------------------------------- launches
PARTS = {"parts": ((8, 64), torch.float32)}


def request(group: Group, trace: bool) -> Call:
    made = replace(source(), trace=trace)
    c = symm.empty((64, 128), torch.bfloat16, group)
    return Call(group, made, FakeModule(made), {"a": A, "c": c}, {"n": 1, "x": 0.5}, SIGNALS, PARTS, f"k {trace}")


def rooms(group: Group) -> list[tuple[int, int]]:
    """Notes and address of each launch so far."""
    assert isinstance(group.driver, FakeDriver)
    offset = next(f.offset for f in source().fields if f.kind == "context") + CONTEXT_BYTES - 12
    return [struct.unpack_from("<IQ", data, offset) for *_, data in group.driver.launches]


def test_each_launch_has_room_of_its_own(solo: Group) -> None:
    call = request(solo, True)
    with pk.trace(launches=2, notes=16, group=solo) as timeline:
        assert solo.tracer is not None
        for _ in range(3):
            launch(call)
    (notes, first), (_, second), (_, third) = rooms(solo)
    assert notes == 16 and first and third == 0
    assert second - first == solo.sms * device.LOGS * 16 * device.NOTE_BYTES
    assert timeline.missed == 1 and [t.kernel for t in timeline.launches] == ["gather", "gather"]
    assert "gather, launch 1: no notes" in str(timeline)  # the fake machine runs nothing
    assert solo.tracer is None
    launch(call)
    assert rooms(solo)[-1] == (0, 0)  # the same packed launch, after the trace


def test_the_room_is_given_back_whatever_happens(solo: Group) -> None:
    assert isinstance(solo.driver, FakeDriver)
    launch(request(solo, False))
    left = solo.driver.memory_left
    with pytest.raises(ZeroDivisionError), pk.trace(notes=16, group=solo):
        raise ZeroDivisionError
    assert solo.tracer is None and solo.driver.memory_left == left
    solo.driver.memory_left = 1 << 20
    with pytest.raises(BackendError, match="OUT_OF_MEMORY"), pk.trace(group=solo):
        pass
    assert solo.tracer is None


def test_a_launch_that_is_captured_is_refused(solo: Group) -> None:
    assert isinstance(solo.driver, FakeDriver)
    call = request(solo, True)
    launch(call)
    with pk.trace(notes=16, group=solo):
        solo.driver.captured.add(100)
        with pytest.raises(BackendError, match="CUDA graph is captured"):
            launch(call)
        solo.driver.captured.clear()


def test_mistakes_are_named(solo: Group, tmp_path: Path) -> None:
    for wrong in ({"launches": 0}, {"notes": 2.5}, {"launches": True}, {"notes": 1 << 21}):
        with (
            pytest.raises(ArgumentError, match=r"pk.trace: \w+=.* is not a whole number"),
            pk.trace(**wrong, group=solo),
        ):  # type: ignore[arg-type]
            pass
    with pytest.raises(TraceError, match="does not exist"), pk.trace(tmp_path / "none" / "t.json", group=solo):
        pass
    with pk.trace(notes=16, group=solo), pytest.raises(TraceError, match="already on"), pk.trace(group=solo):
        pass
    with pytest.raises(TraceError, match="simulated"), pk.trace(group=Group(0, 1, "sim")):
        pass

"""The plan: warps, arrivals, shared memory, tensor maps, sites."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from pk.codegen import generate
from pk.codegen.layout import box, swizzle
from pk.codegen.plan import plan
from pk.codegen.sites import site_names
from pk.errors import NotConstant
from pk.ir import nodes as ir
from pk.ir.types import Tile, bfloat16, float32
from tests.codegen.test_compile import ODD, source_of
from tests.codegen.test_text import kernel_of


def test_warps_of_roles() -> None:
    made = plan(kernel_of("all_gather_matmul"))
    assert made.threads == 384
    assert made.registers == (232, 40)
    assert {r.kind: (r.first_warp, r.warps) for r in made.compute.roles} == {
        "loader": (8, 1), "consumer": (0, 8), "storer": (9, 1),
    }  # fmt: skip
    assert made.communicator is not None
    assert {r.kind: (r.first_warp, r.warps) for r in made.communicator.roles} == {"loader": (8, 1), "storer": (9, 1)}
    assert made.launch_warp == 10
    assert made.comm_sms == 8


@pytest.mark.parametrize(
    ("name", "threads", "registers"),
    [
        ("one warpgroup", 256, (0, 0)),
        ("three warpgroups", 512, (152, 56)),
        ("broadcast", 128, (0, 0)),
        ("team", 384, (0, 0)),
    ],
)
def test_threads_and_register_split(name: str, threads: int, registers: tuple[int, int]) -> None:
    made = plan(ODD[name])
    assert (made.threads, made.registers) == (threads, registers)
    consumer, others = registers
    groups = threads // 128
    # setmaxnreg only moves registers inside the block's pool, and waits for what is not there.
    assert (groups - 1) * consumer + others <= 65536 // threads // 8 * 8 * groups


def test_arrivals() -> None:
    rings = {p.name: p for c in plan(kernel_of("all_gather_matmul")).classes for p in c.pipelines}
    assert (rings["inputs"].filler, rings["inputs"].drainer) == ("loader", "consumer")
    assert (rings["inputs"].full_arrivals, rings["inputs"].empty_arrivals) == (1, 8)
    assert (rings["output"].full_arrivals, rings["output"].empty_arrivals) == (8, 1)
    assert (rings["ring"].full_arrivals, rings["ring"].empty_arrivals) == (1, 1)


def test_tiles_start_at_multiples_of_1024() -> None:
    for kernel in ODD.values():
        for c in plan(kernel).classes:
            for p in c.pipelines:
                assert p.offset % 1024 == 0
                assert all(
                    (p.offset + s * p.stage_bytes + t.offset) % 1024 == 0 for s in range(p.stages) for t in p.tiles
                )


def test_shared_memory_is_the_larger_class_and_a_kilobyte() -> None:
    made = plan(kernel_of("all_gather_matmul"))
    assert [c.tile_bytes for c in made.classes] == [4 * 49152 + 2 * 16384, 3 * 65536]
    assert made.shared_bytes == 4 * 49152 + 2 * 16384 + 1024


@pytest.mark.parametrize(
    ("shape", "dtype", "ndim", "expected", "width"),
    [
        ((128, 64), bfloat16, 2, (128, 64), 128),
        ((64, 256), bfloat16, 3, (1, 64, 64), 128),
        ((128, 32), bfloat16, 2, (128, 32), 64),
        ((128, 16), bfloat16, 2, (128, 16), 32),
        ((128, 24), bfloat16, 2, (128, 24), 0),
        ((64, 64), float32, 2, (64, 32), 128),
        ((320, 64), bfloat16, 3, (1, 160, 64), 128),
        ((512, 64), bfloat16, 4, (1, 1, 256, 64), 128),
    ],
)  # fmt: skip
def test_boxes(shape: tuple[int, int], dtype: object, ndim: int, expected: tuple[int, ...], width: int) -> None:
    tile = Tile(shape, dtype, "shared")  # type: ignore[arg-type]
    assert (box(tile, ndim), swizzle(tile)) == (expected, width)


def test_maps_of_every_rank_only_where_another_rank_is_touched() -> None:
    maps = {m.name: m for m in plan(kernel_of("matmul_reduce_scatter")).maps}
    assert {name: m.everyone for name, m in maps.items()} == {"a_map": False, "b_map": False, "c_maps": True}
    assert maps["a_map"].box == (1, 128, 64)


def test_exit_words_only_where_a_user_tensor_is_touched_remotely() -> None:
    assert source_of("matmul_reduce_scatter").remote
    assert generate(ODD["broadcast"]).remote
    assert not source_of("all_gather_matmul").remote  # scratch
    assert not source_of("matmul").remote


def test_outputs_and_signals() -> None:
    assert source_of("matmul_reduce_scatter").outputs == ("c",)
    assert source_of("all_gather_matmul").outputs == ("c",)
    assert source_of("matmul_reduce_scatter").uses_signals
    assert not source_of("matmul").uses_signals


def test_sites_name_the_place() -> None:
    source = source_of("matmul_reduce_scatter")
    wait = next(s for s in source.sites if s.op == "wait")
    assert (wait.role, wait.what) == ("storer", "begun")
    assert wait.file.endswith("kernels.py")
    line = Path(wait.file).read_text().splitlines()[wait.line - 1].strip()
    assert line == wait.text == "pk.wait(begun, (owner, m, n), 1)"
    for number, name in enumerate(site_names(source.sites)):
        assert f"{name} = {number}," in source.text
    assert [s.op for s in source.sites[-2:]] == ["entry", "exit"]


def test_waits_of_shared_code_are_sites_of_every_role() -> None:
    roles = {s.role for s in plan(ODD["epilogue"]).sites if s.op == "assert"}
    assert roles == {"loader", "consumer", "storer"}


def test_number_of_communicator_sms_must_be_known() -> None:
    kernel = kernel_of("all_gather_matmul")
    assert kernel.communicator is not None
    vague = dataclasses.replace(kernel.communicator, sms=ir.Dim("x", 0))
    with pytest.raises(NotConstant, match="communicator SMs"):
        plan(dataclasses.replace(kernel, communicators=(vague,)))

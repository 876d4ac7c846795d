"""The emitted text: goldens, and what holds of every kernel's text."""

from __future__ import annotations

import re
from collections.abc import Callable

import jinja2
import pytest

from pk.artifact import MAX_RANKS
from pk.codegen import generate, readable, render
from pk.codegen.plan import plan
from pk.ir import nodes as ir
from pk.ir import ops
from tests.codegen import odd
from tests.codegen.test_compile import ODD, source_of
from tests.dsl import test_gallery as gallery
from tests.kernels import KERNELS, specs

Golden = Callable[[str, str], None]


def kernel_of(name: str) -> ir.Kernel:
    made: ir.Kernel = KERNELS[name][0].specialise(**specs(name)).ir
    return made


# ---------------------------------------------------------------------------------------------------------- goldens
@pytest.mark.parametrize("name", KERNELS)
def test_cuda(name: str, golden: Golden) -> None:
    golden(f"cuda/{name}.cu", readable(source_of(name).text))


@pytest.mark.parametrize("name", KERNELS)
def test_plan(name: str, golden: Golden) -> None:
    golden(f"plan/{name}.txt", str(plan(kernel_of(name))))


def test_text_does_not_change_from_run_to_run() -> None:
    assert generate(kernel_of("all_gather_matmul")) == generate(kernel_of("all_gather_matmul"))


# -------------------------------------------------------------------------------------------------------- templates
def test_a_template_may_use_no_name_that_nobody_gave_it() -> None:
    with pytest.raises(jinja2.UndefinedError, match="'tile' is undefined"):
        render.environment().from_string("{{ tile }}").render()
    with pytest.raises(jinja2.UndefinedError):
        render.op("load_async")


def test_every_op_has_one_macro() -> None:
    assert render.macros() == set(ops.TABLE)


# ------------------------------------------------------------------------------------------------------ line mapping
def test_lines_of_the_user_are_quoted_and_mapped() -> None:
    text = generate(ODD["epilogue"]).text
    mapped = re.findall(r'^#line (\d+) "kernel\.py"\n(.*)', text, re.MULTILINE)
    user = ["", "import pk", "", *odd.EPILOGUE.strip().splitlines()]
    for number, code in mapped:
        written = user[int(number)].strip()
        assert f"// {written}" in text, (number, code)
    assert len(mapped) > 20


def test_readable_text_has_no_line_directives() -> None:
    text = generate(ODD["team"]).text
    assert "#line" in text
    assert "#line" not in readable(text)


# --------------------------------------------------------------------------------------------------- names, numbers
def test_names_of_cpp_and_of_the_headers_are_left_alone() -> None:
    text = readable(generate(ODD["branches"]).text)
    for declared in ("const int role_ = at[0];", "const int task_ = at[1];", "const int wait_ = role_ + p.new_;"):
        assert declared in text
    assert "pipeline<2> user_launch_ring;" in text
    assert "auto& shared_ = shared.user_launch[user_launch_at.stage];" in text


def test_division_is_floored_where_a_side_may_be_negative() -> None:
    text = generate(ODD["epilogue"]).text
    assert "floor_mod(m - p.shift, rows)" in text
    assert "ceil_div(p.x_rows, 64)" in text
    assert "i % 2 == 0" in generate(ODD["team"]).text
    assert "floor_div(i - rows, W - 1)" in source_of("all_gather_matmul").text


def test_user_names_survive_the_front_ends_numbering() -> None:
    text = source_of("all_gather_matmul").text
    assert "const int m = own ? i : floor_div(i - rows, W - 1);" in text
    assert "m_1" not in text


def test_every_member_is_found_by_its_key() -> None:
    source = source_of("all_gather_matmul")
    keys = {f.name: (f.kind, f.key) for f in source.fields}
    assert keys["x_map"] == ("map", "x")
    assert keys["full_maps"] == ("maps", "full")
    assert keys["ctx"] == ("context", "")
    assert keys["c"] == ("pointer", "c")
    assert keys["x_rows"] == ("int", "x.0")
    assert keys["c_stride_depth"] == ("int", "c.stride.0")
    assert keys["ready_offset"] == ("int", "ready.offset")
    assert keys["ready_shape_1"] == ("int", "ready.1")


def test_fields_follow_each_other_without_a_gap() -> None:
    for name in KERNELS:
        source, at = source_of(name), 0
        for f in source.fields:
            assert f.offset == at, f.name
            assert f.size == {"maps": 128 * MAX_RANKS, "map": 128, "context": 128, "pointer": 8}.get(f.kind, 4)
            at += f.size
        assert source.params_size == -(-at // 64) * 64


def test_run_time_scalars_are_members() -> None:
    source = generate(ODD["epilogue"])
    assert [(f.name, f.kind) for f in source.fields if f.key in ("scale", "shift")] == [
        ("shift", "int"),
        ("scale", "float"),
    ]


# ------------------------------------------------------------------------------------------------ order of the text
def test_ranks_meet_before_the_first_remote_access_of_each_role() -> None:
    text = source_of("matmul_reduce_scatter").text
    meet, add = text.index("deferred.meet(role, SITE_C_STORE_ADD_ASYNC)"), text.index("store_add_async(p.c_maps")
    assert meet < add
    assert text.count("meet(role") == 1  # the other adds of the task come after it
    assert not re.search(r"meet\(role|enter\(role", source_of("matmul").text)


def test_own_copy_of_a_parallel_needs_no_meeting() -> None:
    """``full[me]`` in the loader, with ``me`` a name for the rank, is this rank's memory."""
    text = readable(source_of("all_gather_matmul").text)
    loader = text[text.index("void loader(") : text.index("void consumer(")]
    assert "p.full_maps[me]" in loader
    assert "enter(" not in loader


def test_a_stage_is_free_before_its_role_may_block_elsewhere() -> None:
    text = readable(source_of("matmul_reduce_scatter").text)
    lines = [line.strip() for line in text[text.index("void storer(") :].splitlines()]
    end = lines.index("shared.output_ring.finish_stores(output_at);")  # the next task may wait
    assert lines[end + 1] == "}"
    assert any(line.startswith("wait(role") for line in lines[:end])


def test_accumulator_is_read_after_its_mma_has_finished() -> None:
    text = readable(source_of("matmul").text)
    assert text.index("finish_mma(inputs_at, acc)") < text.index("columns<0, 64>(acc)")
    branches = readable(generate(ODD["branches"]).text)
    assert branches.index("mma_finish(more)") < branches.index("acc = acc + more")


def test_the_count_of_tasks_runs_on() -> None:
    text = readable(generate(gallery.kernel("decode_matmul_all_reduce")).text)
    consumer = text[text.index("void consumer(") : text.index("void storer(")]
    assert consumer.index("for (; task < tasks;") < consumer.index("task -= tasks;") < consumer.index("task < tasks_")


def test_a_name_bound_in_a_stage_lives_after_it() -> None:
    text = readable(generate(ODD["epilogue"]).text)
    declared, stage = text.index("linear_tile<float, 64, 64, 4, 1> first;"), text.index("{  // with held.drain() as q:")
    assert declared < stage < text.index("load(first, q.q, role)")

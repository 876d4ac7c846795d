"""One operation, three tables: its row in the IR, its meaning in the simulator, its macro in the templates."""

from __future__ import annotations

import pk.dsl.language
from pk.codegen import render
from pk.ir import ops
from pk.ir.rules import spelled
from pk.sim.ops import MEANING

KINDS = {"shared", "register", "memory", "signal", "scalar", "factor", "value"}


def test_the_simulator_means_every_op_and_no_other() -> None:
    assert sorted(MEANING) == sorted(ops.TABLE)


def test_the_templates_have_a_macro_for_every_op_and_no_other() -> None:
    assert sorted(render.macros()) == sorted(ops.TABLE)


def test_rows_are_well_formed() -> None:
    for name, row in ops.TABLE.items():
        assert row.name == name
        assert set(row.operands) <= KINDS, name
        assert row.roles and row.roles <= ops.ALL, name
        assert all(0 <= p < len(row.operands) for p in (*row.reads, *row.writes)), name
        assert row.within in (None, "fill", "drain"), name
        assert row.summary and not row.summary.endswith("."), name


# Ops that the user writes in another way than by calling a function of the op's name.
WRITTEN_OTHERWISE = {"columns": "a slice of a register tile"}


def test_the_language_documents_every_op() -> None:
    for name in ops.TABLE:
        if name not in WRITTEN_OTHERWISE:
            function = getattr(pk.dsl.language, spelled(name), None)  # pk.load has several ops
            assert function is not None, f"pk.dsl.language has no function `{name}`"
            assert function.__doc__, f"pk.{name} has no docstring"

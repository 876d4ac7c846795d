"""What is outside the language is refused with the line, a caret and what to write instead: names, syntax, values."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pk import errors
from tests.dsl.reading import refusal

CASES: dict[str, tuple[type[errors.PkError], str]] = {
    "unknown_name": (errors.UnknownName, "rows = pk.cdiv(c.rows, BN)"),
    "unknown_name_of_pk": (errors.UnknownName, "me = world_size()"),
    "unknown_attribute_of_pk": (errors.UnknownName, "me = pk.world_sise()"),
    "unknown_attribute_of_tensor": (errors.UnknownName, "rows = c.row"),
    "dimension_that_is_not_there": (errors.UnknownName, "batch = c.batch"),
    "unknown_field_of_stage": (errors.UnknownName, """
        p = pk.pipeline(2, x=pk.shared((64, 64), a.dtype))
        with pk.loader():
            with p.fill() as s:
                pk.load_async(s.y, a, (0, 0))
        """),
    "while": (errors.UnsupportedSyntax, "while True:\n    pass"),
    "break": (errors.UnsupportedSyntax, "for m in pk.tasks(c.rows):\n    break"),
    "list_comprehension": (errors.UnsupportedSyntax, "x = [i for i in (1, 2)]"),
    "lambda": (errors.UnsupportedSyntax, "f = lambda x: x"),
    "import": (errors.UnsupportedSyntax, "import math"),
    "annotation": (errors.UnsupportedSyntax, "x: int = 3"),
    "store_by_subscript": (errors.UnsupportedSyntax, "c[0] = 3"),
    "python_function": (errors.UnsupportedSyntax, "x = plain(3)"),
    "print": (errors.UnsupportedSyntax, "print(c.rows)"),
    "dropped_value": (errors.UnsupportedSyntax, "c.rows + 1"),
    "power": (errors.UnsupportedSyntax, "x = c.rows ** 2"),
    "matmul_operator": (errors.UnsupportedSyntax, "x = a @ b"),
    "return_value": (errors.UnsupportedSyntax, "return c"),
    "return_in_branch": (errors.UnsupportedSyntax, "x = early(c.rows)"),
    "recursion": (errors.UnsupportedSyntax, "x = again(c.rows)"),
    "return_in_tasks": (errors.UnsupportedSyntax, "for m in pk.tasks(c.rows):\n    n = m\n    return"),
    "return_in_role": (errors.UnsupportedSyntax, "with pk.storer():\n    return"),
    "too_deep": (errors.UnsupportedSyntax, f"x = c.rows\ny = (\n    {' + '.join('x' * 400)}\n    )"),
    "continue_in_role": (errors.UnsupportedSyntax, """
        with pk.storer():
            for m in pk.range(c.rows):
                if m > 3:
                    continue
        """),
    "continue_deep": (errors.UnsupportedSyntax, """
        for m in pk.tasks(c.rows):
            if m > 3:
                if m > 5:
                    continue
            n = m + 1
        """),
    "with_on_something": (errors.UnsupportedSyntax, "with pk.rank():\n    pass"),
    "cluster_of_three": (errors.WrongOperand, "for m, n in pk.tasks(c.rows, c.cols, cluster=3):\n    pass"),
    "cluster_of_one_extent": (errors.WrongOperand, "for m in pk.tasks(c.rows, cluster=2):\n    pass"),
    "cluster_of_odd_group": (
        errors.WrongOperand,
        "for m, n in pk.tasks(c.rows, c.cols, cluster=2, group=3):\n    pass",
    ),
    "cluster_that_claims": (
        errors.WrongOperand, "for m, n in pk.tasks(c.rows, c.cols, cluster=2, dynamic=True):\n    pass"
    ),
    "static_and_dynamic": (
        errors.WrongOperand, "for m in pk.tasks(c.rows):\n    pass\nfor m in pk.tasks(c.rows, dynamic=True):\n    pass"
    ),
    "dynamic_at_run_time": (errors.NotConstant, "for m in pk.tasks(c.rows, dynamic=c.cols > 3):\n    pass"),
    "while_of_stages": (errors.Unbalanced, """
        p = pk.pipeline(2, x=pk.shared((64, 64), a.dtype))
        i = 0
        for m in pk.tasks(c.rows):
            with pk.loader():
                while i < m:
                    with p.fill() as s:
                        pk.load_async(s.x, a, (m, 0))
                    i = i + 1
            with pk.storer():
                while i < m:
                    with p.drain() as s:
                        pass
                    i = i + 1
        """),
    "while_shadowed": (errors.UnsupportedSyntax, "n = c.rows\nwhile n > 3:\n    for n in pk.range(3):\n        pass"),
    "choice_of_parallel": (errors.WrongOperand, "x = a if c.rows > 3 else c"),
    "choice_of_dimensions": (errors.WrongOperand, "t = pk.scratch((4, 4, 4), a.dtype)\nx = a if c.rows > 3 else t[0]"),
    "pingpong_signals": (errors.WrongRole, """
        done = pk.signals()
        for m in pk.tasks(c.rows):
            with pk.consumer(warpgroups=2, pingpong=True):
                pk.signal(done, (), 0)
        """),
    "pingpong_carries": (errors.WrongRole, """
        p = pk.pipeline(2, x=pk.shared((64, 64), a.dtype))
        n = 0
        for m in pk.tasks(c.rows):
            with pk.loader():
                for i in pk.range(n):
                    with p.fill() as s:
                        pk.load_async(s.x, a, (m, 0))
            with pk.consumer(warpgroups=2, pingpong=True):
                for i in pk.range(n):
                    with p.drain() as s:
                        t = pk.load(s.x)
            n = n + 1
        """),
    "pingpong_outside_tasks": (errors.WrongRole, "with pk.consumer(warpgroups=2, pingpong=True):\n    pass"),
    "pingpong_and_stagger": (
        errors.WrongOperand, "with pk.consumer(warpgroups=2, pingpong=True, stagger=True):\n    pass"
    ),
    "name_of_loop": (errors.NameOutOfScope, "for m in pk.range(c.rows):\n    n = m\nx = n"),
    "name_of_branch": (errors.NameOutOfScope, "if c.rows > 3:\n    x = c.cols\ny = x"),
    "name_of_role": (errors.NameOutOfScope, """
        with pk.loader():
            x = c.rows + 1
        with pk.storer():
            y = x
        """),
    "name_of_other_class": (errors.NameOutOfScope, """
        for m in pk.range(3):
            pass
        x = c.rows + 1
        with pk.communicator(sms=2):
            y = x
        """),
    "scalar_changes_type": (errors.NameChangesType, "x = c.rows + 1\nx = x * 0.5"),
    "tile_changes_shape": (errors.NameChangesType, """
        with pk.consumer():
            acc = pk.zeros((64, 64))
            acc = acc[:, 0:32]
        """),
    "tuple_in_loop": (errors.NameChangesType, "x = (1, 2)\nfor m in pk.range(c.rows):\n    x = (m, m)"),
    "stale_tuple": (errors.NameChangesType, "x = c.rows + 1\nt = (x, 0)\nx = c.cols"),
    "run_time_tile_shape": (errors.NotConstant, "p = pk.pipeline(2, x=pk.shared((64, c.cols), c.dtype))"),
    "run_time_columns": (errors.NotConstant, """
        with pk.consumer():
            acc = pk.zeros((64, 64))
            for j in pk.range(8):
                x = acc[:, j * 8 : (j + 1) * 8]
        """),
    "run_time_signals": (errors.NotConstant, "for m in pk.range(3):\n    pass\nn = c.rows + 1\nx = pk.signals(n)"),
    "signals_of_rank": (errors.NotConstant, "x = pk.signals(pk.rank() + 1)"),
    "stale_tile": (errors.NameChangesType, """
        p = pk.pipeline(2, x=pk.shared((64, 64), a.dtype))
        with pk.consumer():
            acc = pk.zeros((64, 64))
            t = (acc, 0)
            with p.drain() as s:
                pk.mma(acc, s.x, s.x)
        """),
    "declaration_in_loop": (errors.WrongDeclaration, "for m in pk.range(3):\n    s = pk.signals(3)"),
    "folded_assert": (errors.WrongOperand, 'assert BM % 96 == 0, "BM must be a multiple of 96"'),
    "unpacking": (errors.WrongOperand, "x, y = (1, 2, 3)"),
    "division_by_zero": (errors.WrongOperand, "x = BM // 0"),
    "loop_over_tensor": (errors.WrongOperand, "for x in a:\n    pass"),
    "missing_argument": (errors.WrongOperand, "x = pk.cdiv(c.rows)"),
    "subscript_of_global": (errors.WrongOperand, "x = a[0]"),
}  # fmt: skip

HELPERS = """
BLOCK = 128

def plain(x):
    return x

@pk.function
def early(x):
    if x > 3:
        return x
    return 0

@pk.function
def again(x):
    return again(x)

@pk.kernel
def k(a: pk.Global, b: pk.Global, c: pk.Parallel, BM: pk.constexpr = 128):
"""


@pytest.mark.parametrize("name", CASES)
def test_refused(name: str, golden: Callable[[str, str], None]) -> None:
    kind, lines = CASES[name]
    golden(f"errors/{name}.txt", refusal(kind, HELPERS + indented(lines)))


def test_the_advice_on_a_return_is_for_helpers_in_a_helper() -> None:
    helper = "@pk.function\ndef first(n):\n    for i in pk.range(n):\n        return i\n"
    text = refusal(errors.UnsupportedSyntax, helper + HELPERS + "    x = first(c.rows)")
    assert "    return i\n    ^^^^^^^^\n  Return once, at the end of the helper.\n" in text


def indented(lines: str) -> str:
    import textwrap

    return textwrap.indent(textwrap.dedent(lines).strip("\n"), "    ")


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("no_annotation", "a: pk.Global, b"),
        ("wrong_annotation", "a: pk.Global, b: str"),
        ("default_of_tensor", "a: pk.Global = 3"),
        ("any_number_of_arguments", "*a: pk.Global"),
    ],
)
def test_parameters_refused(name: str, parameters: str, golden: Callable[[str, str], None]) -> None:
    golden(f"errors/{name}.txt", refusal(errors.WrongDeclaration, f"@pk.kernel\ndef k({parameters}):\n    pass"))

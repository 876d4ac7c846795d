"""Kernels follow what they capture: globals, closures, helpers, attributes, lists and dicts."""

from __future__ import annotations

import importlib.util
import itertools
import math
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import pk
from pk.dsl.captures import Captures

Make = Callable[[str], ModuleType]
_number = itertools.count()

HEAD = """
import math
from types import SimpleNamespace
import pk

Q = 3.0
TABLE = [1.0, 2.0]
NAMED = {"x": 2.0, "deep": [1.0, (2.0, [3.0])]}
cfg = SimpleNamespace(scale=2.0)

@pk.function
def helper(x):
    return x + Q

@pk.function
def outer(x):
    return helper(x)
"""

KERNEL = """
@pk.kernel
def k(c: pk.Global):
    ring = pk.pipeline(1, t=pk.shared((64, 64), c.dtype))
    for m, n in pk.tasks(1, 1):
        with pk.consumer():
            with ring.fill() as s:
                pk.store(s.t, {value})
        with pk.storer():
            with ring.drain() as s:
                pk.store_async(c, s.t, (m, n))
"""


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes a module of a text behind HEAD."""

    def module(text: str) -> ModuleType:
        name = f"captured_{next(_number)}"
        path = tmp_path / f"{name}.py"
        path.write_text(HEAD + textwrap.dedent(text))
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        made = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, made)
        spec.loader.exec_module(made)
        return made

    return module


def value(kernel: pk.Kernel) -> float:
    """What ``kernel`` writes."""
    found: list[float] = []

    def rank(_: int) -> None:
        c = torch.zeros(64, 64)
        kernel(c)
        found.append(float(c[0, 0]))
        assert bool((c == c[0, 0]).all())

    pk.spawn(rank, 1, backend="sim")
    return found[0]


def change_global(m: Any) -> None:
    m.Q = 5.0


def change_list(m: Any) -> None:
    m.TABLE[1] = 7.0


def grow_list(m: Any) -> None:
    m.TABLE.append(4.0)


def change_dict(m: Any) -> None:
    m.NAMED["x"] = 8.0


def change_deep(m: Any) -> None:
    m.NAMED["deep"][1][1][0] = 9.0


def change_attribute(m: Any) -> None:
    m.cfg.scale = 6.0


def change_object(m: Any) -> None:
    m.cfg = type(m.cfg)(scale=11.0)


def change_helper(m: Any) -> None:
    m.helper = m.outer_helper


CASES = [
    ("pk.full((64, 64), Q)", change_global, 3.0, 5.0),
    ("pk.full((64, 64), TABLE[1])", change_list, 2.0, 7.0),
    ("pk.full((64, 64), len(TABLE))", grow_list, 2.0, 3.0),
    ('pk.full((64, 64), NAMED["x"])', change_dict, 2.0, 8.0),
    ('pk.full((64, 64), NAMED["deep"][1][1][0])', change_deep, 3.0, 9.0),
    ("pk.full((64, 64), cfg.scale)", change_attribute, 2.0, 6.0),
    ("pk.full((64, 64), cfg.scale)", change_object, 2.0, 11.0),
    ("helper(pk.zeros((64, 64), pk.float32))", change_global, 3.0, 5.0),
    ("outer(pk.zeros((64, 64), pk.float32))", change_helper, 3.0, 100.0),
    ("outer(pk.zeros((64, 64), pk.float32))", change_global, 3.0, 5.0),
]


@pytest.mark.parametrize(("expression", "change", "before", "after"), CASES)
def test_a_changed_capture_is_seen_by_the_next_call(
    make: Make, expression: str, change: Callable[[Any], None], before: float, after: float
) -> None:
    text = KERNEL.format(value=expression)
    m = make(text + "\n@pk.function\ndef outer_helper(x):\n    return x + 100.0\n")
    assert value(m.k) == before
    change(m)
    assert value(m.k) == after


def test_a_changed_nonlocal_is_seen(make: Make) -> None:
    text = textwrap.indent(KERNEL.format(value="pk.full((64, 64), q)"), "    ")
    change = "    def change(v):\n        nonlocal q\n        q = v\n"
    m = make(f"def scope():\n    q = 2.0\n{text}\n{change}    return k, change\n")
    k, change = m.scope()
    assert value(k) == 2.0
    change(4.0)
    assert value(k) == 4.0


def test_an_attribute_of_another_module(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    other = make("")
    m = make("import " + other.__name__ + " as sizes\n" + KERNEL.format(value="pk.full((64, 64), sizes.Q)"))
    assert value(m.k) == 3.0
    other.Q = 8.0  # type: ignore[attr-defined]
    assert value(m.k) == 8.0
    del other.Q  # type: ignore[attr-defined]
    with pytest.raises(pk.errors.PkError, match="has no `Q`"):
        value(m.k)


def test_what_has_not_changed_is_not_built_again(make: Make) -> None:
    m = make(KERNEL.format(value="outer(pk.full((64, 64), TABLE[0] + NAMED['x'] + cfg.scale + math.pi))"))
    tensor = pk.spec("float32", 2)
    first = m.k.specialise(tensor)
    m.unused = 3
    m.Q = float("3.0")  # another object of the same value
    m.TABLE = list(m.TABLE)
    assert m.k.specialise(tensor) is first
    m.Q = 3  # equal, of another type: `/` and printing differ
    assert m.k.specialise(tensor) is not first


def test_inspection_follows_too(make: Make) -> None:
    m = make(KERNEL.format(value="pk.full((64, 64), Q)"))
    tensor = pk.spec("float32", 2)
    assert "value=3.0" in m.k.ir(tensor)
    m.Q = 0.0
    assert "value=0.0" in m.k.ir(tensor)
    m.Q = -0.0
    assert "value=-0.0" in m.k.ir(tensor)


def test_a_kernel_that_captures_nothing_has_nothing_to_check(make: Make) -> None:
    m = make(KERNEL.format(value="pk.full((64, 64), math.pi)"))
    m.k.specialise(pk.spec("float32", 2))
    assert not m.k._captures.any


def test_captures_compare_values() -> None:
    nan, space = math.nan, {"x": 1, "nan": float("nan"), "t": (1, 2.0), "l": [1, [2]], "f": len}
    captures = Captures()
    for name, value in space.items():
        captures.variable(space, name, value)
    captures.close()
    assert captures.current()
    space.update({"nan": nan, "t": (space["x"], 2.0), "l": [1, [2]]})
    assert captures.current()
    others: dict[str, object] = {"x": True, "t": (1.0, 2.0), "l": [1, [3]], "f": max, "nan": 0.0}
    for name, other in others.items():
        changed = dict(space)
        space[name] = other
        assert not captures.current(), name
        space.update(changed)
        assert captures.current()
    del space["x"]
    assert not captures.current()


class Odd:
    """Makes new things, or refuses."""

    @property
    def fresh(self) -> object:
        """A new object each time."""
        return object()


def test_a_property_that_makes_new_objects_does_not_rebuild_for_ever() -> None:
    captures, odd = Captures(), Odd()
    captures.attribute(odd, "fresh", odd.fresh)
    assert captures.close().current()

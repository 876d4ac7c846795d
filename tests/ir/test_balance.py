"""Fills against drains: what is recognised as equal, and what is refused."""

from __future__ import annotations

from textwrap import dedent, indent

import pytest

from pk import errors
from tests.dsl.reading import read, refusal

HEAD = """
@pk.kernel
def k(a: pk.Global, n: int, m: int):
    p = pk.pipeline(2, x=pk.shared((64, 64), a.dtype))
    for t in pk.tasks(n):
"""


def source(shared: str, loader: str, consumer: str) -> str:
    """A task whose loader and consumer are given; FILL and DRAIN stand for one of either."""
    parts = [dedent(shared).strip(), role("loader", loader), role("consumer", consumer)]
    return HEAD + indent("\n".join(parts), "        ")


def role(kind: str, body: str) -> str:
    body = dedent(body).strip()
    lines = []
    for line in body.splitlines():
        space = line[: len(line) - len(line.lstrip())]
        word = line.strip()
        lines.append(f"{space}with p.{word.lower()}() as s:\n{space}    pass" if word in ("FILL", "DRAIN") else line)
    return f"with pk.{kind}():\n" + indent("\n".join(lines), "    ")


def turns(n: str, body: str) -> str:
    """A loop of ``n`` turns around ``body``."""
    return f"for i in range({n}):\n" + indent(body, "    ")


EQUAL = {
    "sequence and loop": ("", "FILL\nFILL\n" + turns("m", "FILL"), turns("m + 2", "DRAIN")),
    "loops multiply": ("", turns("m", "for j in range(n):\n    FILL"), turns("n * m", "DRAIN")),
    "rounded the same": ("", turns("pk.cdiv(m, 8)", "FILL"), turns("(m + 7) // 8", "DRAIN")),
    "condition and negation": ("", "if t == m:\n    FILL\nelse:\n    FILL", "DRAIN"),
    "conditions either way": ("", "if t != m:\n    FILL", "if t == m:\n    pass\nelse:\n    DRAIN"),
    "comparisons": ("", "if t < m:\n    FILL", "if not m <= t:\n    DRAIN"),
    "nested conditions": ("", "if t < m:\n    if t == n:\n        FILL", "if t == n and t < m:\n    DRAIN"),
    "indicators as counts": ("", "if t < n:\n    FILL\nif t > 0:\n    FILL", turns("(t < n) + (t > 0)", "DRAIN")),
    "names stand for values": ("x = m + 1", "y = x * 2\n" + turns("y", "FILL"), turns("2 * m + 2", "DRAIN")),
    "chosen bounds": ("x = m if t < n else n", turns("x", "FILL"),
                      "\n".join(["if t < n:", indent(turns("m", "DRAIN"), "    "),
                                 "else:", indent(turns("n", "DRAIN"), "    ")])),
    "shared loop state": ("x = 0\n" + turns("m", "x = x + i"), turns("x", "FILL"), turns("x", "DRAIN")),
    "triangles": ("", turns("m", "for j in range(i):\n    FILL"), turns("m", "for v in range(i):\n    DRAIN")),
    "diagonals": ("", turns("m", "if i < t:\n    FILL"), turns("m", "if t > i:\n    DRAIN")),
}  # fmt: skip


@pytest.mark.parametrize("name", EQUAL)
def test_equal(name: str) -> None:
    read(source(*EQUAL[name]))


DIFFERENT = {
    "one more": ("", "for i in range(m):\n    FILL", "for i in range(m):\n    DRAIN\nDRAIN",
                 "filled `m` times, and drained `m + 1` times"),
    "other condition": ("", "if t < m:\n    FILL", "if t <= m:\n    DRAIN",
                        "filled once if `t < m`, else never, and drained once if `t <= m`, else never"),
    "private state": ("", "x = m\nfor i in range(3):\n    x = x - i\nfor i in range(x):\n    FILL",
                      "y = m\nfor i in range(3):\n    y = y - i\nfor i in range(y):\n    DRAIN",
                      "filled `x` times, and drained `y` times"),
    "other triangle": ("", "for i in range(m):\n    for j in range(i):\n        FILL",
                       "for i in range(m):\n    for j in range(i + 1):\n        DRAIN",
                       "filled `m * i` times, and drained `m * (i_1 + 1)` times"),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENT)
def test_different(name: str) -> None:
    *parts, what = DIFFERENT[name]
    message = refusal(errors.Unbalanced, source(parts[0], parts[1], parts[2]))
    assert message.splitlines()[0] == f"Unbalanced: in a task `p` is {what}: the two must be equal"


def test_shared_state_that_changes_between_roles() -> None:
    text = source("x = m + 1", "for i in range(x):\n    FILL", "for i in range(x):\n    DRAIN")
    read(text)
    changed = text.replace("        with pk.consumer", "        x = x + 1\n        with pk.consumer")
    assert changed != text
    refusal(errors.Unbalanced, changed)


def test_every_task_is_balanced_on_its_own() -> None:
    """Equal over the whole class, but not within each task loop: roles would pair stages of different loops."""
    fill, drain = role("loader", "FILL"), role("consumer", "DRAIN")
    text = HEAD + indent(fill, "        ") + "\n    for u in pk.tasks(n):\n" + indent(drain, "        ")
    refusal(errors.Unbalanced, text)

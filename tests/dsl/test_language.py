"""What the language's constructs become."""

from __future__ import annotations

from textwrap import dedent, indent

import pytest

from pk.ir.text import text
from tests.dsl.reading import body, read

HEAD = """
SIZES = (2, 4)
FACTOR = 3

@pk.function
def double(x, by=2):
    return x * by

@pk.function
def total(n):
    x = 0
    for j in pk.range(n):
        x += j
    return x

@pk.function
def pick(x, flag):
    if flag:
        return x + 1
    return x - 1

@pk.kernel
def k(a: pk.Global, c: pk.Parallel, n: int, scale: float, opt: pk.Global = None, BM: pk.constexpr = 128):
"""


def same(lines: str, expected: str, ndim: dict[str, int] | None = None) -> None:
    printed = body(HEAD + indent(dedent(lines).strip("\n"), "    "), ndim={"opt": 0} | (ndim or {}))
    assert printed.strip() == dedent(expected).strip()


def test_kept_and_folded_loops_and_branches() -> None:
    same(
        """
        for m in pk.range(n):
            if BM == 128:
                x = m * 2
            else:
                x = undefined
            for j in pk.static_range(2):
                if m > j and m < BM:
                    y = x + j
            for s in SIZES:
                assert m != s, "no"
        """,
        """
        for m in range(0, n):
          x: int32 = m * 2
          if m > 0 and m < 128:
            y: int32 = x
          if m > 1 and m < 128:
            y: int32 = x + 1
          assert m != 2, 'no'
          assert m != 4, 'no'
        """,
    )


def test_loop_state() -> None:
    same(
        """
        x = 0
        for m in range(1, n):
            x += m
            if x > 5:
                x = 0
        y = x
        """,
        """
        x: int32 = 0
        for m in range(1, n):
          x: int32 = x + m
          if x > 5:
            x: int32 = 0
        y: int32 = x
        """,
    )


def test_roles_have_their_own_names() -> None:
    same(
        """
        for m in pk.tasks(n):
            x = m + 1
            with pk.loader():
                x = x + 1
                for j in pk.range(x):
                    x = x * 2
            with pk.storer():
                y = x
                for j in pk.range(2):
                    y = y + j
        """,
        """
        for m in tasks(n, group=8):
          x: int32 = m + 1
          with loader():
            x_1: int32 = x + 1
            stop: int32 = x_1
            for j in range(0, stop):
              x_1: int32 = x_1 * 2
          with storer():
            y: int32 = x
            for j_1 in range(0, 2):
              y: int32 = y + j_1
        """,
    )


def test_shared_state_changed_in_a_role_is_a_copy() -> None:
    same(
        """
        for m in pk.tasks(n):
            x = m + 1
            with pk.loader():
                for j in pk.range(3):
                    x = x * 2
            y = x
        """,
        """
        for m in tasks(n, group=8):
          x: int32 = m + 1
          with loader():
            x_1: int32 = x
            for j in range(0, 3):
              x_1: int32 = x_1 * 2
          y: int32 = x
        """,
    )


def test_ranks_from_and_continue() -> None:
    same(
        """
        for r, m in pk.tasks(pk.ranks_from(n, 3), 4, group=2):
            if r == 0:
                continue
            for q in pk.ranks_from(r + 1):
                x = q
        """,
        """
        for r_i, m in tasks(3, 4, group=2):
          r: int32 = (n + r_i) % world
          if r == 0:
            pass
          else:
            for q_i in range(0, world):
              q: int32 = (r + q_i + 1) % world
              x: int32 = q
        """,
    )


def test_continue_in_a_folded_branch_and_in_an_else() -> None:
    same(
        """
        for m in pk.tasks(n):
            for j in pk.static_range(3):
                if j == 1:
                    continue
                x = m + j
            if m > 3:
                y = 1
            else:
                continue
            z = m
        """,
        """
        for m in tasks(n, group=8):
          x: int32 = m
          x: int32 = m + 2
          if m > 3:
            z: int32 = m
        """,
    )


def test_expressions() -> None:
    same(
        """
        for m in pk.range(n):
            x = m if 0 < m < n else -m
            y = pk.cdiv(m, n) + pk.min(m, 3, n) - max(m, 1)
            z = not (m > 3 or n == m)
            u = (m < 3) + (m > 1)
            v = m * scale / 2
            w = abs(m) % FACTOR
            t = m / n
        """,
        """
        for m in range(0, n):
          x: int32 = m if 0 < m and m < n else -m
          y: int32 = cdiv(m, n) + min(min(m, 3), n) - max(m, 1)
          z: bool = not (m > 3 or n == m)
          u: int32 = (m < 3) + (m > 1)
          v: float32 = m * scale / 2
          w: int32 = abs(m) % 3
          t: float32 = m / n
        """,
    )


def test_unpacking_swaps() -> None:
    same(
        """
        for m in pk.range(2):
            x, y = n + 1, n + 2
            x, y = y, x
        """,
        """
        for m in range(0, 2):
          x: int32 = n + 1
          y: int32 = n + 2
          old: int32 = y
          old_1: int32 = x
          x: int32 = old
          y: int32 = old_1
        """,
    )


def test_helpers_are_expanded_and_return_values() -> None:
    same(
        """
        for m in pk.range(3):
            x = double(m, by=3) + double(m)
            s = total(m)
            t = total(m + 1)
            p = pick(m, BM > 64)
        """,
        """
        for m in range(0, 3):
          x: int32 = m * 3 + m * 2
          x_1: int32 = 0
          for j in range(0, m):
            x_1: int32 = x_1 + j
          n_1: int32 = m + 1
          x_2: int32 = 0
          for j in range(0, n_1):
            x_2: int32 = x_2 + j
          p: int32 = m + 1
        """,
    )


def test_coordinates() -> None:
    same(
        """
        p = pk.pipeline(2, x=pk.shared((64, 32), a.dtype), v=pk.shared((64,), a.dtype))
        row = (n,)
        with pk.loader():
            with p.fill() as s:
                pk.load_async(s.x, a, (*row, 3, n + 1))
                pk.load_async(s.x, a, pk.at(n, 3, n + 1))
                pk.load_async(s.v, a, (n, 3, n * 2 + 1))
                pk.load_async(s.x, c[n % 2], (1, 2))
        with pk.storer():
            with p.drain() as s:
                pk.store_async(c, s.x, (0, 0))
        """,
        """
        with loader():
          with p.fill():
            load_async(p.x, a[n, 192, n * 32 + 32])
            load_async(p.x, a[n, 3, n + 1])
            load_async(p.v, a[n, 3, n * 128 + 64])
            load_async(p.x, c@(n % 2)[64, 64])
        with storer():
          with p.drain():
            store_async(c@all[0, 0], p.x)
        """,
        ndim={"a": 3},
    )


def test_register_tiles() -> None:
    same(
        """
        p = pk.pipeline(1, x=pk.shared((64, 64), a.dtype), y=pk.shared((64, 64), a.dtype))
        q = pk.pipeline(1, x=pk.shared((64, 64), a.dtype))
        with pk.loader():
            with p.fill() as s:
                pk.load_async(s.x, a, (0, 0))
                pk.load_async(s.y, a, (0, 0))
        with pk.consumer():
            acc = pk.full((64, 64), 1.5)
            with p.drain() as s:
                pk.mma(acc, s.x.T, s.y)
                old = acc
                acc = -pk.max(acc * 2 + pk.load(s.x), 0) / scale
                assert s.x.rows == 64 and acc.cols == 64 and acc.shape == (64, 64) and s.x.dtype == pk.bfloat16
            with q.fill() as s:
                pk.store(s.x, pk.cast(old - acc, pk.bfloat16))
        with pk.storer():
            with q.drain() as s:
                pk.store_async(c[pk.rank()], s.x, (n, n))
        """,
        """
        with loader():
          with p.fill():
            load_async(p.x, a[0, 0])
            load_async(p.y, a[0, 0])
        with consumer(warpgroups=1):
          acc: register[64x64 float32] = full(value=1.5)
          with p.drain():
            mma(acc, p.x.T, p.y)
            old: register[64x64 float32] = acc
            acc: register[64x64 float32] = -max(acc * 2.0 + load(p.x), 0.0) / scale
          with q.fill():
            store(q.x, cast(old - acc, bfloat16))
        with storer():
          with q.drain():
            store_async(c@rank[n * 64, n * 64], q.x)
        """,
    )


def test_helpers_get_tiles_by_value() -> None:
    """A helper that accumulates into its argument works on a copy; what it returns needs no second one."""
    made = body(
        """
        from pk import mma as multiply

        @pk.function
        def step(acc, p, n):
            for i in pk.range(n):
                with p.drain() as s:
                    multiply(acc, s.x, s.x)
            return acc

        @pk.kernel
        def k(a: pk.Global, n: int):
            p = pk.pipeline(2, x=pk.shared((64, 64), a.dtype))
            with pk.loader():
                for i in pk.range(n * 2):
                    with p.fill() as s:
                        pk.load_async(s.x, a, (0, 0))
            with pk.consumer():
                acc = pk.zeros((64, 64))
                pair = (acc * 2, 1)
                other = step(acc, p, n)
                last = step(step(pk.zeros((64, 64)), p, n), p, 0)
                sum = other + last + acc + pair[0]
        """
    )
    assert dedent(made[made.index("  acc") :]) == dedent(
        """
          acc: register[64x64 float32] = full(value=0.0)
          pair: register[64x64 float32] = acc * 2.0
          acc_1: register[64x64 float32] = acc
          for i_1 in range(0, n):
            with p.drain():
              mma(acc_1, p.x, p.x)
          acc_2: register[64x64 float32] = full(value=0.0)
          for i_1 in range(0, n):
            with p.drain():
              mma(acc_2, p.x, p.x)
          for i_1 in range(0, 0):
            with p.drain():
              mma(acc_2, p.x, p.x)
          sum: register[64x64 float32] = acc_1 + acc_2 + acc + pair
        """
    ).removeprefix("\n")


def test_an_absent_tensor_folds_to_none() -> None:
    same(
        """
        seen = pk.signals()
        if opt is None:
            pk.wait(seen, (), 1)
        else:
            x = opt.rows
        """,
        "wait(seen[], 1)",
    )


def test_dims_count_from_the_end() -> None:
    kernel = read(
        "@pk.kernel\ndef k(a: pk.Global):\n    x = a.rows + a.cols + a.depth + a.batch + a.shape[0]", ndim={"a": 4}
    )
    assert "x: int32 = a.rows + a.cols + a.depth + a.batch + a.batch" in text(kernel)


@pytest.mark.parametrize(("value", "printed"), [(0, "n"), (5, "n + 5"), (-5, "n - 5")])
def test_constants_fold(value: int, printed: str) -> None:
    same(f"for m in pk.range(1):\n    x = n + 2 - BM + 126 + {value}", f"for m in range(0, 1):\n  x: int32 = {printed}")

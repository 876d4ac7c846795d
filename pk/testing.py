"""For tests of kernels, with pytest or without::

    import pk.testing

    def test_my_kernel_is_race_free():
        pk.testing.assert_race_free(my_kernel, a, b, c, world_size=3, schedules=30, BM=64)

Needs no GPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pk.checking import check

if TYPE_CHECKING:
    from pk.checking import Check
    from pk.kernel import Kernel

__all__ = ["assert_race_free"]


def assert_race_free(kernel: Kernel, *args: Any, **options: Any) -> Check:
    """Fail if :func:`pk.check` finds anything: a race, a deadlock, a read of nothing, a result that varies, ...

    Takes the arguments of :func:`pk.check`, and returns its result.  Raises AssertionError, whose text is the whole
    report, for findings, and :class:`pk.ArgumentError` (or another error of the call) if it cannot be checked.
    """
    __tracebackhide__ = True  # pytest shows the test's line, not this one
    made = check(kernel, *args, **options)
    if not made.ok:
        raise AssertionError(str(made))
    return made

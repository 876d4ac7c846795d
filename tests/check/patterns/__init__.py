"""Mistakes that users of other systems have met, each as a small kernel that a check must catch.

A module is one pattern: its docstring says whose bug it is, ``PATTERN`` holds the wrong kernels with what the check
finds, and the right ones, in which it finds nothing.  Each can be run by hand, without any test::

    python -m pk check tests/check/patterns/clear_after_barrier.py:wrong
    python -m pk check tests/check/patterns/clear_after_barrier.py:fixed
"""

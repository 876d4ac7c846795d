"""What blocked roles would have done next: they are run on past their waits, with no effect on memory.

After a deadlock the state of a launch is of no more use.  So each role that still waits is let go on as if every wait
were over, and a recorder notes which counters it would have added to, at which line and task.  From that
``sim.diagnose`` knows who should have signalled whom.  Loads and stores do nothing, products are not made; scalars
are read from memory as it is now, so what a role decides by them is a guess.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import GeneratorType
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from pk.ir import nodes as ir
from pk.ir import ops as table
from pk.ir.types import DType, Tile
from pk.sim.machine import Arrival
from pk.sim.ops import binary
from pk.sim.parts import Site, Stage
from pk.sim.translate import WAITING
from pk.sim.values import Array

if TYPE_CHECKING:
    from pk.sim.checker import Checker
    from pk.sim.machine import Launch, Operation, Role
    from pk.sim.parts import Counter, Wait

ROLE_TURNS, ALL_TURNS = 10_000, 200_000  # waits that are passed: of one role, of all
READS = 20_000  # scalars that one role may read, so that a loop which polls memory ends

Task = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Gift:
    """Role ``role`` would add ``value`` to ``counter``, at ``span``, in work at ``task``."""

    role: Role
    counter: Counter
    value: int
    span: ir.Span
    task: Task


@dataclass(slots=True)
class Futures:
    """``of[counter]``: what it would still be given.  ``complete``: whether every role was followed to its end."""

    of: dict[Counter, list[Gift]]
    complete: bool = True

    def gifts(self, counter: Counter) -> list[Gift]:
        """Who would add to ``counter``."""
        return self.of.get(counter, [])


class _Enough(Exception):
    """The role reads for ever."""


class _Recorder:
    """Listens to one role at a time, in the place of a checker."""

    def __init__(self, spans: dict[tuple[str, str], ir.Span]) -> None:
        self.role: Role | None = None
        self.futures = Futures({})
        self.reads = 0
        self._spans = spans
        self._stages: dict[tuple[str, str], ir.Span] = {}  # where the role entered each pipeline last

    def start(self, role: Role) -> None:
        """From now on, ``role`` is run."""
        self.role, self.reads, self._stages = role, 0, {}

    def passed(self, wait: Wait) -> None:
        """The role has passed ``wait``."""
        site = wait[2]
        if site.op in ("fill", "drain"):
            self._stages[site.what, site.op] = site.span

    def issued(self, op: Operation) -> None:
        """A signal is noted at once."""
        if isinstance(op, Arrival):
            self._note(op.role.launch.signal_counter(op.target, op.ref), op.value, op.site.span)

    def counter_add(self, counter: Counter, value: int, actor: Any) -> None:
        """A stage is handed on, a task number published, a counter of one's own raised."""
        span = ir.NOWHERE
        if isinstance(actor, Stage):
            key = (actor.pipeline, "fill" if counter is actor.full else "drain")
            span = self._stages.get(key) or self._spans.get(key, span)
        self._note(counter, value, span)

    def ignore(self, *told: object) -> None:
        """Nothing that matters here."""

    done = fetched = stage_left = loading = ignore

    def _note(self, counter: Counter, value: int, span: ir.Span) -> None:
        assert self.role is not None
        task = tuple(zip(*self.role.task, strict=True))
        self.futures.of.setdefault(counter, []).append(Gift(self.role, counter, value, span, task))


def follow(launch: Launch, roles: list[Role], spans: dict[tuple[str, str], ir.Span]) -> Futures:
    """Run ``roles``, which wait for what will never come, to their ends; ``spans``: of (pipeline, fill or drain).

    The launch cannot be used afterwards: counters and generators have moved on.
    """
    recorder = _Recorder(spans)
    launch.checker, launch.memory.observer = cast("Checker", recorder), None
    left = ALL_TURNS
    with _harmless(roles, recorder):
        for role in roles:
            recorder.start(role)
            turns = min(left, ROLE_TURNS)
            used = _run(role, recorder, turns)
            recorder.futures.complete &= used is not None
            left -= turns if used is None else used
    launch.checker = None
    return recorder.futures


def _run(role: Role, recorder: _Recorder, turns: int) -> int | None:
    """Waits that ``role`` passed up to its end; None if it did not get there."""
    assert role.program is not None
    try:
        for turn in range(turns):
            wait = next(role.program, None)
            if wait is None:
                role.leave()
                return turn
            recorder.passed(wait)
    except Exception:  # noqa: BLE001 - it went on with what it had not waited for: anything may be wrong with that
        return None
    return None


# ------------------------------------------------------------------------------------------------ without effect
def _nothing(*operands: Any) -> Iterator[Wait]:
    yield from ()


@functools.cache
def _zeros(shape: tuple[int, ...]) -> Array:
    return np.zeros(shape, np.float32)


def _without_values(meaning: Callable[..., Any]) -> Callable[..., Any]:
    """``meaning``, an op with a result, but for tiles of floats, of which no role decides anything: those are 0."""

    def quick(role: Role, site: Site, *operands: Any) -> Any:
        if isinstance(site.type, Tile) and site.type.dtype.kind == "float":
            return _zeros(site.type.shape)
        return meaning(role, site, *operands)

    return quick


def _binary(op: str, x: Any, y: Any, dtype: DType) -> Array:
    if dtype.kind == "float":
        return _zeros(np.broadcast_shapes(np.shape(x), np.shape(y)))
    return binary(op, x, y, dtype)


class _Divisions:
    """Divides by what nobody has written, too."""

    @staticmethod
    def divide(role: Role, site: Any, e: ir.Binary, x: Any, y: Any, dtype: DType) -> Array:
        return _binary(e.op, x, y, dtype)


def _unchanged(role: Role, site: Any, acc: Array, *factors: Any) -> Array:
    return acc


_HARMLESS: dict[str, Callable[..., Any]] = {
    **{
        f"op_{name}": _nothing
        for name in (
            "load_async", "store_async", "store_add_async", "gather_async", "scatter_async", "reduce", "all_reduce",
            "store_global", "store_scalar", "store_elements",
        )
    },
    "binary": _binary,
    "divisions": _Divisions,
    "fits": lambda role, site, value: value,
    "op_store": lambda *operands: None,
    "op_mma": _unchanged,
}  # fmt: skip
_VALUES = tuple(f"op_{name}" for name, row in table.TABLE.items() if row.result and name not in WAITING)
_READING = ("op_load_global", "op_load_scalar", "op_load_elements")


@contextmanager
def _harmless(roles: list[Role], recorder: _Recorder) -> Iterator[None]:
    """The programs of ``roles`` call ops that touch no memory, and may not read for ever."""

    def counted(meaning: Callable[..., Any]) -> Callable[..., Any]:
        def read(*operands: Any) -> Any:
            recorder.reads += 1
            if recorder.reads > READS:
                raise _Enough
            return meaning(*operands)

        return read

    frames = [cast("GeneratorType[Any, Any, Any]", role.program).gi_frame for role in roles]
    modules = {id(frame.f_globals): frame.f_globals for frame in frames if frame is not None}
    before = [(names, dict(names)) for names in modules.values()]
    for names, saved in before:
        names.update({name: op for name, op in _HARMLESS.items() if name in names})
        names.update({name: counted(saved[name]) for name in _READING})
        names.update({name: _without_values(saved[name]) for name in _VALUES})
    try:
        yield
    finally:
        for names, saved in before:
            names.update(saved)

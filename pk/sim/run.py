"""Run a kernel on simulated ranks: ``simulate(kernel, args)``."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

from pk import env, errors
from pk.ir import nodes as ir
from pk.ir.early import early
from pk.ir.index import evaluate
from pk.ir.split import roles_of, statements
from pk.ir.types import Scalar
from pk.sim import machine, report
from pk.sim.checker import Checker
from pk.sim.claims import Claims, Work
from pk.sim.joins import Joined
from pk.sim.memory import Access, Buffer, Memory, Observer, SimTensor
from pk.sim.report import Report
from pk.sim.residency import make_room
from pk.sim.schedule import make
from pk.sim.translate import RoleProgram, translate
from pk.sim.values import STORAGE

Arguments = dict[str, SimTensor | int | float]

__all__ = ["DEFAULT_SMS", "Report", "SimTensor", "simulate"]

DEFAULT_SMS = 4


class _OneThread:
    """BLAS has one thread: tiles are small, and on a busy machine its threads spin for longer than they compute.

    Simulations of several threads may overlap: the first to begin sets the limit, the last to end takes it back.
    """

    def __init__(self) -> None:
        self._lock, self._inside = threading.Lock(), 0
        self._limit: Any = None

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._limit = _blas().limit(limits=1, user_api="blas")
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._limit.restore_original_limits()


@functools.cache
def _blas() -> ThreadpoolController:
    return ThreadpoolController()


_one_thread = _OneThread()


def simulate(
    kernel: ir.Kernel,
    args: list[Arguments],
    sms: int | None = None,
    seed: int = 0,
    observer: Observer | None = None,
    multicast: bool = False,
    checker: Checker | None = None,
    resident: int | None = None,
    order: Sequence[int] | None = None,
) -> Report:
    """Run one launch of ``kernel`` on ``len(args)`` ranks; tensors are changed in place.

    ``args[r]`` holds rank r's tensors and run-time scalars by parameter name.  Every rank has ``sms`` thread blocks
    (default 4).  ``seed`` chooses the schedule; equal seeds give equal schedules.  ``observer`` is called for every
    access to memory and shared tiles.  ``multicast``: sums over ranks are made in the network, in any order.
    ``checker`` hears of all that happens, and keeps what it finds.  ``resident``: how many blocks of a rank fit on its
    device at once (default: all); the others start, in the ``order`` given, when one ends.

    Raises :class:`pk.errors.ArgumentError` for arguments that do not fit the kernel, :class:`pk.errors.RanksDisagree`
    for shapes that must be equal on all ranks and are not, :class:`pk.errors.DeadlockError` when roles wait for what
    will never come, :class:`pk.errors.SimulationError` for what a kernel must not do (a rank or counter that does not
    exist, a failed assert).
    """
    sms = DEFAULT_SMS if sms is None else sms
    world = len(args)
    if world < 1 or sms < 1:
        raise errors.ArgumentError(f"simulate needs at least one rank and one SM, not {world} and {sms}.")
    values = [_check(kernel, rank, world, mine) for rank, mine in enumerate(args)]
    parallel = [t.name for t in kernel.tensors if t.kind == "parallel"]
    _agreed(kernel, "tensor", [{name: _tensor(mine[name]).array.shape for name in parallel} for mine in args])
    signal_shapes = _agreed(kernel, "signals", [{s.name: _shape(s, v) for s in kernel.signals} for v in values])
    scratch_shapes = _agreed(kernel, "scratch", [{s.name: _shape(s, v) for s in kernel.scratch} for v in values])
    buffers = [
        {
            **{t.name: Buffer(t.name, rank, -1, _tensor(mine[t.name]).array, t.dtype) for t in kernel.tensors},
            **{s.name: _scratch(kernel, s, rank, scratch_shapes[s.name]) for s in kernel.scratch},
        }
        for rank, mine in enumerate(args)
    ]
    scalars: list[dict[str, Any]] = [{p.name: mine[p.name] for p in kernel.scalars} for mine in args]
    schedule = make(seed, world, sms)
    launch = machine.Launch(schedule, Memory(observer), buffers, scalars, signal_shapes, multicast)
    launch.turns = env.SIM_STEPS.get()
    launch.work_space, launch.early = frozenset(scratch_shapes), early(kernel) and not multicast
    programs = _populate(kernel, launch, _blocks(kernel, sms, values[0]))
    launch.room = make_room(launch, resident, order, sms)
    if checker is not None:
        _listen(checker, kernel, launch, seed)
    with np.errstate(all="ignore"), _one_thread:  # NaN is data here
        _run(launch, programs)
    if checker is not None:
        checker.launch_end(launch)
    if launch.running:
        raise report.deadlock(kernel, seed, schedule.steps, launch)
    done = launch.operations
    return Report(
        kernel.name,
        world,
        sms,
        seed,
        schedule.digest(),
        schedule.steps,
        launch.waits,
        done["load"],
        done["land"],
        done["signal"],
        launch.messages,
        launch.max_in_flight,
    )


def _listen(checker: Checker, kernel: ir.Kernel, launch: machine.Launch, seed: int) -> None:
    """From now on ``checker`` hears of the launch, beside an observer that may be there."""
    launch.checker, checker.seed = checker, seed
    observer = launch.memory.observer

    def both(access: Access) -> None:
        assert observer is not None
        observer(access)
        checker.access(access)

    launch.memory.observer = checker.access if observer is None else both
    checker.launch_begin(launch, kernel)


def _run(launch: machine.Launch, programs: list[RoleProgram]) -> None:
    try:
        machine.run(launch)
    except ZeroDivisionError as error:  # the only mistake that scalar arithmetic can make
        span = ir.NOWHERE
        files = {p.file: p for p in programs}
        at, where = error.__traceback__, "a scalar of the kernel"
        while at is not None:
            program = files.get(at.tb_frame.f_code.co_filename)
            if program:
                span, where = program.span(at.tb_lineno), at.tb_frame.f_locals["role"].where()
            at = at.tb_next
        raise errors.SimulationError("division by zero", span, where) from None


def _populate(kernel: ir.Kernel, launch: machine.Launch, blocks_of: dict[str, range]) -> list[RoleProgram]:
    """Make every role of every block of every rank; ``blocks_of``: the blocks of each class."""
    programs: list[RoleProgram] = []
    joined: dict[tuple[int, int], Joined] = {}  # by rank and block: those that compute behind their communicator
    for owner, body in (*kernel.classes[1:], kernel.classes[0]):
        blocks = blocks_of[owner]
        dynamic = any(isinstance(s, ir.Tasks) and s.dynamic for s in statements(body))
        roles = [translate(kernel, body, kind) for kind in roles_of(body)]
        programs += roles
        pipelines = [p for p in kernel.pipelines if p.owner == owner]
        for rank in range(launch.world):
            work = Work()
            for index, block in enumerate(blocks):
                claims = Claims(launch, work, roles[0].kind) if dynamic else None
                rings: dict[str, machine.Ring] = {}
                for p in pipelines:
                    rings[p.name] = machine.Ring(launch, p, rank, block, rings.get(p.over))
                private = {
                    t.name: machine.private_tile(launch, t, rank, block) for t in kernel.shared if t.owner == owner
                }
                if kernel.joins and owner != "compute":
                    joined[rank, block] = Joined(launch, len(roles), kernel.communicators[0].span)
                for program in roles:
                    role = machine.Role(launch, rank, block, program.kind, index, len(blocks))
                    role.rings, role.private, role.claims = rings, private, claims
                    role.program = program.start(role)
                    join = joined.get((rank, block))
                    if owner == "compute":
                        role.first = join.wait if join else None
                    else:
                        role.joins = join
                    launch.add_role(role)
    return programs


def _blocks(kernel: ir.Kernel, sms: int, values: dict[str, int | float]) -> dict[str, range]:
    """Which of a rank's blocks each class has: communicators first, and compute at least half of them."""
    number = len(kernel.communicators)
    if sms < 2 * number:
        many = f"{number} communicators, which need {number} SMs"
        what = "a communicator, which needs an SM" if number == 1 else many
        raise errors.ArgumentError(
            f"kernel `{kernel.name}` has {what} beside those that compute, but sms={sms}.\n"
            f"  Simulate with sms={2 * number} or more."
        )
    at, found = 0, {}
    for i, c in enumerate(kernel.communicators):
        room = sms // 2 - at - (number - 1 - i)  # one block is left for each of the others
        blocks = max(1, min(int(evaluate(c.sms, values)), room))
        found[ir.communicator_name(i)] = range(at, at + blocks)
        at += blocks
    return {**found, "compute": range(0 if kernel.joins else at, sms)}


# ---------------------------------------------------------------------------------------------- arguments
def _check(kernel: ir.Kernel, rank: int, world: int, mine: Arguments) -> dict[str, int | float]:
    """Refuse arguments that do not fit; return what ``ir.index.evaluate`` needs to know about them."""
    values: dict[str, int | float] = {"rank": rank, "world": world}
    wanted = [t.name for t in kernel.tensors] + [p.name for p in kernel.scalars]
    if sorted(wanted) != sorted(mine):
        raise errors.ArgumentError(
            f"kernel `{kernel.name}` takes {', '.join(wanted)}; rank {rank} was given {', '.join(mine) or 'nothing'}."
        )
    for t in kernel.tensors:
        given = mine[t.name]
        if not isinstance(given, SimTensor):
            raise errors.ArgumentError(
                f"`{t.name}` of kernel `{kernel.name}` must be a SimTensor, not {errors.short(given)}."
            )
        if given.dtype != t.dtype or given.array.dtype != STORAGE[t.dtype] or given.array.ndim != t.ndim:
            raise errors.ArgumentError(
                f"`{t.name}` of kernel `{kernel.name}` is {given.dtype} with {given.array.ndim} dimensions, stored as "
                f"{given.array.dtype}; wanted {t.dtype} with {t.ndim}, stored as {STORAGE[t.dtype]}."
            )
        values.update({f"{t.name}.{axis}": extent for axis, extent in enumerate(given.array.shape)})
    for p in kernel.scalars:
        number = mine[p.name]
        if isinstance(number, SimTensor):
            raise errors.ArgumentError(f"`{p.name}` of kernel `{kernel.name}` must be a number, not a tensor.")
        values[p.name] = number
    for s in kernel.prologue:
        if isinstance(s, ir.Assign) and isinstance(s.var.type, Scalar):
            try:
                values[s.var.name] = evaluate(s.value, values)
            except ZeroDivisionError:
                raise errors.SimulationError("division by zero", s.span, f"rank {rank}, before its tasks") from None
    return values


def _scratch(kernel: ir.Kernel, declared: ir.Scratch, rank: int, shape: tuple[int, ...]) -> Buffer:
    try:
        return machine.scratch_buffer(declared.name, rank, shape, declared.dtype)
    except (MemoryError, ValueError):
        size = math.prod(shape) * declared.dtype.itemsize
        raise errors.BackendError(
            f"scratch `{declared.name}` of kernel `{kernel.name}` has shape {shape} ({declared.dtype}) and needs "
            f"{size} bytes, which this host cannot give to simulated rank {rank}.\n"
            "  Simulate with smaller shapes or fewer ranks."
        ) from None


def _tensor(argument: SimTensor | int | float) -> SimTensor:
    assert isinstance(argument, SimTensor)
    return argument


def _shape(declared: ir.Signals | ir.Scratch, values: dict[str, int | float]) -> tuple[int, ...]:
    return tuple(int(evaluate(extent, values)) for extent in declared.shape)


def _agreed(kernel: ir.Kernel, what: str, shapes: list[dict[str, tuple[int, ...]]]) -> dict[str, tuple[int, ...]]:
    """The shapes that all ranks have in common."""
    for rank, mine in enumerate(shapes):
        for name, shape in mine.items():
            if shape != shapes[0][name]:
                raise errors.RanksDisagree(
                    f"{what} `{name}` of kernel `{kernel.name}` has shape {shapes[0][name]} on rank 0 and {shape} on "
                    f"rank {rank}.\n  It must be the same on every rank: pass tensors of equal shapes."
                )
    return shapes[0]

"""``pk.ops.tune``: measure the ways that an operator can take, on the ranks that will take them, and keep the answer.

The ranks work in lock-step: the same candidates in the same order, the same number of calls, which nothing that one
rank measures can change; a candidate that fails on one rank has failed on all.  Rank 0 decides from the slowest rank's
times and tells the others.
"""

from __future__ import annotations

import pickle
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from pk.errors import ArgumentError, HangError, PeerFailed, PkError, RanksDisagree, short
from pk.ops import baseline, choose, estimate, fused, inputs, options, tensor_parallel
from pk.ops.autograd import as_called
from pk.ops.calls import Called
from pk.ops.choose import Candidate, Choice
from pk.ops.estimate import Case
from pk.ops.explaining import Operator, heading, name_of, table
from pk.runtime import launch, tunings
from pk.runtime.context import refuse_capture

if TYPE_CHECKING:
    from pk.ops.fused import Request
    from pk.runtime.group import Group

T = TypeVar("T")
WARM = 3  # calls of a candidate before it is measured
ROUND_US = 3000.0  # what a round of one candidate lasts, if the estimate is right
TOLERANCE = 0.02  # of a result, against the library's: ||x - y|| / ||y||
_PATIENCE = 64  # meetings that another rank may be at before it hears that a candidate has failed


@dataclass(frozen=True, slots=True)
class Tuning:
    """What was measured: ``candidates``, the best first, and ``choice``, which the operator takes from now on."""

    case: Case
    known: choose.Facts
    candidates: tuple[Candidate, ...]

    @property
    def choice(self) -> Choice:
        """The quickest that works."""
        return choose.best(self.candidates).choice

    def __str__(self) -> str:
        taken = choose.best(self.candidates)
        rows = table(self.candidates, taken, len(self.candidates), self.case.operator)
        return "\n".join([*heading(self.case, self.known), *rows])


def tune(
    operator: Operator,
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    group: Any = None,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    limit: int = 8,
    repeats: int | None = None,
    rounds: int | None = None,
    save: bool | None = None,
) -> Tuning:
    """Measure how ``operator`` (``pk.ops.all_gather_matmul``, ..., or its name) is quickest for calls like this one.

    Collective, and for the call as it would be made here: under autocast with its dtype, and with the activation apart
    from the product where a gradient needs what goes into it.

    Candidates are the ``limit`` best of pk's by estimate, and the library where it is one.  Each is run, its result
    compared with the library's, and then timed in ``rounds`` rounds of ``repeats`` calls one after the other, the
    candidates in turn; its time is the median round of the slowest rank.  From then on the operator takes the quickest
    for these shapes, M up to the next power of two or 1.5 times one.  ``save`` keeps the answer on disk for later runs
    on such a machine with these versions (default: on GPUs); a disk that refuses is only a warning.

    A simulation is timed as one.  Raises :class:`pk.errors.ArgumentError` as the operator does and where there is
    nothing to measure, :class:`pk.errors.RanksDisagree` if the ranks ask for different things.
    """
    name = name_of(operator, fused.OPERATORS)
    for option, value in (("limit", limit), ("repeats", repeats), ("rounds", rounds)):
        options.whole(option, value, what="candidates" if option == "limit" else option)
    if save is not None and not isinstance(save, bool):
        raise ArgumentError(f"save={short(save)} is {type(save).__name__}, and must be True, False or None.")
    vectors = {"bias": bias, "scale_a": scale_a, "scale_b": scale_b}
    inputs.are_tensors("tune", a=a, b=b, **{k: x for k, x in vectors.items() if x is not None})
    options.check(name, activation=activation, out_dtype=out_dtype)
    a, b, bias, activation = as_called(a, b, bias, activation, scale_a, scale_b)
    q = tensor_parallel.request(name, a, b, group, bias, activation, None, out_dtype, scale_a, scale_b)
    if q.empty:
        raise ArgumentError(f"pk.ops.tune: {name} of empty matrices takes no time.\n  Pass some with elements.")
    if q.group.backend == "cuda":
        refuse_capture(q.group, "pk.ops.tune measures and waits")
    with torch.no_grad(), q.group.turn.of(f"pk.ops.tune of {Called(q, None)}"):
        return _tune(q, limit, repeats, rounds, save)


def _tune(q: Request, limit: int, repeats: int | None, rounds: int | None, save: bool | None) -> Tuning:
    group, known = q.group, choose.facts(q.group)
    case = estimate.case_of(q, known.sms)
    simulated = group.backend == "sim"
    ways = plan(case, known, limit)
    rounds = rounds or (1 if simulated else 5)
    repeats = repeats or (1 if simulated else max(3, min(50, round(ROUND_US / estimate.floor_us(case)))))
    save = not simulated if save is None else save
    key = choose.key(case)
    names = ", ".join(way.name for way in ways)
    group.barrier(f"pk.ops.tune of {key}: {rounds} rounds of {repeats} calls of {names}, save={save}")
    failed, times = measure(q, ways, repeats, rounds)
    mine = {way.name: statistics.median(times[way.name]) for way in ways if way.name not in failed}

    def decide(told: list[dict[str, float]]) -> list[list[list[Any]]]:
        slowest = {name: max(times[name] for times in told) for name in told[0]}
        records = [[name, us, ""] for name, us in slowest.items()] + [[name, None, why] for name, why in failed.items()]
        if save:
            tunings.save(known.machine, key, records)
        return [records] * len(told)

    known.tuned[key] = group.meet("the decision of pk.ops.tune", mine, decide)
    known.memo.clear()
    group.calls.clear()  # they go another way now
    measured = {way.name for way in ways}
    every = choose.candidates(case, known)
    return Tuning(case, known, tuple(c for c in every if c.choice.name in measured))


def plan(case: Case, known: choose.Facts, limit: int) -> list[Choice]:
    """What is measured: the ``limit`` best of pk's by estimate, and the library if it is a candidate."""
    found = [c.choice for c in sorted(choose.candidates(case, known), key=lambda c: c.estimate)]
    return [*[way for way in found if not way.library][:limit], *[way for way in found if way.library]]


# ------------------------------------------------------------------------------------------------------ measuring
def measure(q: Request, ways: list[Choice], repeats: int, rounds: int) -> tuple[dict[str, str], dict[str, list[float]]]:
    """Why candidates failed, and this rank's microseconds of every round of those that did not, by name."""
    failed: dict[str, str] = {}
    times: dict[str, list[float]] = {way.name: [] for way in ways}
    reference, _ = together(q.group, partial(_reference, q))
    for way in ways:
        _, why = together(q.group, partial(_warm, q, way, reference))
        if why:
            failed[way.name] = why
    for _ in range(rounds):
        for way in ways:
            if way.name in failed:
                continue
            us, why = together(q.group, partial(timed, q, way, repeats))
            if us is None:
                failed[way.name] = why
            else:
                times[way.name].append(us)
    return failed, times


def _reference(q: Request) -> torch.Tensor:
    return baseline.run(q, None)[0].float()


def _warm(q: Request, way: Choice, reference: torch.Tensor | None) -> None:
    """Run ``way`` until it is warm; raise if its result is wrong."""
    result = tensor_parallel.chosen(q, None, way)[0]
    launch.synchronize(q.group)
    if reference is not None and bool(reference.isfinite().all()):
        error = float((result.float() - reference).norm() / reference.norm().clamp_min(1e-30))
        if not error <= TOLERANCE:
            raise ArithmeticError(f"its result is off by {error:.2g}, relative to the library's")
    for _ in range(0 if q.group.backend == "sim" else WARM):
        tensor_parallel.chosen(q, None, way)
    launch.synchronize(q.group)


def timed(q: Request, way: Choice, repeats: int) -> float:
    """Microseconds of one of ``repeats`` calls on this rank.  The ranks have just met."""
    if q.group.backend == "sim":
        began = time.perf_counter()
        for _ in range(repeats):
            tensor_parallel.chosen(q, None, way)
        return (time.perf_counter() - began) * 1e6 / repeats
    torch.cuda.synchronize(q.group.gpu)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        tensor_parallel.chosen(q, None, way)
    end.record()
    end.synchronize()
    launch.synchronize(q.group)
    return start.elapsed_time(end) * 1e3 / repeats


# ---------------------------------------------------------------------------------------------------- in lock-step
def together(group: Group, work: Callable[[], T]) -> tuple[T | None, str]:
    """``work()`` on every rank: (its value, "") if all came through, else (None, whose fault it is) on all.

    A rank that failed before it launched releases those that did launch.  Raises :class:`pk.errors.PeerFailed` if a
    rank is gone for good.
    """
    value, why, follows = None, "", False
    try:
        value = work()
    except Exception as error:  # noqa: BLE001  told to every rank
        why = f"{type(error).__name__}: {error}"
        follows = isinstance(error, (HangError, PeerFailed, RanksDisagree))  # of what another rank did
        if not follows:
            _release(group, why)
    told = _outcomes(group, (why, follows))
    wrong = [(rank, text, second) for rank, (text, second) in enumerate(told) if text]
    if not wrong:
        return value, ""
    if group.context is not None:
        group.reset()
    rank, text, _ = min(wrong, key=lambda each: (each[2], each[0]))
    return None, text if len(wrong) == group.world_size and not any(w[2] for w in wrong) else f"rank {rank}: {text}"


def _outcomes(group: Group, mine: tuple[str, bool]) -> list[tuple[str, bool]]:
    """Every rank's outcome.  Who fails comes here early: the others leave their meetings, fail too, and come."""
    key = "an outcome of pk.ops.tune"
    for _ in range(_PATIENCE):
        try:
            if group.backend == "sim":  # its launches meet in this way, see Link.gather
                told: list[tuple[str, bool]] = group.meet(key, mine, lambda each: [each] * len(each))
                return told
            return [pickle.loads(data) for data in group.exchange(key, pickle.dumps(mine))]
        except RanksDisagree:
            continue
    raise RanksDisagree("pk.ops.tune: the ranks do not come together after a candidate has failed.")


def _release(group: Group, why: str) -> None:
    """Ranks that are processes may have launched already, and wait on the device for this one."""
    if group.world_size == 1 or group.threaded or group.context is None:
        return
    try:
        launch.refuse(group, "pk.ops.tune", PkError(why))
    except PkError:
        return

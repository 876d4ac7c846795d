"""``pk.check``: run a kernel under many schedules and tell what can go wrong: races, deadlocks, bad reads, results.

::

    >>> a = [torch.randn(2, 128, 64).bfloat16() for rank in range(2)]        # a value for each rank,
    >>> b = lambda rank: torch.randn(64, 256).bfloat16()                     # or a function of the rank,
    >>> c = torch.zeros(128, 256).bfloat16()                                 # or one that every rank gets a copy of
    >>> check = pk.check(matmul_reduce_scatter, a, b, c, world_size=2, schedules=20)
    >>> print(check)
    matmul_reduce_scatter: no mistake in 20 schedules (2 ranks x 4 SMs, 1.2 s)
    >>> check.raise_if_found().ok                                            # pk.CheckError, if there is a finding
    True

A schedule is named by its seed: ``pk.check(..., seed=1000017, schedules=1)`` replays it.  ``python -m pk check FILE``
does the same for every launch of a program, and :mod:`pk.testing` for tests.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pk import errors
from pk.runtime.tensors import numpy_view
from pk.simulate import forget, substituted

if TYPE_CHECKING:
    import torch

    from pk.kernel import Kernel, Program
    from pk.sim.findings import Finding
    from pk.sim.image import Arguments
    from pk.sim.pool import Pool
    from pk.sim.shrink import Smallest
    from pk.sim.trial import Case

__all__ = ["Check", "check", "checking"]

_SHRINK_S = 15.0  # at most, to make what fails smaller
_ALLOCATION = 64  # bytes: alignment of what torch and pk allocate
_AGAIN = 10  # a launch like an earlier one gets one schedule for so many

# What a kernel should compute: from every rank's operands by name, as they were, to what some of them must become: a
# tensor for all ranks, or one for each.
Reference = Callable[[list[dict[str, Any]]], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Check:
    """What checking one launch showed.

    ``findings``: the mistakes (:class:`pk.sim.findings.Finding`), each once.  ``schedules``: how many were run, in
    ``seconds``.  ``smallest``: for some findings, by position, the smallest launch that still shows them.  ``notes``:
    what was not checked, and why.  ``print(check)`` shows all of it.
    """

    kernel: str
    world_size: int
    sms: int
    tensors: dict[str, tuple[tuple[int, ...], str]]
    findings: tuple[Finding, ...]
    schedules: int
    seconds: float
    smallest: dict[int, Smallest] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    schedule_names: dict[int, str] = field(default_factory=dict)  # of the findings' seeds

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def __str__(self) -> str:
        ranks = f"{self.world_size} rank{'s' * (self.world_size > 1)} x {self.sms} SM{'s' * (self.sms > 1)}"
        what = {0: "no mistake", 1: "1 mistake"}.get(len(self.findings), f"{len(self.findings)} mistakes")
        many = f"{self.schedules} schedule{'s' * (self.schedules > 1)}"
        lines = [f"{self.kernel}: {what} in {many} ({ranks}, {self.seconds:.1f} s)"]
        for at, finding in enumerate(self.findings):
            lines += ["", str(finding)]
            if finding.seed is not None:
                name = self.schedule_names.get(finding.seed, "")
                lines.append(f"  replay: seed={finding.seed}, schedules=1" + (f"  ({name})" if name else ""))
            if at in self.smallest:
                lines.append(f"  smallest case that still fails: {self.smallest[at]}")
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        """Plain data, for ``--format json``."""
        found = []
        for at, finding in enumerate(self.findings):
            small = self.smallest[at].as_json() if at in self.smallest else None
            name = self.schedule_names.get(finding.seed, "") if finding.seed is not None else ""
            found.append({**finding.as_json(), "schedule": name, "smallest": small})
        tensors = {name: {"shape": list(shape), "dtype": dtype} for name, (shape, dtype) in self.tensors.items()}
        return {
            "kernel": self.kernel, "ok": self.ok, "world_size": self.world_size, "sms": self.sms, "tensors": tensors,
            "schedules": self.schedules, "seconds": round(self.seconds, 3), "findings": found,
            "notes": list(self.notes),
        }  # fmt: skip

    def raise_if_found(self) -> Check:
        """Raise :class:`pk.CheckError`, which shows them, if there are findings; else return this result."""
        if self.findings:
            raise errors.CheckError(self)
        return self


@dataclass(frozen=True, slots=True)
class Options:
    """How to check; see :func:`check`.  ``sms``: None takes what the launch would have.  ``shrink``: seconds for it."""

    schedules: int = 50
    sms: int | None = None
    seed: int = 0
    strict: bool = False
    exhaustive: bool = False
    reference: Reference | dict[str, Any] | None = None
    shrink: float = _SHRINK_S

    def __post_init__(self) -> None:
        for name, least in (("schedules", 1), ("sms", 1), ("seed", 0)):
            value = getattr(self, name)
            if name == "sms" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise errors.ArgumentError(
                    f"pk.check: {name}={errors.short(value)} must be a whole number, at least {least}.\n"
                    f"  Pass {name}={max(least, 1)}, or leave it out."
                )
        if self.reference is not None and not isinstance(self.reference, dict) and not callable(self.reference):
            raise errors.ArgumentError(_no_reference(self.reference))


class Checks:
    """Checks launches in place of the simulator (see ``simulate.substituted``), and keeps a :class:`Check` of each.

    What a launch computes under one of the schedules is left in the tensors.  If no schedule lets it end there is no
    result, and the launch raises :class:`pk.CheckError`.
    """

    def __init__(self, options: Options, pool: Pool, tell: Callable[[Check], None] | None = None) -> None:
        self.options = options
        self.done: list[Check] = []
        self.teams: set[int] = set()  # how many ranks launched: also those whose launches meet no other rank
        self._pool, self._tell = pool, tell
        self._known: set[object] = set()
        self._lock = threading.Lock()

    def __call__(self, program: Program, args: list[Arguments], sms: int, multicast: bool) -> None:
        """Check one launch."""
        from pk.sim.image import Image, copy_tensors
        from pk.sim.trial import Case

        with self._lock:
            options = self.options
            case = Case(program.ir, Image.take(args), options.sms or sms, multicast, options.strict)
            scalars = [[v for v in mine.values() if isinstance(v, int | float)] for mine in args]
            name = (id(program.ir), str(case.image.shapes()), str(scalars), case.world, case.sms)
            schedules = options.schedules if name not in self._known else -(-options.schedules // _AGAIN)
            self._known.add(name)
            made, results = _check_case(case, options, schedules, self._pool)
            self.done.append(made)
        if self._tell is not None:
            self._tell(made)
        if results is None:
            raise errors.CheckError(made)
        copy_tensors(results, args)


@contextmanager
def checking(
    schedules: int = 50,
    sms: int | None = None,
    seed: int = 0,
    strict: bool = False,
    exhaustive: bool = False,
    tell: Callable[[Check], None] | None = None,
) -> Iterator[Checks]:
    """Check every simulated launch of this process inside the ``with`` block; options as for :func:`check`.

    ``tell`` is called with each result; the object yielded keeps them in ``done``.  What ``pk.empty`` returns counts as
    unwritten, and reads as NaN.
    """
    from pk.runtime.symm import fillers
    from pk.sim.pool import Pool

    options = Options(schedules, sms, seed, strict, exhaustive)
    with Pool() as pool:
        checks = Checks(options, pool, tell)
        fillers.append(forget)
        try:
            with substituted(checks, everywhere=True):
                yield checks
        finally:
            fillers.remove(forget)


def check(
    kernel: Kernel,
    *args: Any,
    world_size: int = 4,
    schedules: int = 50,
    sms: int | None = None,
    seed: int = 0,
    strict: bool = False,
    exhaustive: bool = False,
    reference: Reference | dict[str, Any] | None = None,
    shrink: bool = True,
    **constexprs: Any,
) -> Check:
    """Check one launch of ``kernel`` on ``world_size`` simulated ranks; needs no GPU.  See the module for an example.

    Arguments are those of a call, by position or name; each is a value for all ranks, a list of ``world_size`` values,
    or a function of the rank.  Tensors are copied, those of ``pk.Parallel`` parameters into symmetric memory; those of
    one rank that share memory share it in the copies too.  A tensor on torch's ``meta`` device stands for memory that
    nobody has written.  ``sms``: thread blocks of each rank (default 4).  ``strict``: a tile that a tensor's edge cuts
    off when written is a finding.  ``exhaustive``: explore *every* interleaving of waits and signals; for small
    launches.  ``seed``: of the first schedule.

    ``reference``: what the results must be, within the rounding of their dtype: a dict from parameter name to a tensor
    or a list of one for each rank, or a function that makes it from ``[{name: tensor} for each rank]``.  ``shrink``:
    look for a smaller launch that shows the same mistake, which takes some seconds if there is one.

    Raises :class:`pk.ArgumentError` and the other errors of a call if it cannot be simulated at all; mistakes that
    only a run shows are findings, and not raised.
    """
    from pk.kernel import Kernel as KernelType
    from pk.runtime.spawn import spawn
    from pk.sim.pool import Pool

    if not isinstance(kernel, KernelType):
        raise errors.ArgumentError(
            f"pk.check: {errors.short(kernel)} is {type(kernel).__name__}, and must be a kernel.\n"
            "  Decorate it with @pk.kernel."
        )
    options = Options(schedules, sms, seed, strict, exhaustive, reference, _SHRINK_S if shrink else 0.0)
    bound = kernel.signature.bind(args, constexprs)
    _lists(kernel, bound, world_size)
    with Pool() as pool:
        checks = Checks(options, pool)

        def launch(rank: int) -> None:
            mine = _of_rank(kernel, bound, rank)
            with substituted(checks):
                kernel(*mine.values())  # by position: a parameter may be called `group`

        try:
            spawn(launch, world_size, "sim")
        except errors.RankError as error:
            cause = error.__cause__
            if not isinstance(cause, errors.CheckError):
                raise (cause.with_traceback(None) if isinstance(cause, errors.PkError) else error) from None
    return checks.done[0]


# ------------------------------------------------------------------------------------------------------ arguments
def _lists(kernel: Kernel, bound: dict[str, Any], world_size: int) -> None:
    for name, value in bound.items():
        if isinstance(value, list) and name not in kernel.signature.constants and len(value) != world_size:
            raise errors.ArgumentError(
                f"pk.check: `{name}` of kernel `{kernel.name}` is a list of {len(value)}; world_size={world_size}.\n"
                "  Pass one value for each rank, one for all, or a function of the rank."
            )


def _of_rank(kernel: Kernel, bound: dict[str, Any], rank: int) -> dict[str, Any]:
    """What rank ``rank`` passes, by parameter, tensors copied; collective if there are Parallel parameters."""
    import torch

    mine = dict(bound)
    for name, value in bound.items():
        if name in kernel.signature.constants:
            continue
        if isinstance(value, list):
            mine[name] = value[rank]
        elif callable(value) and not isinstance(value, torch.Tensor):
            mine[name] = value(rank)
    constants = kernel.signature.constants
    tensors = {n: v for n, v in mine.items() if isinstance(v, torch.Tensor) and n not in constants}
    for names in _sharing(tensors):
        parallel = any(kernel.signature.tensors.get(name) == "parallel" for name in names)
        mine |= _copies({name: tensors[name] for name in names}, parallel)
    return mine


def _sharing(tensors: dict[str, torch.Tensor]) -> list[list[str]]:
    """The names of ``tensors``, those together whose memory overlaps, in order."""
    order = {name: at for at, name in enumerate(tensors)}
    groups: list[list[str]] = []
    region, reached = "", 0
    for (where, first, end), name in sorted((_extent(t), name) for name, t in tensors.items()):
        if groups and where == region and first < reached:
            groups[-1].append(name)
            reached = max(reached, end)
        else:
            groups.append([name])
            region, reached = where, end
    return sorted((sorted(g, key=order.__getitem__) for g in groups), key=lambda g: order[g[0]])


def _extent(tensor: torch.Tensor) -> tuple[str, int, int]:
    """A name for the memory that a tensor lies in, and the bytes there: first, and last + 1."""
    import torch

    if tensor.layout != torch.strided or not tensor.numel():
        return f"nowhere {id(tensor)}", 0, 0
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.is_meta:  # has no addresses
        where, first = f"meta {tensor.untyped_storage()._cdata}", tensor.storage_offset() * tensor.element_size()
    else:
        where, first = str(tensor.device), tensor.data_ptr()
    return where, first, first + (last + 1) * tensor.element_size()


def _copies(values: dict[str, torch.Tensor], parallel: bool) -> dict[str, torch.Tensor]:
    """Copies of ``values``, in symmetric memory if ``parallel``; of several, as views of one copy of their memory."""
    import torch

    from pk.runtime.api import empty

    made: dict[str, torch.Tensor] = {}
    if len(values) == 1:
        ((name, value),) = values.items()
        made[name] = empty(tuple(value.shape), value.dtype) if parallel else torch.empty_like(value, device="cpu")
        if not value.is_meta:
            made[name].copy_(value)
    else:
        extents = {name: _extent(value)[1:] for name, value in values.items()}
        start = min(first for first, _ in extents.values()) // _ALLOCATION * _ALLOCATION
        size = max(end for _, end in extents.values()) - start
        memory = empty((size,), torch.uint8) if parallel else torch.empty(size, dtype=torch.uint8)
        for name, value in values.items():
            first, end = extents[name]
            if not value.is_meta:
                # As bytes: elements that lie in one place, as those of an expanded tensor, cannot be copied into.
                source = torch.empty(0, dtype=torch.uint8, device=value.device).set_(
                    value.untyped_storage(), value.storage_offset() * value.element_size(), (end - first,), (1,)
                )
                memory[first - start : end - start].copy_(source)
            at = (memory.storage_offset() + first - start) // value.element_size()
            made[name] = torch.empty(0, dtype=value.dtype).set_(
                memory.untyped_storage(), at, value.shape, value.stride()
            )
    for name, value in values.items():
        if value.is_meta and value.numel():
            forget(made[name])
    return made


# ------------------------------------------------------------------------------------------------------- one launch
def _check_case(case: Case, options: Options, schedules: int, pool: Pool) -> tuple[Check, list[Arguments] | None]:
    """Run ``case`` under ``schedules`` schedules; what that showed, and results, if a schedule led to any."""
    from pk.sim import campaign
    from pk.sim.findings import causes, distinct

    began = time.monotonic()
    done = campaign.run(case, options.seed, schedules, pool, options.exhaustive)
    findings = done.findings
    if options.reference is not None and done.results is not None and not causes(findings):
        wrong = _against(case, done.results, options.reference, done.schedules)
        findings = distinct([*wrong, *findings])
    seconds = min(options.shrink, 5 + time.monotonic() - began)
    smallest = campaign.smallest(case, findings, seconds) if options.shrink else {}
    tensors = {name: (shape, str(dtype)) for name, (shape, dtype) in case.image.shapes().items()}
    made = Check(
        case.kernel.name, case.world, case.sms, tensors, tuple(findings), done.schedules,
        time.monotonic() - began, smallest, tuple(done.notes), done.names(case),
    )  # fmt: skip
    return made, done.results


# -------------------------------------------------------------------------------------------------------- reference
def _against(
    case: Case, results: list[Arguments], reference: Reference | dict[str, Any], schedules: int
) -> list[Finding]:
    """A finding for each tensor that is not what ``reference`` says."""
    from pk.sim import compare
    from pk.sim.findings import Finding
    from pk.sim.memory import SimTensor

    if callable(reference):
        before = case.image.open()
        reference = reference([{n: _tensor(v) for n, v in mine.items()} for mine in before])
        if not isinstance(reference, dict):
            raise errors.ArgumentError(_no_reference(reference, "the function given as reference returned"))
    uses_mma = "mma" in compare.names_of(case.kernel)
    found = []
    for name, wanted in reference.items():
        for rank, mine in enumerate(results):
            got = mine.get(name)
            if not isinstance(got, SimTensor):
                raise errors.ArgumentError(
                    f"pk.check: the reference has `{name}`, which is no tensor of kernel `{case.kernel.name}`.\n"
                    f"  Its tensors: {', '.join(case.image.shapes())}."
                )
            want = wanted[rank] if isinstance(wanted, list | tuple) else wanted
            text = compare.against_reference(name, rank, got, _values(want), uses_mma)
            if text:
                message = f"results of kernel `{case.kernel.name}` are not what the reference says: {text}"
                found.append(Finding("wrong-result", message, (), _wrong_anyway(case, schedules)))
                break
    return found


def _wrong_anyway(case: Case, schedules: int) -> str:
    """Where to look if results are not the reference's, though nothing else was found in so many schedules."""
    from pk.sim import compare

    if compare.any_order(case.kernel):
        return (
            "Results of schedules were not compared, since fetch_add deals out places in order of arrival: compare "
            "what does not depend on that order; then look at the arithmetic and the coordinates."
        )
    if schedules == 1:
        return "One schedule was run: more of them tell whether all agree.  Look at the arithmetic and the coordinates."
    return "All schedules agree, so this is no race: look at the arithmetic and the coordinates."


def _no_reference(given: object, what: str = "reference is") -> str:
    return (
        f"pk.check: reference must be a dict or a function that returns one; {what} {type(given).__name__}.\n"
        "  Pass reference={name: tensor}, with the name of the parameter that the tensor is to be compared with."
    )


def _tensor(value: Any) -> torch.Tensor | Any:
    """A torch tensor over simulated storage; numbers as they are."""
    import torch

    from pk.sim.memory import SimTensor

    if not isinstance(value, SimTensor):
        return value
    array = value.array.view("int16") if value.array.dtype.name == "uint16" else value.array
    name = {"float8_e4m3": "float8_e4m3fn"}.get(value.dtype.name, value.dtype.name)
    return torch.from_numpy(array).view(getattr(torch, name))


def _values(wanted: Any) -> Any:
    """A tensor of the reference as NumPy values."""
    import torch

    if isinstance(wanted, torch.Tensor):
        wide = wanted.cpu().to(torch.float64 if wanted.is_floating_point() else torch.int64)
        return numpy_view(wide.resolve_neg())
    return wanted

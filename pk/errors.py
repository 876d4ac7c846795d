"""Every error that pk raises on purpose.

One class a mistake.  A message names the values, shows the user's line with a caret where there is one,
and ends with what to do.  The text is built here from fields, so that tests and readers find every wording in
one place.  ``CompileError`` and its children carry a ``Span``.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pk.checking import Check
    from pk.ir.nodes import Span


class PkError(Exception):
    """Base of every error that pk raises on purpose."""


def frame(span: Span) -> str:
    """A span as a traceback frame, with the user's line and carets under the piece meant."""
    text = span.text
    if not text:
        return f'  File "{span.file}", line {span.line}'
    indent = len(text) - len(text.lstrip())
    end = span.end_column if span.end_line == span.line else len(text)
    carets = "^" * max(min(end, len(text)) - span.column, 1)
    where = f", in {span.function}" if span.function else ""
    return (
        f'  File "{span.file}", line {span.line}{where}\n    {text.strip()}\n    {" " * (span.column - indent)}{carets}'
    )


def nearest(name: str, known: Iterable[str]) -> str:
    """`` Did you mean ...?`` if a known name is close to ``name``, else nothing."""
    known = list(known)
    found = [k for k in known if k.lower() == name.lower()] or difflib.get_close_matches(name, known, n=1)
    return f" Did you mean `{found[0]}`?" if found else ""


class _Short(reprlib.Repr):
    """Values in messages: a line at most, and never the contents of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxlong, self.maxother = 3, 120, 60, 120

    def repr1(self, x: Any, level: int) -> str:
        """Of any value, on one line."""
        if _is_array(x):
            return f"{type(x).__name__} of shape {tuple(x.shape)}, {x.dtype}"
        return " ".join(super().repr1(x, level).split()) if not isinstance(x, str) else super().repr1(x, level)

    def repr_int(self, x: int, level: int) -> str:
        """Of an int; Python itself refuses to write very long ones."""
        return super().repr_int(x, level) if x.bit_length() < 1000 else f"<an int of {x.bit_length()} bits>"


_short = _Short()


def short(value: Any) -> str:
    """A value that somebody passed, in a message: as ``repr`` if that is short, else its beginning or its shape."""
    text = _short.repr(value)
    return text if len(text) <= 160 else f"{text[:157]}..."


def shown(value: Any) -> str:
    """``value`` with its type before it, and the length of what is too long to show: ``list [1, 2]``."""
    if _is_array(value):
        return short(value)
    text = short(value)
    long = isinstance(value, Sized) and "..." in text and not isinstance(value, type)
    return f"{type(value).__name__} {text}" + (f" of length {len(value)}" if long else "")


def no_tensor(what: str, name: str, value: Any) -> str:
    """The message for ``what``, called ``name`` in the program, which should be a tensor of torch."""
    return f"{what} is {shown(value)}, and must be a torch.Tensor.\n  Pass {made_of(name, value)}."


def made_of(name: str, value: Any) -> str:
    """How to make a tensor of ``value``, called ``name``, for advice."""
    numpy = type(value).__module__ == "numpy" and type(value).__name__ == "ndarray"
    return f"`torch.from_numpy({name})`" if numpy else f"a tensor, such as `torch.as_tensor({name})`"


def _is_array(value: Any) -> bool:
    """Whether ``value`` is a tensor of torch or an array of NumPy, or like one."""
    if isinstance(value, type) or not (hasattr(value, "shape") and hasattr(value, "dtype")):
        return False
    return bool(value.shape != () or getattr(value, "is_cuda", False))


class CompileError(PkError):
    """A mistake in a kernel: what is wrong, the user's line with a caret, and what to write instead."""

    def __init__(self, what: str, span: Span, advice: str) -> None:
        self.what, self.span, self.advice = what, span, advice
        self.calls: tuple[Span, ...] = ()
        super().__init__(f"{what}\n{frame(span)}\n  {advice}")

    def called_at(self, span: Span) -> CompileError:
        """The same error, with one more line of how the helper it is in was called."""
        self.calls = (*self.calls, span)
        self.args = (f"{self.args[0]}\n  called at\n{frame(span)}",)
        return self

    def __str__(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuilt, (type(self), self.what, self.span, self.advice, self.calls)


def _rebuilt(kind: type[CompileError], what: str, span: Span, advice: str, calls: tuple[Span, ...]) -> CompileError:
    error = kind(what, span, advice)
    for call in calls:
        error.called_at(call)
    return error


# ------------------------------------------------------------------------- mistakes in a kernel (front end, checks)
class UnsupportedSyntax(CompileError):
    """Python that the language does not have."""


class UnknownName(CompileError):
    """A name, attribute or field that does not exist; the advice names the nearest that does."""


class NameOutOfScope(CompileError):
    """A name used where its value does not exist: after its loop, branch or role, or in the other class."""


class NameChangesType(CompileError):
    """A register tile or scalar keeps one shape and dtype for life."""


class NotConstant(CompileError):
    """A run-time value where a compile-time constant must stand."""


class WrongOperand(CompileError):
    """An operand of the wrong kind, or arguments that do not fit the operation's signature."""


class WrongDType(CompileError):
    """Operands whose element types do not fit the operation."""


class ShapeMismatch(CompileError):
    """Tiles whose shapes do not fit each other or the operation."""


class WrongTileShape(CompileError):
    """A tile that shared memory or the tensor core cannot hold."""


class TileTooLarge(CompileError):
    """A tile that no TMA box can move."""


class SharedMemoryExceeded(CompileError):
    """The pipelines of a class need more shared memory than a block has."""


class WrongRole(CompileError):
    """An operation in a role that may not do it, or roles in a place where none may stand."""


class WrongStage(CompileError):
    """An operation outside the stage (``fill`` or ``drain``) that it needs."""


class PipelineMisused(CompileError):
    """A pipeline filled or drained by the wrong roles, nested in itself, or used by both classes."""


class Unbalanced(CompileError):
    """Fills and drains of a pipeline that are not equal in number."""


class WrongCoordinate(CompileError):
    """A coordinate or index with the wrong number of entries."""


class WrongDeclaration(CompileError):
    """A declaration in the wrong place, or a parameter whose annotation pk does not know."""


class SourceUnavailable(PkError):
    """The source text of a kernel cannot be read (a prompt, ``python -c``, ``exec``)."""


class OutsideKernel(PkError):
    """An operation of the language called by Python instead of written in a kernel."""


# ------------------------------------------------------------------------- mistakes in a call (arguments, devices)
class ArgumentError(PkError):
    """An argument of a kernel call that cannot work; the message names the parameter and its value."""


# ------------------------------------------------------------------------- the simulator
class SimulationError(PkError):
    """Something a kernel must not do, seen in a simulation: ``what`` happened, in which role (``where``), where."""

    def __init__(self, what: str, span: Span, where: str) -> None:
        self.what, self.span, self.where = what, span, where
        super().__init__(f"{what}\n{frame(span)}\n  in {where}")

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.what, self.span, self.where)


class EndlessLoop(SimulationError):
    """A loop that took more turns than it may."""


@dataclass(frozen=True)
class BlockedRole:
    """One role of a deadlock: where it stands, what it waits for (counter ``name[index]``), its task."""

    rank: int
    block: int
    role: str
    op: str
    name: str
    index: tuple[int, ...]
    seen: int
    needed: int
    task: tuple[tuple[str, int], ...]
    span: Span

    def state(self) -> str:
        """All but rank and block."""
        if self.op == "joins":
            return f"{self.role}: begins when the communicator of its block has ended"
        index = f"[{', '.join(map(str, self.index))}]" if self.index else ""
        task = ", ".join(f"{name}={value}" for name, value in self.task)
        unit = {"fill": " drains of this stage", "drain": " fills of this stage"}.get(self.op, "")
        return (
            f"{self.role}{f' at task {task}' if task else ''}: "
            f"{self.op} of {self.name}{index} needs {self.needed}, sees {self.seen}{unit}"
        )

    def __str__(self) -> str:
        return f"rank {self.rank}, block {self.block}, {self.state()}"


class DeadlockError(PkError):
    """Roles of a simulated launch wait for what will never come.

    ``blocked`` lists them, the message groups them.  ``causes``: why, as ``pk.sim.findings.Finding`` s.
    """

    def __init__(
        self,
        kernel: str,
        seed: int,
        steps: int,
        roles: int,
        blocked: tuple[BlockedRole, ...],
        causes: tuple[Any, ...] = (),
    ) -> None:
        self.kernel, self.seed, self.steps, self.roles = kernel, seed, steps, roles
        self.blocked, self.causes = blocked, causes
        super().__init__(_deadlock_text(kernel, seed, steps, roles, blocked, causes))

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.kernel, self.seed, self.steps, self.roles, self.blocked, self.causes)


def _deadlock_text(
    kernel: str, seed: int, steps: int, roles: int, blocked: tuple[BlockedRole, ...], causes: tuple[Any, ...]
) -> str:
    """One paragraph for each statement that roles are stuck at; waits for signals first, for pipelines often follow."""
    shown = 8
    places: dict[tuple[bool, str, Span], list[BlockedRole]] = {}
    for b in blocked:
        places.setdefault((b.op in ("fill", "drain", "joins"), b.op, b.span), []).append(b)
    lines = [f"kernel `{kernel}` deadlocks: {len(blocked)} of {roles} roles wait for ever (seed {seed}, step {steps})"]
    for (_, _, span), stuck in sorted(places.items(), key=lambda place: place[0][0]):
        lines.append(frame(span))
        alike: dict[str, list[BlockedRole]] = {}
        for b in stuck:
            alike.setdefault(b.state(), []).append(b)
        groups = list(alike.values())
        for same in groups[:shown]:
            others = len(same) - 1
            lines.append(f"      {same[0]}" + (f" (and {others} like it on other blocks)" if others else ""))
        if len(groups) > shown:
            lines.append(f"      ... and {sum(map(len, groups[shown:]))} more here")
    for cause in causes:
        lines.append(f"  {cause.message}")
        if len(cause.places) > 1:
            sides = ((f"line {p.span.line}: rank {p.rank}, block {p.block}, {p.role}", p.what) for p in cause.places)
            lines += [f"      {who}: {what}" for who, what in sides]
    signals = sorted({b.name for b in blocked if b.op not in ("fill", "drain")})
    if causes:
        lines.append(f"  {causes[0].advice}")
    elif signals:
        names = ", ".join(f"`{name}`" for name in signals)
        lines.append(f"  Find who should signal {names} and why it does not, or wait for less.")
    else:
        lines.append("  Make every role fill and drain each pipeline equally often, and in one order.")
    return "\n".join(lines)


class CheckError(PkError):
    """``pk.check`` found mistakes in a kernel: ``check`` is its result, the message all that it says."""

    def __init__(self, check: Check) -> None:
        self.check = check
        super().__init__(str(check))

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.check,)


# ------------------------------------------------------------------------- the machine (driver, NVRTC, P2P, groups)
class BackendError(PkError):
    """The machine cannot do what was asked: no GPU, no NVRTC, no peer access; the message says why and what to do."""


class DriverError(BackendError):
    """A CUDA call that failed: ``call``, the driver's name for the error (``CUDA_ERROR_...``) and its description."""

    def __init__(self, call: str, code: str, description: str, advice: str = "") -> None:
        self.call, self.code, self.description, self.advice = call, code, description, advice
        tail = f"\n  {advice}" if advice else ""
        super().__init__(f"{call} failed: {code} ({description}).{tail}")

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.call, self.code, self.description, self.advice)


class EnvError(PkError):
    """An environment variable with a value that cannot be used."""

    def __init__(self, name: str, value: str, wanted: str, default: str) -> None:
        self.name, self.value, self.wanted, self.default = name, value, wanted, default
        unset = f" (default: {default})" if default else ""
        super().__init__(f"{name}={value!r} is not {wanted}.\n  Set {name} to {wanted}, or unset it{unset}.")

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.name, self.value, self.wanted, self.default)


class CompileFailed(PkError):
    """The CUDA compiler refused a kernel's text; ``log`` is what it said, ``places`` the lines it pointed at."""

    def __init__(self, kernel: str, arch: str, log: str, places: tuple[str, ...], advice: str) -> None:
        self.kernel, self.arch, self.log, self.places, self.advice = kernel, arch, log, places, advice
        shown = "".join(f"{place}\n" for place in places)
        super().__init__(f"NVRTC could not compile kernel `{kernel}` for {arch}.\n{shown}{log.strip()}\n  {advice}")

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.kernel, self.arch, self.log, self.places, self.advice)


class CacheWarning(UserWarning):
    """The compile cache cannot be used as asked; pk goes on without it.  Said once for each cause."""


class HangError(PkError):
    """A bounded wait on the device ran out, or a peer gave up; raised on the host of every rank."""


class TraceError(PkError):
    """``pk.trace`` cannot record or write what it was asked for."""


class RanksDisagree(PkError):
    """The ranks of a group do different things: other kernels, shapes or tensors.  Raised on every rank."""


class ThreadsCollide(BackendError):
    """Two threads of one rank were in calls of one group at once; the rank has left it."""


class PeerFailed(BackendError):
    """Another rank raised, died or never came, so this one cannot go on; the message names that rank and why."""


class PeerLate(PeerFailed):
    """Another rank did not come in time; it may still come."""


class RankError(PkError):
    """A rank of ``pk.spawn`` failed: ``rank`` says which, ``__cause__`` is the original.

    ``details``: its traceback; of a mistake in the use of pk, the user's frames alone.
    """

    def __init__(self, rank: int, what: str, details: str = "") -> None:
        self.rank, self.what, self.details = rank, what, details
        shown = "".join(f"  | {line}\n" for line in details.rstrip().splitlines())
        super().__init__(f"rank {rank} {what}" + (f"\n{shown.rstrip()}" if shown else ""))

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.rank, self.what, self.details)

"""Mutants: kernels with one mistake each, made on purpose to see whether the checker finds it.

``mutants(kernel)`` makes every one-place change that ``ir.mutations`` knows, in every role of the kernel, in a fixed
order.  A mutant has the name of its operator and a description in the words of the IR; both stay the same as long as
the kernel's text does, wherever in its file it stands.

Four mistakes cannot be written by a user, since the compiler takes care; mutants say them with attributes that only the
simulator understands and that code generation refuses:

    signal, signal_all, signal_each, fetch_add    completion=False    bulk stores before it are not waited for
                                                  scope="block"       it releases nothing beyond its thread block
    wait, wait_each                               fence=False         bulk operations after it are not ordered by it
    Stage                                         early=1             the use of the stage before is not waited for
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from pk.ir import nodes as ir
from pk.ir.mutations import EDITS, Place, declarations
from pk.ir.split import bodies, expressions, statements, walk

Steps = tuple[tuple[ir.Block, int, int], ...]
WEAK = frozenset({("completion", False), ("scope", "block"), ("fence", False)})


@dataclass(frozen=True, slots=True)
class Mutant:
    """A kernel with a mistake.  ``operator`` is a row of ``mutations.OPERATORS``, ``span`` the changed statement's.

    ``description`` says what was changed; ``number`` tells apart changes of one operator with one description (1, 2,
    ... in the order of the kernel).
    """

    kernel: ir.Kernel
    operator: str
    span: ir.Span
    description: str
    number: int = 1

    @property
    def name(self) -> str:
        """What the mutant is called: unique among those of its kernel."""
        return f"{self.operator}: {self.description}" + f" (#{self.number})" * (self.number > 1)


def mutants(kernel: ir.Kernel, only: frozenset[str] | None = None) -> Iterator[Mutant]:
    """Every mutant of ``kernel``, or those of the operators ``only``."""
    seen: Counter[tuple[str, str]] = Counter()
    for operator, made, span, description in _changes(kernel):
        if only is not None and operator not in only:
            continue
        seen[operator, description] += 1
        yield Mutant(made, operator, span, description, seen[operator, description])


def weakened(kernel: ir.Kernel) -> ir.Span | None:
    """Where ``kernel`` says what only mutants may say; None if nowhere."""
    for _, block in kernel.classes:
        for s in statements(block):
            if isinstance(s, ir.Stage) and s.early:
                return s.span
            ops = [s, *walk(expressions(s))]
            if any(WEAK & set(o.attrs) for o in ops if isinstance(o, ir.Do | ir.Call)):
                return s.span
    return None


def _changes(kernel: ir.Kernel) -> Iterator[tuple[str, ir.Kernel, ir.Span, str]]:
    yield from declarations(kernel)
    for place, rebuild in _places(kernel):
        for operator, edit in EDITS.items():
            for change in edit(place):
                yield operator, rebuild(change.block), change.span, change.description


@dataclass(frozen=True, slots=True)
class _Rebuild:
    """Puts a changed block back: ``steps`` are the statements around it, outermost first, each with the block it is
    in, its position there and which of its own blocks leads inwards.
    """

    kernel: ir.Kernel
    owner: int  # 0 is compute, 1 the first communicator, ...
    steps: Steps

    def __call__(self, block: ir.Block) -> ir.Kernel:
        for outer, at, which in reversed(self.steps):
            block = (*outer[:at], _with_body(outer[at], which, block), *outer[at + 1 :])
        if self.owner == 0:
            return replace(self.kernel, compute=block)
        communicators = list(self.kernel.communicators)
        communicators[self.owner - 1] = replace(communicators[self.owner - 1], body=block)
        return replace(self.kernel, communicators=tuple(communicators))


def _places(kernel: ir.Kernel) -> Iterator[tuple[Place, _Rebuild]]:
    """Every statement of the kernel, with how to put its block back."""
    for owner, (_, body) in enumerate(kernel.classes):
        yield from _inside(kernel, owner, body, "", ())


def _inside(
    kernel: ir.Kernel, owner: int, block: ir.Block, role: str, steps: Steps
) -> Iterator[tuple[Place, _Rebuild]]:
    around = tuple((outer, at) for outer, at, _ in steps)
    for at, s in enumerate(block):
        yield Place(kernel, block, at, role, around), _Rebuild(kernel, owner, steps)
        inner_role = s.kind if isinstance(s, ir.Role) else role
        for which, inner in enumerate(bodies(s)):
            yield from _inside(kernel, owner, inner, inner_role, (*steps, (block, at, which)))


def _with_body(s: ir.Statement, which: int, body: ir.Block) -> ir.Statement:
    if isinstance(s, ir.If):
        return replace(s, then=body) if which == 0 else replace(s, orelse=body)
    assert isinstance(s, ir.For | ir.While | ir.Tasks | ir.Role | ir.Stage)
    return replace(s, body=body)

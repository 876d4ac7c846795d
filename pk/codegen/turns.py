"""Where turns are taken and given: pipelines by teams that take tasks in turn, mma by warpgroups that stagger."""

from __future__ import annotations

from dataclasses import dataclass, field

from pk.errors import WrongOperand
from pk.ir import nodes as ir
from pk.ir import split
from pk.ir.schedule import NAMED_BARRIERS
from pk.ir.types import Tile


@dataclass(slots=True)
class Turns:
    """By ``id`` of a statement of the role: what to take before it, what to give after it.

    ``idle``: by task loop, the pipelines that it does not use, passed on at once; ``idle_then``, ``idle_else``: by
    branch, those that only its other half uses.
    """

    before: dict[int, list[str]] = field(default_factory=dict)
    after: dict[int, list[str]] = field(default_factory=dict)
    idle: dict[int, list[str]] = field(default_factory=dict)
    idle_then: dict[int, list[str]] = field(default_factory=dict)
    idle_else: dict[int, list[str]] = field(default_factory=dict)

    def add(self, first: ir.Statement, last: ir.Statement, what: str) -> None:
        """``what`` is held from before ``first`` to after ``last``."""
        self.before.setdefault(id(first), []).append(what)
        self.after.setdefault(id(last), []).append(what)


def pipelines_in_turn(body: ir.Block) -> tuple[str, ...]:
    """The pipelines that a consumer uses, in order of first use."""
    return tuple(dict.fromkeys(s.pipeline for s in split.statements(body) if isinstance(s, ir.Stage)))


def few_enough(body: ir.Block, in_turn: tuple[str, ...], exchange: int, teams: int) -> None:
    """What teams that take tasks in turn have too little of: named barriers, and shared memory for reductions."""
    consumer = next((s for s in split.statements(body) if isinstance(s, ir.Role) and s.teams > 1), None)
    if consumer is None:
        return
    if teams * (1 + len(in_turn)) > NAMED_BARRIERS:
        raise WrongOperand(
            f"a pingpong consumer of {teams} warpgroups uses {len(in_turn)} pipelines, too many to take turns with",
            consumer.span,
            f"Use at most {NAMED_BARRIERS // teams - 1}, or drop pingpong=.",
        )
    if exchange:
        raise WrongOperand(
            "a pingpong consumer reduces tiles across its warps, which passes through shared memory",
            consumer.span,
            "Its warpgroups would share that memory, each in another task: drop pingpong=.",
        )


def of(body: ir.Block, teams: int, stagger: int) -> Turns:
    """Those of a role with this body."""
    return team_turns(body) if teams > 1 else stagger_turns(body) if stagger else Turns()


def team_turns(body: ir.Block) -> Turns:
    """For a consumer of several teams: each pipeline is held from its first use in a task to its last.

    The points are syntactic, statements of one block: what a loop uses is held around all of it.  A branch that is the
    only one to use a pipeline takes and gives it inside, since other warpgroups would otherwise wait for all of it.
    """
    turns = Turns()
    for loop in (s for s in split.statements(body) if isinstance(s, ir.Tasks)):
        for p in pipelines_in_turn(body):
            if not _held(loop.body, p, turns):
                turns.idle.setdefault(id(loop), []).append(p)
    return turns


def _held(block: ir.Block, pipeline: str, turns: Turns) -> bool:
    """Note where ``block`` takes and gives ``pipeline``; whether it uses it."""
    users = [s for s in block if pipeline in pipelines_in_turn((s,))]
    if not users:
        return False
    only = users[0]
    if len(users) > 1 or not isinstance(only, ir.If):
        turns.add(only, users[-1], pipeline)
        return True
    for half, idle in ((only.then, turns.idle_then), (only.orelse, turns.idle_else)):
        if not _held(half, pipeline, turns):
            idle.setdefault(id(only), []).append(pipeline)
    return True


def stagger_turns(body: ir.Block) -> Turns:
    """For warpgroups that stagger: the first section of mma in each block, from its first to its last."""
    turns = Turns()
    _sections(body, turns)
    return turns


def _sections(block: ir.Block, turns: Turns) -> None:
    run: list[ir.Statement] = []
    done = False
    for s in block:
        if not _multiplies((s,)):
            done = done or bool(run)
            continue
        if _is_section(s):
            if not done:
                run.append(s)
        else:
            done = done or bool(run)
            for inner in split.bodies(s):
                _sections(inner, turns)
    if run:
        turns.add(run[0], run[-1], "")


def _is_section(s: ir.Statement) -> bool:
    """Whether ``s`` is part of a section as a whole: an mma, a stage that holds one, a loop of nothing else."""
    if isinstance(s, ir.Stage):
        return any(isinstance(t, ir.Do) and t.op == "mma" for t in s.body)
    if isinstance(s, ir.For | ir.While):
        return all(_is_section(t) for t in s.body if not _reckons(t))
    return isinstance(s, ir.Do)


def _reckons(s: ir.Statement) -> bool:
    return isinstance(s, ir.Assign) and not isinstance(s.var.type, Tile)


def _multiplies(block: ir.Block) -> bool:
    return any(isinstance(s, ir.Do) and s.op == "mma" for s in split.statements(block))

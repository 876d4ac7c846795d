"""How the function of a role begins and ends: its state, its place in each pipeline, its signals, its first task."""

from __future__ import annotations

from pk.codegen import grid, render
from pk.codegen.names import Names, shared_member
from pk.codegen.params import Params
from pk.codegen.plan import ClassPlan, Plan, RolePlan, moves
from pk.ir import nodes as ir
from pk.ir import split


class Preamble:
    """Text around the statements of one role."""

    def __init__(self, plan: Plan, block_class: ClassPlan, role: RolePlan, params: Params, names: Names) -> None:
        self._plan, self._class, self._role, self._params, self._names = plan, block_class, role, params, names
        self._stages = [s for s in split.statements(role.body) if isinstance(s, ir.Stage)]
        self._loops = [s for s in split.statements(role.body) if isinstance(s, ir.Tasks)]
        for pipeline in self._pipelines():  # the cursors' names come first: macros build them from the pipeline's
            names.local(f"{shared_member(pipeline)}_at", "cursor")
        # A loop inside another runs many times; the count then runs on as well.
        again = any(isinstance(s, ir.For | ir.While) and _contains_tasks(s.body) for s in split.statements(role.body))
        self.runs_on = len(self._loops) > 1 or again
        self.defers = 0 if plan.in_network else role.defers
        self._dynamic = block_class.dynamic and role.claims

    @property
    def step(self) -> str:
        """C++ expression that goes on to the block's next task."""
        if self._dynamic:
            return f"task = {self._claim()}{' - tasks_before' * self.runs_on}"
        return "task += " + (self._number_of_blocks() if self._plan.communicator is None else "blocks")

    def begin(self) -> str:
        """State, prefetches, cursors, signals, the first task."""
        return render.statement(
            "role_begin",
            type=f"{self._class.prefix}{self._role.kind}_role",
            maps=self._own_maps(),
            rings=[(shared_member(p), self._plan.pipeline(p).stages) for p in self._pipelines()],
            signals=[self._signals(s) for s in self._plan.kernel.signals if s.name in self._used_signals()],
            blocks=self._blocks() if self._loops else "",
            task=self._first_task() if self._loops else "",
            claims=self._dynamic,
            begun=self._dynamic and self.runs_on,
            turns=self._turns(),
            stagger=self._role.stagger,
            defers=self.defers,
        )

    def end(self) -> str:
        """What the role waits for before it leaves."""
        loads = self._role.kind in ("loader", "storer")
        filled = [shared_member(p) for p in self._pipelines() if loads and self._fills(p)]
        return render.statement(
            "role_end",
            filled=filled,
            stores=self._role.kind == "storer",
            turns=self._turns(),
            stagger=self._role.stagger,
            defers=self.defers,
            aliases=self._role.kind == "storer" and any(m.multicast for m in self._plan.maps),
        )

    def _turns(self) -> list[str]:
        return [shared_member(p) for p in self._class.turns] if self._role.teams > 1 else []

    def _pipelines(self) -> list[str]:
        return list(dict.fromkeys(s.pipeline for s in self._stages))

    def _fills(self, pipeline: str) -> bool:
        return any(s.pipeline == pipeline and s.mode == "fill" for s in self._stages)

    def _own_maps(self) -> list[str]:
        used = dict.fromkeys(self._plan.map_of(at, t.type, r.shares(s)) for r, s, at, t in moves([self._role]))
        return [self._params.map(m) for m in used if not m.everyone]

    def _used_signals(self) -> set[str]:
        operands = (o for s in split.statements(self._role.body) for o in split.walk(split.expressions(s)))
        return {o.signals for o in operands if isinstance(o, ir.Signal)}

    def _signals(self, s: ir.Signals) -> tuple[str, list[str]]:
        keys = [f"{s.name}.offset", *(f"{s.name}.{axis}" for axis in range(len(s.shape)))]
        return self._names.local(s.name, "signals"), [f"p.{self._params.member(k)}" for k in keys]

    def _blocks(self) -> str:
        if self._plan.communicator is None or self._dynamic:
            return ""
        return self._number_of_blocks()

    def _number_of_blocks(self) -> str:
        return grid.blocks(self._class, self._plan, paired=self._role.claims)

    def _first_task(self) -> str:
        return self._claim() if self._dynamic else grid.number(self._class, self._plan, paired=self._role.claims)

    def _claim(self) -> str:
        first = "true" if self._class.roles[0].kind == self._role.kind else "false"
        offset = self._params.member(f"{self._class.name}.work.offset")
        return f"shared.claims.next<{first}>(claims_at, role, p.{offset}{', deferred' if self.defers else ''})"


def _contains_tasks(block: ir.Block) -> bool:
    return any(isinstance(s, ir.Tasks) for s in split.statements(block))

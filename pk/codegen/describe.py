"""Print a plan: what a person wants to see before reading the CUDA (``PK_DEBUG=3``)."""

from __future__ import annotations

from pk.codegen.plan import ClassPlan, PipelinePlan, Plan, RolePlan


def describe(plan: Plan) -> str:
    """The plan as a table, stable from run to run."""
    consumer, others = plan.registers
    registers = f"setmaxnreg {consumer} consumer / {others} others" if consumer else "no setmaxnreg"
    shared = f"{plan.shared_bytes} bytes of shared memory"
    lines = [f"plan of {plan.kernel.name}: {plan.threads} threads, {registers}, {shared}"]
    for c in plan.classes:
        lines += _class(c)
    lines.append("tensor maps")
    for m in plan.maps:
        who = "every rank" if m.everyone else "own"
        lines.append(f"  {m.name:<16} {m.tensor} box {'x'.join(map(str, m.box))} swizzle {m.swizzle} ({who})")
    lines.append(f"dims      {' '.join(f'{t}.{axis}' for t, axis in plan.dims)}")
    lines.append(f"signals   {' '.join(s.name for s in plan.kernel.signals) or '-'}")
    lines.append(f"outputs   {' '.join(plan.outputs) or '-'}")
    lines.append(f"remote    {'a user tensor: exit words' if plan.remote else 'no user tensor: no exit words'}")
    lines.append("sites")
    for i, s in enumerate(plan.sites):
        lines.append(f"  {i:>3} {s.role:<20} {s.op:<15} {s.what:<24} {s.text}".rstrip())
    return "\n".join(lines) + "\n"


def _class(c: ClassPlan) -> list[str]:
    title = f"class {c.name}" + (f" ({c.sms} blocks)" if c.name != "compute" else "") + ", dynamic" * c.dynamic
    title += ", joins" * c.joins
    private = [
        f"  shared {t.name} {'x'.join(map(str, t.tile.shape))} {t.tile.dtype} at {t.offset}, swizzle {t.swizzle}"
        for t in c.private
    ]
    return [title, *map(_role, c.roles), *(line for p in c.pipelines for line in _pipeline(p)), *private]


def _role(r: RolePlan) -> str:
    warps = f"warp {r.first_warp}" if r.warps == 1 else f"warps {r.first_warp}..{r.first_warp + r.warps - 1}"
    return f"  {r.kind:<10} {warps:<14}{' touches other ranks' if r.remote else ''}".rstrip()


def _pipeline(p: PipelinePlan) -> list[str]:
    lines = [
        f"  pipeline {p.name}: {p.stages} stages of {p.stage_bytes} bytes at {p.offset}, {p.filler} -> {p.drainer}, "
        f"full barrier {p.full_arrivals} arrival, empty barrier {p.empty_arrivals}"
    ]
    for t in p.tiles:
        shape = "x".join(map(str, t.tile.shape))
        lines.append(f"    {t.name} {shape} {t.tile.dtype} at +{t.offset}, swizzle {t.swizzle}")
    return [line.rstrip() for line in lines]

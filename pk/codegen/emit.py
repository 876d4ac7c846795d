"""From a checked kernel to the text that NVRTC compiles, with the records the runtime needs beside it."""

from __future__ import annotations

from pk.artifact import Source
from pk.codegen import grid, options, render
from pk.codegen.lines import mapped
from pk.codegen.names import Names, entry
from pk.codegen.params import Params, only_written, poisoned
from pk.codegen.params import layout as layout_params
from pk.codegen.plan import Plan
from pk.codegen.plan import plan as make_plan
from pk.codegen.sites import signallers_of, site_names
from pk.codegen.statements import Statements
from pk.ir import nodes as ir
from pk.ir import vectors
from pk.ir.mutate import weakened


def generate(
    kernel: ir.Kernel, arch: str = "sm_90a", multicast: bool = False, sanitize: int = 0, trace: bool = False
) -> Source:
    """Emit ``kernel``, which has passed :func:`pk.ir.check.check`, for ``arch``.

    ``multicast``: what goes to or comes from every rank passes through NVLink multicast addresses (``store_async`` and
    ``store_add_async`` to a whole Parallel, ``signal_all``, ``barrier``, ``reduce``, ``all_reduce``), which the runtime
    must provide.  ``sanitize``: ``PK_SANITIZE``; ``kernel`` comes from :func:`pk.ir.sanitize.sanitized`, and shared
    memory is poisoned.  ``trace``: roles note their waits, for :func:`pk.trace`.

    Raises:
        NotConstant: see :func:`pk.codegen.plan.plan`.
        ValueError: pk emits no code for ``arch``, or ``kernel`` is a mutant that only the simulator understands.
    """
    if (span := weakened(kernel)) is not None:
        raise ValueError(f"{span}: a mutant (pk.ir.mutate) leaves out what this compiler always emits")
    plan = make_plan(kernel, multicast, sanitize, trace)
    params = layout_params(plan, Names())
    return Source(
        name=kernel.name,
        entry=entry(kernel.name),
        text=mapped(_text(plan, params, arch), f"{entry(kernel.name)}.cu"),
        arch=arch,
        options=options.flags(arch),
        fields=params.fields,
        params_size=params.size,
        threads=plan.threads,
        shared_bytes=plan.shared_bytes,
        sites=plan.sites,
        outputs=plan.outputs,
        remote=plan.remote or bool(sanitize),  # or the host could poison scratch that peers still read
        uses_signals=plan.uses_signals,
        registers=plan.registers,
        comm_sms=plan.comm_sms,
        stored=vectors.stored_tensors(kernel),
        by_rows=vectors.row_tensors(kernel),
        cluster=plan.cluster,
        least_blocks=grid.least(plan),
        multicast=bool(plan.multicast) or any(m.multicast for m in plan.maps),
        signallers=signallers_of(plan.classes),
        only_written=only_written(plan),
        sanitize=sanitize,
        trace=trace,
        local=plan.local,
        early=plan.early,
    )


def _text(plan: Plan, params: Params, arch: str) -> str:
    return render.render(
        "kernel.cu.j2",
        plan=plan,
        arch=arch,
        entry=entry(plan.kernel.name),
        params=params,
        poisoned=poisoned(plan),
        site_names=site_names(plan.sites),
        roles=[(c, r, Statements(plan, c, r, params).write()) for c in plan.classes for r in c.roles],
    )

"""Rules of ``pk.pipeline(over=p)``: a second ring over the stages of ``p``, which its filler changes in place.

The ring ``p`` passes a stage from A to B, the ring over it passes the same stage, changed, from B to C.  Both count the
same stages, so B fills the one inside each drain of the other; A fills a stage again when C has left it.
"""

from __future__ import annotations

from pk import errors
from pk.ir import nodes as ir
from pk.ir.split import bodies, expressions, statements, teams_of, walk


def over(kernel: ir.Kernel) -> None:
    """Raise PipelineMisused where a pipeline over another is not used in step with it."""
    known = {p.name: p for p in kernel.pipelines}
    taken: dict[str, ir.Pipeline] = {}
    for p in kernel.pipelines:
        if not p.over:
            continue
        base = known.get(p.over)
        if base is None:
            raise errors.PipelineMisused(
                f"`{p.name}` is over `{p.over}`, which nothing fills", p.span, "Fill and drain both, or drop over=."
            )
        if base.over or p.over in taken:
            other = f"`{taken[p.over].name}` is over it already" if p.over in taken else f"it is over `{base.over}`"
            raise errors.PipelineMisused(
                f"`{p.name}` is over `{p.over}`, but {other}", p.span, "Two rings share stages, no more."
            )
        taken[p.over] = p
        _shared(kernel, p, base)
        body = dict(kernel.classes)[p.owner]
        _by_consumers(body, p)
        _in_step(body, p)


def _shared(kernel: ir.Kernel, p: ir.Pipeline, base: ir.Pipeline) -> None:
    if p.owner != base.owner:
        raise errors.PipelineMisused(
            f"`{p.name}` of the {p.owner} class is over `{p.over}` of the {base.owner} class",
            p.span,
            "Shared memory belongs to one class of blocks.",
        )
    if p.by_rows or base.by_rows:
        raise errors.PipelineMisused(
            f"`{p.name}` is over `{p.over}`, whose rows are gathered or scattered",
            p.span,
            "Give them stages of their own.",
        )
    body = dict(kernel.classes)[p.owner]
    if teams_of(body) > 1:
        raise errors.PipelineMisused(
            f"a pingpong consumer in a class where `{p.name}` is over `{p.over}`",
            p.span,
            "Its warpgroups take stages in turn: drop pingpong=, or over=.",
        )
    if any(isinstance(s, ir.Tasks) and s.cluster > 1 for s in statements(body)):
        raise errors.PipelineMisused(
            f"pk.tasks(cluster=2) in a class where `{p.name}` is over `{p.over}`",
            p.span,
            "The blocks of a pair may fill each other's stages: drop cluster=, or over=.",
        )


def _in_step(block: ir.Block, p: ir.Pipeline, inside: bool = False) -> None:
    """Every fill of ``p`` stands directly in a drain of what it is over, which has one."""
    for s in block:
        if isinstance(s, ir.Stage) and (s.pipeline, s.mode) == (p.name, "fill") and not inside:
            raise errors.PipelineMisused(
                f"`{p.name}.fill()` outside `{p.over}.drain()`",
                s.span,
                f"`{p.name}` is over `{p.over}`: write it directly inside `with {p.over}.drain()`, once in each.",
            )
        drains = False
        if isinstance(s, ir.Stage) and (s.pipeline, s.mode) == (p.over, "drain"):
            drains = True
            fills = [t for t in bodies(s)[0] if isinstance(t, ir.Stage) and (t.pipeline, t.mode) == (p.name, "fill")]
            if len(fills) != 1:
                raise errors.PipelineMisused(
                    f"`{p.over}.drain()` with {len(fills)} `{p.name}.fill()` directly inside it",
                    s.span,
                    f"`{p.name}` is over `{p.over}`, and both go on by one stage: fill it once in each drain, not in a "
                    "loop, branch or other `with` inside it.",
                )
            _read_first(bodies(s)[0], p)
        for inner in bodies(s):
            _in_step(inner, p, drains)


def _by_consumers(body: ir.Block, p: ir.Pipeline) -> None:
    """Bulk copies of the role in the middle would still be under way when it hands a stage on."""
    for role in (s for s in statements(body) if isinstance(s, ir.Role) and s.kind != "consumer"):
        for s in statements(role.body):
            if isinstance(s, ir.Stage) and (s.pipeline, s.mode) == (p.name, "fill"):
                raise errors.PipelineMisused(
                    f"`{p.name}.fill()` in a {role.kind}, and `{p.name}` is over `{p.over}`",
                    s.span,
                    "Only a consumer changes stages in place: give the pipelines stages of their own.",
                )


def _read_first(block: ir.Block, p: ir.Pipeline, stored: bool = False) -> bool:
    """In a drain, the consumer reads before it stores: another warp may read what this one stores.

    ``stored``: something has been when ``block`` begins.  Returns whether something has when it ends.
    """
    for s in block:
        tiles = [o for o in walk(expressions(s)) if isinstance(o, ir.Shared) and o.pipeline in (p.name, p.over)]
        if tiles and isinstance(s, ir.Do) and s.op == "mma":
            raise errors.PipelineMisused(
                f"pk.mma of a tile of `{tiles[0].pipeline}`, whose stages are changed in place",
                s.span,
                "The tensor cores may still read it: load it, or give the pipelines stages of their own.",
            )
        target = s.operands[0] if isinstance(s, ir.Do) and s.op == "store" else None
        if stored and any(t is not target for t in tiles):
            raise errors.PipelineMisused(
                f"a tile of `{tiles[-1].pipeline}` is read after a store to its stage",
                s.span,
                "Load what is needed first, then store, in loops too: other warps store at the same time.",
            )
        inside = [_read_first(b, p, stored) for b in bodies(s)]
        if isinstance(s, ir.For | ir.While) and inside[0]:  # the next turn
            _read_first(s.body, p, stored=True)
        stored = stored or any(inside) or (isinstance(target, ir.Shared) and target.pipeline == p.name)
    return stored


def above(kernel: ir.Kernel, pipeline: str) -> str:
    """The pipeline over ``pipeline``, or ""."""
    return next((p.name for p in kernel.pipelines if p.over == pipeline), "")

"""``pk.nn.parallelize``: a module of torch's becomes tensor parallel, by a plan of names."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from pk.errors import ArgumentError, short
from pk.nn.agreement import Seen, Step, check_alike, seen
from pk.nn.arguments import check_module, flags
from pk.nn.styles import SequenceParallel, translated
from pk.runtime.group import current


def parallelize(
    module: torch.nn.Module, mesh_or_group: Any, plan: Mapping[str, Any] | Any, *, check_weights: bool = True
) -> torch.nn.Module:
    """``module`` with the layers that ``plan`` names replaced by this rank's share of them, in place.  Collective.

    ``mesh_or_group``: a one-dimensional ``DeviceMesh`` (``mesh["tp"]``), a process group, a pk group, or None for the
    caller's.  ``plan``: dotted name to style (:class:`pk.nn.ColwiseParallel`, ``RowwiseParallel``,
    ``SequenceParallel``, or torch's); in a name ``*`` stands for anything between dots and ``**`` for any number of
    names; a style alone is for ``module`` itself.

    All ranks pass the same plan, options included, and hold the same parameters: ``check_weights`` compares their sums
    of bits.  Rank threads of ``pk.spawn`` pass a module of their own each, such as ``copy.deepcopy(module)``.

    Either every layer of the plan is replaced, or none.  Make the optimizer afterwards: parameters are new.  A layer
    sees its rank's share of the features, so count heads by ``view(..., -1, head_size)``.

    Returns ``module``, or what replaces it.  Raises :class:`pk.errors.ArgumentError` for a name that no module has, a
    module that its style cannot replace, parameters that other modules share, and ranks whose plans or parameters
    differ, or that pass one module.
    """
    group = _group(mesh_or_group)
    owner = current(group)

    def look() -> Seen:
        check_module(module, "pk.nn.parallelize")
        flags(check_weights=check_weights)
        steps = _steps(module, plan)
        for name, (style, target, parent) in steps.items():
            style.check(name or "the module", target, parent, group)
        _check_ties(module, steps)
        return seen(module, steps, check_weights)

    check_alike(owner.attempt("pk.nn.parallelize", look), owner)
    for name, (style, target, parent) in _steps(module, plan).items():
        made = style.replace(target, group)
        if parent is None:
            module = made
        elif made is not target:
            setattr(parent, name.rpartition(".")[2], made)
    return module


def _group(given: Any) -> Any:
    if not hasattr(given, "get_group"):
        return given
    if given.ndim != 1:
        raise ArgumentError(
            f"the mesh has {given.ndim} dimensions, {given.mesh_dim_names}, and tensor parallelism goes along one.\n"
            '  Pass that one, such as `mesh["tp"]`.'
        )
    return given.get_group()


# ------------------------------------------------------------------------------------------------------------ the plan
def _steps(module: torch.nn.Module, plan: Any) -> dict[str, Step]:
    """Every module of the plan by its name: its style, itself, and the one it is in."""
    modules = dict(module.named_modules())
    if not isinstance(plan, Mapping):
        return {"": (translated(plan), module, None)}
    steps: dict[str, Step] = {}
    for pattern, given in plan.items():
        if not isinstance(pattern, str):
            raise ArgumentError(
                f"the plan has {short(pattern)} as a name, which is {type(pattern).__name__}, and must be a str.\n"
                '  Use the dotted names that `module.named_modules()` gives, such as "layers.*.up".'
            )
        style, found = translated(given), [name for name in modules if _pattern(pattern).fullmatch(name)]
        if not found:
            near = difflib.get_close_matches(pattern.replace("*", "0"), list(modules), 3, 0.3)
            names = ", ".join(near or [name for name in modules if name][:3])
            raise ArgumentError(f"no module is named `{pattern}`.\n  There are {names}.")
        for name in found:
            if name in steps and steps[name][0] != style:
                raise ArgumentError(f"the plan has two styles for `{name}`: {steps[name][0]} and {style}.")
            parent = modules[name.rpartition(".")[0]] if name else None
            steps[name] = (style, modules[name], parent)
    return steps


def _pattern(pattern: str) -> re.Pattern[str]:
    """``*`` is any text without a dot, ``**`` between dots any number of names, one or more at the end."""
    atoms, text = pattern.split("."), ""
    for i, atom in enumerate(atoms):
        last = i == len(atoms) - 1
        if atom == "**":
            text += r"[^.]+(?:\.[^.]+)*" if last else r"(?:[^.]+\.)*"
        else:
            text += re.escape(atom).replace(r"\*", "[^.]*") + ("" if last else r"\.")
    return re.compile(text)


def _check_ties(module: torch.nn.Module, steps: dict[str, Step]) -> None:
    """No parameter that is to be shared among ranks belongs to another module too; no module has two names."""
    uses = Counter(id(p) for _, p in module.named_parameters(remove_duplicate=False))
    for name, (style, target, _) in steps.items():
        for own, parameter in target.named_parameters(recurse=False):
            if uses[id(parameter)] > 1 and not isinstance(style, SequenceParallel):
                raise ArgumentError(
                    f"`{name}.{own}` is the parameter of another module too, which would keep the whole of it.\n"
                    "  Untie them, or leave both out of the plan."
                )

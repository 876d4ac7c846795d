"""The one Jinja environment, and the macros that turn ops into CUDA.

``templates/ops/*.j2`` hold one macro an op of ``pk.ir.ops.TABLE``, called with the op's rendered operands
(``pk.codegen.operands``) in order, its attributes by name, and ``at``: where it stands.  ``templates/statements.j2``
holds the macros of loops, stages and waits.  A name that a template uses and nobody gave it is an error, never an
empty string.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import jinja2

from pk.codegen.grid import communicator_blocks
from pk.codegen.lines import aligned
from pk.codegen.names import shared_member

TEMPLATES = Path(__file__).parent / "templates"


@functools.cache
def environment() -> jinja2.Environment:
    """The environment of every template: strict, and silent about the lines that only hold a tag."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        autoescape=False,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters["aligned"] = aligned
    made.filters["member"] = shared_member
    made.filters["blocks"] = communicator_blocks
    return made


def render(template: str, **values: object) -> str:
    """The text of ``templates/<template>`` with ``values``."""
    return environment().get_template(template).render(**values)


@functools.cache
def _macros(folder: str) -> dict[str, Callable[..., str]]:
    found: dict[str, Callable[..., str]] = {}
    names = [t for t in environment().list_templates() if t == folder or t.startswith(f"{folder}/")]
    for name in names:
        module = environment().get_template(name).module
        for key, value in vars(module).items():
            if isinstance(value, jinja2.runtime.Macro) and not key.startswith("_"):
                assert key not in found, f"{name}: macro {key} is defined twice"
                found[key] = value
    return found


def macros() -> set[str]:
    """Names of the ops that have a macro."""
    return set(_macros("ops"))


def op(name: str, /, *operands: object, **attributes: object) -> str:
    """The text of op ``name``."""
    return str(_macros("ops")[name](*operands, **attributes)).strip("\n")


def statement(name: str, /, **values: object) -> str:
    """The text of a statement's beginning or end: a macro of ``statements.j2``."""
    return str(_macros("statements.j2")[name](**values)).strip("\n")

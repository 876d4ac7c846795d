"""``python -m pk show FILE:KERNEL``: any stage of a kernel as text, without a GPU."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from pk.errors import ArgumentError, PkError
from pk.kernel import Kernel, Spec, as_dtype, spec
from pk.tools import output

STAGES = ("ir", "plan", "cuda", "ptx", "sass", "resources")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``python -m pk show``."""
    parser.add_argument("kernel", metavar="FILE:KERNEL", help="a Python file or module, and a kernel in it")
    parser.add_argument("--stage", choices=STAGES, default="cuda", help="what to print (default: cuda)")
    parser.add_argument(
        "-D",
        dest="constants",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="value of a pk.constexpr parameter",
    )
    parser.add_argument(
        "--dtype", dest="dtypes", action="append", default=[], metavar="NAME=DTYPE", help="dtype of a tensor (bfloat16)"
    )
    parser.add_argument(
        "--ndim", dest="ndims", action="append", default=[], metavar="NAME=N", help="dimensions of a tensor (2)"
    )


def main(options: argparse.Namespace) -> int:
    """Print one stage; errors are raised as :class:`pk.errors.PkError`."""
    kernel = find(options.kernel)
    arguments = _arguments(kernel, options)
    print(stage(kernel, options.stage, arguments))
    return 0


def stage(kernel: Kernel, name: str, arguments: dict[str, Any]) -> str:
    """The text of stage ``name`` of ``kernel`` specialised with ``arguments``."""
    if name == "plan":
        from pk.codegen.plan import plan

        return str(plan(kernel.specialise(**arguments).ir))
    if name == "resources":
        return f"{kernel.name}: {kernel.resources(**arguments)}"
    method = {"ir": kernel.ir, "cuda": kernel.source, "ptx": kernel.ptx, "sass": kernel.sass}[name]
    return method(**arguments)


def find(where: str) -> Kernel:
    """The kernel that ``FILE:KERNEL`` (or ``package.module:KERNEL``) means; a file with one kernel needs no name.

    Raises :class:`pk.errors.ArgumentError` naming the kernels there are.
    """
    place, _, name = where.partition(":")
    module = _module(place)
    found = {n: v for n, v in vars(module).items() if isinstance(v, Kernel)}
    if not name and len(found) == 1:
        return next(iter(found.values()))
    if name in found:
        return found[name]
    listing = ", ".join(found) or "no kernel"
    if not found:
        raise ArgumentError(
            f"{place} has no kernel.\n  A kernel is a function under @pk.kernel, at the top of the file."
        )
    asked = f"no kernel `{name}`" if name else "more than one kernel"
    raise ArgumentError(f"{place} has {asked}; it has {listing}.\n  python -m pk show {place}:NAME")


def _module(place: str) -> ModuleType:
    path = Path(place)
    if path.is_dir():
        raise ArgumentError(f"{place} is a folder.\n  Name a Python file in it, or a module.")
    if path.suffix != ".py":
        try:
            return importlib.import_module(place)
        except ModuleNotFoundError as error:
            raise ArgumentError(f"{place} is neither a Python file nor a module ({error}).") from error
    if not path.is_file():
        raise ArgumentError(f"There is no file {place}.")
    name = f"pk_shown_{path.stem}"
    found = importlib.util.spec_from_file_location(name, path.resolve())
    if found is None or found.loader is None:
        raise ArgumentError(f"{place} cannot be loaded as a Python file.")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # dataclasses and inspect look modules up
    sys.path.insert(0, str(path.resolve().parent))  # the file may import its neighbours, as when it is run
    try:
        found.loader.exec_module(module)
    except PkError:
        raise
    except Exception as error:  # noqa: BLE001  whatever the file raises is told
        raise ArgumentError(f"{place} cannot be loaded:\n{output.failure(error, path)}") from None
    finally:
        sys.path.pop(0)
    return module


def _arguments(kernel: Kernel, options: argparse.Namespace) -> dict[str, Any]:
    tensors, constants = kernel.signature.tensors, kernel.signature.constants
    dtypes = _pairs(options.dtypes, "--dtype", tensors, kernel.name)
    ndims = _pairs(options.ndims, "--ndim", tensors, kernel.name)
    given: dict[str, Any] = {}
    for name in {**dtypes, **ndims}:
        ndim = ndims.get(name, "2")
        if not ndim.isdigit():
            raise ArgumentError(f"--ndim {name}={ndim}: not a number of dimensions.")
        given[name] = _spec(name, dtypes.get(name, "bfloat16"), int(ndim))
    for name, value in _pairs(options.constants, "-D", constants, kernel.name).items():
        given[name] = _literal(value)
    return given


def _spec(name: str, dtype: str, ndim: int) -> Spec:
    try:
        as_dtype(dtype, name)
    except ArgumentError as error:
        raise ArgumentError(f"--dtype {name}={dtype}: {error}") from None
    try:
        return spec(dtype, ndim)
    except ArgumentError:
        raise ArgumentError(f"--ndim {name}={ndim}: pk's tensors have 1 to 4 dimensions.") from None


def _pairs(texts: list[str], flag: str, known: Any, kernel: str) -> dict[str, str]:
    pairs = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise ArgumentError(f"{flag} {text}: write NAME=VALUE.")
        if name not in known:
            raise ArgumentError(f"{flag} {text}: kernel `{kernel}` has no such parameter; it has {', '.join(known)}.")
        pairs[name] = value
    return pairs


def _literal(text: str) -> object:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text  # a word, such as a mode

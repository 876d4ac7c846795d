"""``python -m pk check FILE``: run a program on simulated ranks, every launch of it under many schedules.

The program runs as it would by itself, and needs no change; each launch leaves the results of one schedule behind.
``FILE:FUNCTION`` runs one function: without parameters as it is, ``f(rank)`` or ``f(rank, world)`` on every rank.  What
stands after ``--`` goes to the program.  The report is on stdout; what the program prints goes to stderr.

    python -m pk check examples/01_matmul_reduce_scatter.py --schedules 50
    python -m pk check mine.py:run --world-size 3 --format json
    python -m pk check mine.py --seed 1000017 --schedules 1 -- --m 256

Exit status: 0 nothing found, 1 findings, 2 it cannot be checked.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import inspect
import json
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from pk import env, errors
from pk.checking import Check, checking
from pk.runtime.spawn import spawn
from pk.tools import output

_DEFAULT_WORLD = 4
_RANK_OPTIONS = ("--ranks", "--world-size", "--world_size", "--world")  # by which programs take the number of ranks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``python -m pk check``."""
    parser.description = __doc__.split("\n\n")[0] if __doc__ else None
    parser.usage = "python -m pk check FILE[:FUNCTION] [options] [-- arguments of the program]"
    parser.add_argument("file", metavar="FILE[:FUNCTION]", help="a Python program, or a function in it")
    parser.add_argument("--schedules", type=_number(1), default=50, metavar="N", help="of each launch (default: 50)")
    parser.add_argument(
        "--world-size", type=_number(1), metavar="W",
        help="ranks of FUNCTION (default: 4); of a program, if it takes their number as --ranks or --world-size",
    )  # fmt: skip
    parser.add_argument("--sms", type=_number(1), metavar="S", help="SMs of each simulated rank (default: 4)")
    parser.add_argument("--seed", type=_number(0), default=0, metavar="S", help="of the first schedule; replays one")
    parser.add_argument("--strict", action="store_true", help="report writes that a tensor's edge cuts off")
    parser.add_argument("--exhaustive", action="store_true", help="explore every interleaving (small launches)")
    parser.add_argument("--format", choices=("text", "json"), default="text", help="of the report (default: text)")


def split(arguments: list[str]) -> tuple[list[str], list[str]]:
    """The arguments of ``check``, and those after ``--``, which are the program's; others have only the former."""
    if arguments[:1] != ["check"] or "--" not in arguments:
        return arguments, []
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def main(options: argparse.Namespace) -> int:
    """Check, print the report, and return the exit status."""
    text = options.format == "text"
    done: list[Check] = []
    stdout = sys.stdout  # where the report goes, although the program's own output is sent elsewhere

    def tell(check: Check) -> None:
        done.append(check)
        if text:
            output.put(str(check), stdout)

    problem = ""
    try:
        program = _program(options.file, options.world_size, options.rest)
        settings = {"PK_BACKEND": "sim"} | ({"PK_SIM_SMS": str(options.sms)} if options.sms else {})
        how = {name: getattr(options, name) for name in ("schedules", "seed", "strict", "exhaustive")}
        checks = checking(**how, tell=tell)
        with env.overriding(**settings), checks as made, contextlib.redirect_stdout(sys.stderr):
            problem = _run(program, options.file)
        if not done and not problem:
            problem = f"{options.file} launched no kernel in this process, so nothing was checked."
        problem = problem or _other_world(made.teams, options)
    except errors.PkError as error:
        problem = f"{type(error).__name__}: {error}"
    except KeyboardInterrupt:
        problem = "Interrupted: launches after the last one above were not checked."
    findings = sum(len(check.findings) for check in done)
    status = 1 if findings else 2 if problem else 0
    if not text:
        report = {
            "file": options.file, "ok": status == 0, "error": problem or None,
            "launches": [check.as_json() for check in done],
        }  # fmt: skip
        output.put(json.dumps(report, indent=2), stdout)
    elif problem:
        output.put(problem, sys.stderr)
    if text and findings:
        _replay(done, options)
    output.drop_unread()
    return status


def _replay(done: list[Check], options: argparse.Namespace) -> None:
    seed = next((f.seed for check in done for f in check.findings if f.seed is not None), None)
    if seed is not None:
        more = "".join(f" --{n} {v}" for n, v in (("world-size", options.world_size), ("sms", options.sms)) if v)
        strict = " --strict" if options.strict else ""
        rest = f" -- {' '.join(options.rest)}" if options.rest else ""
        command = f"python -m pk check {options.file}{more}{strict} --seed {seed} --schedules 1{rest}"
        output.put(f"\nreplay: {command}", sys.stdout)


def _other_world(worlds: set[int], options: argparse.Namespace) -> str:
    if options.world_size is None or not worlds or worlds == {options.world_size}:
        return ""
    return (
        f"--world-size {options.world_size} was asked for, but {options.file} launched on "
        f"{', '.join(map(str, sorted(worlds)))} ranks, and has none of the options {', '.join(_RANK_OPTIONS)}.\n"
        f"  Give the program its own arguments after `--`, or check one function: {options.file}:FUNCTION."
    )


# ------------------------------------------------------------------------------------------------------ the program
def _program(where: str, world: int | None, rest: list[str]) -> Callable[[], object]:
    """What to run.  Raises :class:`pk.errors.ArgumentError` if there is no such file or function."""
    place, name = _place(where)
    path = Path(place)
    if path.is_dir():
        raise errors.ArgumentError(f"{place} is a folder.\n  Name a Python program in it: {path / 'program.py'}.")
    if not path.is_file():
        raise errors.ArgumentError(f"There is no file {place}.")
    if not name:
        arguments = [*_ranks(path, world, rest), *rest]
        return lambda: _as_main(path, arguments)
    return lambda: _function(path, name, world or _DEFAULT_WORLD)


def _ranks(path: Path, world: int | None, rest: list[str]) -> list[str]:
    """The program's own option for the number of ranks, if it has one and the user did not give it."""
    if world is None:
        return []
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except SyntaxError:
        return []  # running it will say so
    texts = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    flag = next((f for f in _RANK_OPTIONS if f in texts), None)
    return [flag, str(world)] if flag and not any(r.split("=")[0] == flag for r in rest) else []


@contextlib.contextmanager
def _in_place_of(path: Path, arguments: list[str]) -> Iterator[None]:
    """``sys.argv`` and ``sys.path`` as the program would find them."""
    argv, before = sys.argv, list(sys.path)
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, before


def _as_main(path: Path, arguments: list[str]) -> None:
    with _in_place_of(path, arguments):
        runpy.run_path(str(path), run_name="__main__")


def _function(path: Path, name: str, world: int) -> None:
    with _in_place_of(path, []):
        function = runpy.run_path(str(path), run_name=f"pk_checked_{path.stem}").get(name)
        if not inspect.isfunction(function):
            raise errors.ArgumentError(
                f"{path} has no function `{name}`" + (", but a kernel" if function is not None else "") + ".\n"
                "  Name a function that makes operands and calls the kernel, such as `def run(rank, world): ...`."
            )
        needed = [p for p in inspect.signature(function).parameters.values() if p.default is p.empty]
        if len(needed) > 2:
            raise errors.ArgumentError(
                f"`{name}` in {path} has {len(needed)} parameters without a default.\n"
                "  `python -m pk check` calls f(), f(rank) or f(rank, world)."
            )
        if needed:
            spawn(function, world, "sim", (world,) * (len(needed) - 1))
        else:
            function()


def _place(where: str) -> tuple[str, str]:
    """File and function (or "") of ``FILE[:FUNCTION]``."""
    place, colon, name = where.rpartition(":")
    return (place, name) if colon and place.endswith(".py") else (where, "")


def _run(program: Callable[[], object], where: str) -> str:
    """Run it; why it failed, or nothing.  A launch without results has ended it: that is no failure of its own."""
    try:
        program()
    except SystemExit as leaving:
        if leaving.code not in (None, 0):
            return f"The program ended itself: {leaving.code}"
    except errors.PkError as error:
        if not isinstance(error, errors.CheckError) and not isinstance(error.__cause__, errors.CheckError):
            return f"{type(error).__name__}: {error}"
    except BrokenPipeError:
        output.drop_unread()
        return "The program failed: nobody reads what it prints any more."
    except Exception as error:  # noqa: BLE001  whatever the program raises is told, and is no finding
        return "The program failed:\n" + output.failure(error, Path(_place(where)[0]))
    return ""


def _number(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < least:
            raise argparse.ArgumentTypeError(f"{value} is less than {least}")
        return value

    return parse

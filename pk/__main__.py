"""``python -m pk``: show, check, env, cache, doctor.  ``python -m pk COMMAND --help`` says more."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pk import env
from pk.errors import PkError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0 done, 1 an error that is printed, 2 wrong usage.

    ``check`` returns 0 for no finding, 1 for findings, 2 for what cannot be checked.
    """
    parser = argparse.ArgumentParser(prog="python -m pk", description="Inspect pk's kernels and this machine.")
    commands = parser.add_subparsers(dest="command", required=True)

    from pk.tools import check, output, show

    show.add_arguments(
        commands.add_parser("show", help="print a stage of a kernel: ir, plan, cuda, ptx, sass, resources")
    )
    check.add_arguments(
        commands.add_parser("check", help="run a program's kernels under many schedules: races, deadlocks, bad reads")
    )
    commands.add_parser("env", help="print every PK_* variable with its value and meaning")
    cache = commands.add_parser("cache", help="list the compiled kernels on disk")
    cache.add_argument("--clear", action="store_true", help="delete them")
    commands.add_parser("doctor", help="probe this machine, and say how to fix what does not work")

    given, rest = check.split(list(sys.argv[1:] if arguments is None else arguments))
    options = parser.parse_args(given)
    options.rest = rest
    try:
        status = _run(options)
        output.drop_unread()  # here, and not when Python ends, which would complain of it
        return status
    except PkError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        output.drop_unread()
        return 0


def _run(options: argparse.Namespace) -> int:
    if options.command == "env":
        print(env.table())
        return 0
    if options.command == "cache":
        return _cache(options.clear)
    if options.command == "doctor":
        from pk.tools import doctor

        return doctor.main()
    if options.command == "check":
        from pk.tools import check

        return check.main(options)
    from pk.tools import show

    return show.main(options)


def _cache(clear: bool) -> int:
    from pk.runtime import cache

    if clear:
        print(f"deleted {cache.clear()} kernels from {cache.root()}")
        return 0
    found = cache.entries()
    for path, size in found:
        print(f"{size / 1024:8.0f} KiB  {path.relative_to(cache.root())}")
    print(f"{len(found)} kernels, {sum(n for _, n in found) / 2**20:.1f} MiB in {cache.root()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The shape of the code base: which layer imports which, how long files and functions are, what `import pk` costs."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PK = ROOT / "pk"

# layer -> the layers it may import besides itself.  errors and env may be imported from anywhere.
ANYWHERE = {"errors", "env"}
LOW = {"dsl", "ir", "artifact", "codegen", "sim", "runtime"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "env": {"errors"},
    "ir": set(),
    "artifact": set(),
    "timeline": {"artifact"},
    "dsl": {"ir"},
    "codegen": {"ir", "artifact"},
    "sim": {"ir"},
    "runtime": {"artifact", "timeline"},
    "tracing": {"runtime", "timeline"},
    "kernel": LOW | {"simulate"},
    "simulate": LOW | {"kernel"},
    "checking": LOW | {"kernel", "simulate"},
    "testing": LOW | {"checking", "kernel"},
    "ops": LOW | {"kernel", "simulate", "pk"},
    "nn": LOW | {"kernel", "simulate", "ops", "pk"},
    "tools": LOW | {"kernel", "simulate", "checking", "ops", "nn", "pk"},
    "pk": LOW | {"kernel", "simulate", "checking", "testing", "timeline", "tracing", "ops", "nn"},  # pk/__init__.py
    "__main__": LOW | {"kernel", "simulate", "ops", "nn", "tools", "pk"},
}
# Imports for annotations alone (`if TYPE_CHECKING:`) that go against the direction.
FOR_TYPES_ONLY = {("errors", "ir"), ("errors", "checking"), ("simulate", "kernel")}

# third-party package -> the layers that may import it.
THIRD_PARTY: dict[str, set[str]] = {
    "numpy": {"sim", "simulate", "runtime", "ops", "tools"},
    "jinja2": {"codegen"},
    "torch": {"runtime", "kernel", "simulate", "checking", "ops", "nn", "tools", "__main__"},
    "cuda": {"runtime", "tools"},
    "filelock": {"runtime"},
    "platformdirs": {"runtime"},
    "threadpoolctl": {"sim"},
}

INSTALLATION = ("Makefile", "check", ".ci/run", "constraints.txt", "pyproject.toml", "setup.py", "scripts/install.sh")
MAX_FILE, MAX_FUNCTION = 500, 60


def layer_of(path: Path) -> str:
    parts = path.relative_to(PK).with_suffix("").parts
    return "pk" if parts == ("__init__",) else parts[0]


def python_files() -> list[Path]:
    return sorted(PK.rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def repository_files() -> tuple[Path, ...]:
    """The text files of the repository: what git tracks or would add; in an unpacked archive, every file."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    git = subprocess.run(command, cwd=ROOT, capture_output=True, text=True) if (ROOT / ".git").exists() else None
    if git and git.returncode == 0:
        paths = [ROOT / name for name in git.stdout.split("\0") if name]
    else:
        made = {".venv", "__pycache__", "build", "dist", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis"}
        paths = [path for path in ROOT.rglob("*") if not made.intersection(path.relative_to(ROOT).parts)]
    return tuple(path for path in sorted(paths) if path.is_file() and b"\0" not in path.read_bytes()[:4096])


def imports(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Line, dotted name and "for types only" of every import in a file, those inside functions included."""
    package = ["pk", *path.relative_to(PK).parent.parts]

    def visit(node: ast.AST, types_only: bool) -> Iterator[tuple[int, str, bool]]:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, types_only) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}", types_only) for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.body:
                yield from visit(child, True)
            for child in node.orelse:
                yield from visit(child, types_only)
        else:
            for child in ast.iter_child_nodes(node):
                yield from visit(child, types_only)

    yield from visit(tree_of(path), False)


def layer_of_name(name: str) -> str | None:
    """The layer of an imported name ("pk.ir.nodes.Kernel" is "ir"), None if it is not pk's."""
    parts = name.split(".")
    if parts[0] != "pk":
        return None
    known = len(parts) > 1 and ((PK / parts[1]).is_dir() or (PK / f"{parts[1]}.py").is_file() or parts[1] == "_C")
    return parts[1] if known else "pk"


def test_imports_go_one_way() -> None:
    wrong = []
    for path in python_files():
        layer = layer_of(path)
        for line, name, types_only in imports(path):
            target = layer_of_name(name)
            if target is None or target == layer or (target in ANYWHERE - {layer} and layer not in ANYWHERE):
                continue
            if target == "_C" and path in (PK / "runtime/native.py", PK / "sim/explore.py"):
                continue
            if target in MAY_IMPORT[layer] or (types_only and (layer, target) in FOR_TYPES_ONLY):
                continue
            wrong.append(f"{path.relative_to(ROOT)}:{line}: `{layer}` imports {name} (layer `{target}`)")
    assert not wrong, "\n".join(wrong)


def test_every_layer_is_in_the_table() -> None:
    assert {layer_of(path) for path in python_files()} <= set(MAY_IMPORT)


def test_third_party_packages_stay_in_their_layers() -> None:
    wrong = []
    for path in python_files():
        for line, name, types_only in imports(path):
            package = name.split(".")[0]
            allowed = THIRD_PARTY.get(package)
            if package in sys.stdlib_module_names or package == "pk" or types_only:
                continue
            if allowed is None or layer_of(path) not in allowed:
                wrong.append(f"{path.relative_to(ROOT)}:{line}: `{layer_of(path)}` imports {name}")
    assert not wrong, "\n".join(wrong)


def test_files_are_short() -> None:
    long = []
    for path in repository_files():
        if path.suffix in {".py", ".cuh", ".j2", ".cpp", ".hpp"}:
            lines = len(path.read_text(encoding="utf-8").splitlines())
            if lines > MAX_FILE:
                long.append(f"{path.relative_to(ROOT)}: {lines} lines, the limit is {MAX_FILE}")
    assert not long, "\n".join(long)


def function_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function from its ``def``, its docstring not counted."""
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    if ast.get_docstring(node, clean=False) is not None:
        lines -= (node.body[0].end_lineno or 0) - node.body[0].lineno + 1
    return lines


def test_functions_are_short() -> None:
    long = []
    for path in python_files():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and function_lines(node) > MAX_FUNCTION:
                where = f"{path.relative_to(ROOT)}:{node.lineno}"
                long.append(f"{where}: {node.name} has {function_lines(node)} lines, the limit is {MAX_FUNCTION}")
    assert not long, "\n".join(long)


def test_importing_pk_is_quick_and_light() -> None:
    # CPU time of the process and the best of three: what else the machine does must not decide.
    program = (
        "import json, sys, time\n"
        "began = time.process_time()\n"
        "import pk\n"
        "heavy = [m for m in ('torch', 'cuda.bindings', 'cuda.core') if m in sys.modules]\n"
        "print(json.dumps([time.process_time() - began, heavy]))\n"
    )
    results = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        results.append(json.loads(done.stdout))
    assert results[0][1] == [], f"`import pk` imported {results[0][1]}: import it inside the function that needs it"
    assert min(seconds for seconds, _ in results) < 1.0


def test_no_machine_paths() -> None:
    """Nothing in the repository knows where it was written: this checkout, or a home folder (but an invented one)."""
    here = [re.escape(str(p)) for p in (ROOT, Path.home()) if len(p.parts) > 1]
    paths = re.compile(rf"(?<![\w.])(?:{'|'.join(here)})(?![\w-])|/home/(?!(?:u|me|you|user)/)[a-z]\w*/|/Users/\w+/")
    found = []
    for path in repository_files():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if paths.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:100]}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", INSTALLATION)
def test_installation_names_no_package_index_but_pytorchs(name: str) -> None:
    hosts = set(re.findall(r"\b(?:https?|file)://([^/\s\"']*)", (ROOT / name).read_text(encoding="utf-8")))
    assert hosts <= {"download.pytorch.org"}

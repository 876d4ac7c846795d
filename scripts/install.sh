#!/usr/bin/env bash
# Makes the virtual environment $1 and installs pk into it, editable, with its development tools.
#
# torch is the only large dependency, and its default Linux wheel is a CUDA build of several gigabytes.  On a machine
# without a GPU the CPU build is asked for by its exact version ("+cpu"), which no index serves as a CUDA build: first from
# where pip looks anyway (PIP_FIND_LINKS included), then from PyTorch's own index of CPU wheels; then any CPU build that
# pk runs on, from the same places.  Only if all fail is the default build taken, after saying so, with packages of CUDA
# at the versions that it wants itself.  A torch that is already in the environment is kept.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${1:-.venv}
python=${PYTHON:-python3}
cpu_index=https://download.pytorch.org/whl/cpu
oldest_torch=$(sed -n 's/^ *"torch>=\(.*\)",$/\1/p' pyproject.toml)

fail() {
    echo "pk: $*" >&2
    exit 1
}

has_gpu() { [ -e /dev/nvidia0 ] || { command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; }; }

install() { "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint "$constraints" "$@"; }

# The newest CPU build of torch that these options of pip find, as a version such as 2.9.1+cpu.
cpu_build() {
    "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --dry-run --ignore-installed --no-deps \
        --only-binary torch --report - "$@" "torch>=$oldest_torch" 2>/dev/null |
        "$venv/bin/python" -c 'import json, sys; print(json.load(sys.stdin)["install"][0]["metadata"]["version"])' \
            2>/dev/null | grep '+cpu$'
}

without_cuda_versions() { sed '/only on a machine without a GPU/,$d' constraints.txt >"$constraints"; }

install_cpu_torch() {
    local version other
    version=$(sed -n 's/^torch==//p' constraints.txt)
    echo "pk: no GPU here: installing the CPU build of torch $version"
    install "torch==$version+cpu" 2>/dev/null && return
    install --timeout 20 --retries 1 --extra-index-url "$cpu_index" "torch==$version+cpu" 2>/dev/null && return
    sed -i '/^torch==/d' "$constraints"
    if other=$(cpu_build --no-index) || other=$(cpu_build --timeout 20 --retries 1 --index-url "$cpu_index"); then
        echo "pk: there is no CPU wheel of torch $version for this Python: taking $other"
        install --timeout 20 --retries 1 --extra-index-url "$cpu_index" "torch==$other" && return
    fi
    without_cuda_versions
    echo "pk: no CPU wheel of torch $version or another version from $oldest_torch on was found" >&2
    echo "pk: (tried pip's own places and $cpu_index)." >&2
    echo "pk: taking the default build, which may be several gigabytes; to avoid it, stop now and name a folder that" >&2
    echo "pk: holds the CPU wheel: PIP_FIND_LINKS=/path/to/folder make install" >&2
    install "torch==$version" 2>/dev/null || install "torch>=$oldest_torch"
}

if [ ! -x "$venv/bin/python" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    command -v "$python" >/dev/null || fail "there is no '$python' here; name one: make PYTHON=python3.11 ..."
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "$("$python" --version 2>&1) is too old, pk needs 3.10; name another: make PYTHON=python3.11 ..."
    echo "pk: making $venv with $("$python" --version 2>&1)"
    "$python" -m venv "$venv" ||
        fail "'$python -m venv' failed; on Debian and Ubuntu it needs the package python3-venv"
fi

constraints=$venv/constraints.txt
if has_gpu; then
    without_cuda_versions
else
    cp constraints.txt "$constraints"
    "$venv/bin/python" -c 'import importlib.metadata as m; m.version("torch")' 2>/dev/null || install_cpu_torch
fi

echo "pk: installing pk and its tools"
install setuptools wheel pybind11
install --no-build-isolation --editable '.[dev]'
"$venv/bin/python" -c 'import torch; print("pk: torch", torch.__version__)'

"""What NVIDIA's pip wheels provide, found without loading any of it: versions, header folders, binary utilities.

Headers are resolved at run time from the installed wheels only.  A toolkit in /usr/local or headers in /usr/include are
never picked up: an old ``cuda.h`` there would silently change the code.  (``binary`` does look on PATH, last.)
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import shutil
import sys
from importlib import metadata
from pathlib import Path

from pk.errors import BackendError

INCLUDE = Path(__file__).resolve().parent.parent / "include"

_DEFAULT_MAJOR = 13  # of CUDA, when cuda-bindings is missing and only advice is wanted


@functools.lru_cache(maxsize=64)
def version(distribution: str) -> str | None:
    """The installed version of a distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def pk_version() -> str:
    """pk's version.  Layers below do not import the package, which is always loaded when they are."""
    return str(sys.modules[__name__.partition(".")[0]].__dict__.get("__version__", "0"))


def cuda_major() -> int:
    """The CUDA major version that cuda-bindings speaks, hence whose libraries it will load."""
    found = version("cuda-bindings")
    return int(found.split(".")[0]) if found else _DEFAULT_MAJOR


def wheel(part: str) -> str:
    """Name of NVIDIA's wheel for ``part`` (``"nvrtc"``): unsuffixed since CUDA 13, ``-cu12`` before."""
    major = cuda_major()
    return f"nvidia-cuda-{part}" if major >= 13 else f"nvidia-cuda-{part}-cu{major}"


def nvrtc_version() -> str | None:
    """Version of the NVRTC wheel, from its metadata: the library is not loaded.  None if there is no wheel."""
    return version(wheel("nvrtc"))


def header_versions() -> str:
    """One string for the CUDA headers that a kernel may include; part of the cache key."""
    return f"runtime {version(wheel('runtime'))}, cccl {version(wheel('cccl'))}"


@functools.lru_cache(maxsize=1)
def _wheel_roots() -> tuple[Path, ...]:
    """Folders in which NVIDIA's wheels put include/ and bin/: nvidia/cu13, or nvidia/cuda_runtime and its like."""
    spec = importlib.util.find_spec("nvidia")
    places = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    major = cuda_major()
    found = [place / f"cu{major}" for place in places]
    if major < 13:
        parts = ("runtime", "cccl", "nvcc", "nvdisasm", "cuobjdump")
        found += [place / f"cuda_{part}" for place in places for part in parts]
    return tuple(root for root in found if root.is_dir())


@functools.lru_cache(maxsize=1)
def include_folders() -> tuple[Path, ...]:
    """Include roots, in order: pk's own headers, CUDA's, CCCL's (which newer wheels keep a folder deeper)."""
    folders = [INCLUDE]
    for root in _wheel_roots():
        folders += [f for f in (root / "include", root / "include" / "cccl") if f.is_dir()]
    return tuple(folders)


@functools.lru_cache(maxsize=4)
def include_digest(root: Path = INCLUDE) -> str:
    """sha256 over names and contents of every file below ``root``: any change of a device header is a new key."""
    digest = hashlib.sha256()
    for path in sorted(p for p in root.rglob("*") if p.is_file() and "__pycache__" not in p.parts):
        data = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()


def binary(name: str) -> Path:
    """Path of ``nvdisasm`` or ``cuobjdump``: from the pip wheel, else from PATH.

    Raises :class:`pk.errors.BackendError` with the pip command if there is none.
    """
    for root in _wheel_roots():
        candidate = root / "bin" / name
        if candidate.is_file():
            return candidate
    on_path = shutil.which(name)
    if on_path:
        return Path(on_path)
    raise BackendError(f"`{name}` is not installed.\n  pip install {wheel(name)}")

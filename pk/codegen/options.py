"""What NVRTC is told besides the text.  The runtime adds the include paths, and knows the headers by a digest."""

from __future__ import annotations

ARCHITECTURES = ("sm_90a",)


def flags(arch: str) -> tuple[str, ...]:
    """NVRTC flags for ``arch``; include paths are not among them.

    Raises:
        ValueError: ``arch`` is not one that pk emits code for.
    """
    if arch not in ARCHITECTURES:
        raise ValueError(f"pk emits code for {', '.join(ARCHITECTURES)}, not for {arch!r}")
    return (
        f"--gpu-architecture={arch}",
        "--std=c++17",
        "--fmad=false",  # every operation rounds, as the language promises; pk.fma is the exception
        "--ptxas-options=-v",  # registers and spills, read from the log at every build
        "--generate-line-info",  # a profiler shows the user's Python lines
        "--diag-suppress=177",  # a name of shared code that this role does not need after all
    )

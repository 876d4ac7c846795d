"""IR -> CUDA text.  Needs no GPU, no driver and no CUDA."""

from pk.codegen.emit import generate
from pk.codegen.lines import readable

__all__ = ["generate", "readable"]

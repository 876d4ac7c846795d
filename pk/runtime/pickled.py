"""Pickle for values that go between processes: tensors of every dtype, of which torch does not read all back.

As of torch 2.13 a pickled tensor of float8 or of unsigned words raises when it is loaded; as integers it comes through.
"""

from __future__ import annotations

import io
import pickle
import sys
from typing import Any

loads = pickle.loads
TYPED = frozenset(
    "float64 float32 float16 bfloat16 complex128 complex64 int64 int32 int16 int8 uint8 bool".split()
)  # what torch has storages of


def dumps(value: Any) -> bytes:
    """``value`` as :func:`loads` reads it.  Raises what ``pickle.dumps`` raises."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None or type(value) is not torch.Tensor:
            return NotImplemented
        if value.layout != torch.strided or str(value.dtype).removeprefix("torch.") in TYPED:
            return NotImplemented
        integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}.get(value.element_size())
        if integers is None or value.is_quantized:
            return NotImplemented
        return _viewed, (value.detach().view(integers), value.dtype, value.requires_grad)


def _viewed(raw: Any, dtype: Any, requires_grad: bool) -> Any:
    return raw.view(dtype).requires_grad_(requires_grad)

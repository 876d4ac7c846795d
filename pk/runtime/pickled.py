"""Pickle for values that go between processes: float8 tensors too, which torch does not read back.

As of torch 2.13 a pickled float8 tensor raises when it is loaded; as bytes it comes through.
"""

from __future__ import annotations

import io
import pickle
import sys
from typing import Any

loads = pickle.loads


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
        if not (value.is_floating_point() and value.element_size() == 1):
            return NotImplemented
        return _viewed, (value.detach().view(torch.uint8), value.dtype, value.requires_grad)


def _viewed(raw: Any, dtype: Any, requires_grad: bool) -> Any:
    return raw.view(dtype).requires_grad_(requires_grad)

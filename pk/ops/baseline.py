"""The library: what torch does for the same result, with cuBLAS and, through ``torch.distributed``, NCCL or gloo.

It is what ``config="library"`` names, a candidate of every operator's own choice, and the reference that
:func:`pk.ops.tune` checks the other candidates against.  Its roundings are the library's: a partial sum is rounded to
the result's dtype, sums are made in that dtype, in an order of NCCL's, and bias and activation come after a rounding.

Where there is no process group (the ranks are those of ``pk.spawn``) rows travel through the host's memory: right, and
slow, so it is no candidate there, but ``config="library"`` can be asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from pk.ops import dense
from pk.runtime.group import process_group

if TYPE_CHECKING:
    from pk.ops.fused import Request
    from pk.runtime.group import Group

ACTIVATION: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu, "silu": torch.nn.functional.silu, "gelu": torch.nn.functional.gelu,
    "gelu_tanh": functools.partial(torch.nn.functional.gelu, approximate="tanh"),
}  # fmt: skip


def unavailable(group: Group) -> str:
    """Why the library is no candidate of the choice on this rank; "" if it is."""
    if group.backend == "sim":
        return 'a simulation is there to run the kernel; config="library" takes the library'
    if group.world_size == 1:
        return ""
    if group.shared:
        return "NCCL does not serve ranks that share a GPU"
    found = process_group(group)
    if found is None:
        return "NCCL needs a process group of torch.distributed, and these ranks have none"
    return "" if _backend(found, "cuda") == "nccl" else "the process group has no NCCL"


def run(q: Request, out: torch.Tensor | None, gathered: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The call by the library; the result, and with ``gathered`` the rows of all ranks (M, K).  Collective."""
    links = _Torch(q.group) if process_group(q.group) is not None else _Host(q.group)
    if q.operator == "all_gather_matmul":
        whole = links.all_gather(q.a)
        scale = q.scale_a
        if scale is not None and q.world > 1:
            rows = dense.vector("scale_a", scale, q.a.shape[0])
            assert rows is not None
            scale = links.all_gather(rows.unsqueeze(1))
        result = product(whole, q.b, q.out_dtype, q.bias, q.activation, scale, q.scale_b, out)
        own = whole.clone(memory_format=torch.contiguous_format) if gathered and q.world == 1 else whole
        return result, own if gathered else None
    direct = out if q.operator == "matmul_all_reduce" and out is not None and out.is_contiguous() else None
    partial = product(q.a, q.b, q.out_dtype, None, "none", q.scale_a, q.scale_b, direct)
    summed = links.all_reduce(partial) if q.operator == "matmul_all_reduce" else links.reduce_scatter(partial)
    return _finish(summed, dense.vector("bias", q.bias, q.b.shape[1]), q.activation, q.out_dtype, out), None


# -------------------------------------------------------------------------------------------------- multiplication
def product(
    a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype, bias: torch.Tensor | None = None,
    activation: str = "none", scale_a: torch.Tensor | None = None, scale_b: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """``activation(a @ b * scales + bias)`` by torch, in ``out`` or a new tensor."""
    m, n = a.shape[0], b.shape[1]
    if 0 in (m, n, a.shape[1]):
        return dense.without_k(a.new_empty((m, n), dtype=out_dtype) if out is None else out, bias, activation)
    bias = dense.vector("bias", bias, n)
    row, col = dense.vector("scale_a", scale_a, m), dense.vector("scale_b", scale_b, n)
    if a.dtype == dense.FP8 and _scales_fit(a, b, out_dtype):
        result = _scaled(a, b, out_dtype, row, col)
        return _finish(result, bias, activation, out_dtype, out)
    if a.dtype == out_dtype and row is None and col is None:
        into = out if out is not None and out.is_contiguous() else None
        if bias is not None and bias.dtype == out_dtype:
            return _finish(torch.addmm(bias, a, b, out=into), None, activation, out_dtype, out)
        return _finish(torch.mm(a, b, out=into), bias, activation, out_dtype, out)
    result = _wide(a, b)
    for scale in (None if row is None else row.unsqueeze(1), col):
        result = result if scale is None else result * scale
    return _finish(result, None if bias is None else bias.float(), activation, out_dtype, out)


def _finish(
    x: torch.Tensor, bias: torch.Tensor | None, activation: str, dtype: torch.dtype, out: torch.Tensor | None
) -> torch.Tensor:
    """What comes after the product, in ``out`` if there is one."""
    if bias is not None:
        x = x + bias
    if activation != "none":
        x = ACTIVATION[activation](x)
    if out is None:
        return x.to(dtype)
    return out if x.data_ptr() == out.data_ptr() and x.dtype == out.dtype else out.copy_(x)


def _wide(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The product in float32."""
    if a.dtype == dense.FP8:  # exact in 16 bits
        a, b = a.bfloat16(), b.bfloat16()
    if a.is_cuda and _mm_widens():
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a.float(), b.float())


@functools.cache
def _mm_widens() -> bool:
    """Whether torch has a product of 16-bit matrices in float32 (2.8)."""
    return "dtype" in torch.ops.aten.mm.overloads()


def _scales_fit(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> bool:
    """Whether ``torch._scaled_mm`` takes these with a scale for each row and column."""
    whole = a.shape[1] % 16 == 0 and b.shape[1] % 16 == 0
    return a.is_cuda and whole and out_dtype == torch.bfloat16


def _scaled(
    a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype, row: torch.Tensor | None, col: torch.Tensor | None
) -> torch.Tensor:
    ones = torch.ones((1,), dtype=torch.float32, device=a.device)
    rows = (ones if row is None else row).expand(a.shape[0]).contiguous().unsqueeze(1)
    cols = (ones if col is None else col).expand(b.shape[1]).contiguous().unsqueeze(0)
    a = a if a.stride(1) == 1 else a.contiguous()
    b = b if b.stride(0) == 1 else b.T.contiguous().T
    return torch._scaled_mm(a, b, scale_a=rows, scale_b=cols, out_dtype=out_dtype)


# --------------------------------------------------------------------------------------------------- communication
def _backend(process_group: Any, device: str) -> str:
    """The name of what moves tensors of ``device`` in ``process_group``: "nccl", "gloo"."""
    import torch.distributed as dist

    pairs = (pair.partition(":") for pair in str(dist.get_backend_config(process_group)).split(","))
    return {place: name for place, _, name in pairs}.get(device, "")


def _moved(x: torch.Tensor) -> torch.Tensor:
    """``x`` contiguous, 8-bit elements as bytes: gloo and pickle do not know float8."""
    x = x.detach().contiguous()
    return x.view(torch.uint8) if x.element_size() == 1 else x


class _Torch:
    """Collectives of a process group, on torch's current stream.  Older versions of torch have other names for two."""

    def __init__(self, group: Group) -> None:
        import torch.distributed as dist

        self.dist, self.world, self.rank = dist, group.world_size, group.rank
        self.group = process_group(group)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks."""
        if self.world == 1:
            return x
        mine = _moved(x)
        whole = mine.new_empty((self.world * mine.shape[0], *mine.shape[1:]))
        gather = getattr(self.dist, "all_gather_single", None) or self.dist.all_gather_into_tensor
        gather(whole, mine, group=self.group)
        return whole.view(x.dtype)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum, in place."""
        if self.world > 1:
            self.dist.all_reduce(x, group=self.group)
        return x

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's rows of the sum."""
        if self.world == 1:
            return x
        rows = x.shape[0] // self.world
        if _backend(self.group, x.device.type) != "nccl":
            return self.all_reduce(x)[self.rank * rows : (self.rank + 1) * rows]
        mine = x.new_empty((rows, *x.shape[1:]))
        scatter = getattr(self.dist, "reduce_scatter_single", None) or self.dist.reduce_scatter_tensor
        scatter(mine, x, group=self.group)
        return mine


class _Host:
    """The same through the host's memory, for ranks of ``pk.spawn``; sums are float32, in the order of the ranks."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """The rows of all ranks."""
        return self._meet("all-gather", x, torch.cat)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum, in place."""
        return x.copy_(self._meet("all-reduce", x, _total))

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's rows of the sum."""
        return self._meet("reduce-scatter", x, _total).chunk(self.group.world_size)[self.group.rank]

    def _meet(self, what: str, x: torch.Tensor, combine: Callable[[list[torch.Tensor]], torch.Tensor]) -> torch.Tensor:
        if self.group.world_size == 1:
            return x
        mine = _moved(x).cpu()

        def work(parts: list[torch.Tensor]) -> list[torch.Tensor]:
            whole = combine(parts)
            return [whole] * len(parts)

        whole: torch.Tensor = self.group.meet(f"the library's {what}", mine, work)
        # On the CPU the ranks that are threads hold one tensor: none may write to it.
        return whole.to(x.device, copy=True).view(x.dtype)


def _total(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([part.float() for part in parts]).sum(0).to(parts[0].dtype)

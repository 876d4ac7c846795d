"""``torch.nn.Linear`` shared by the ranks of a group: by its outputs (column) or by its inputs (row).

"Column" and "row" are those of the matrix (in, out) that multiplies from the right, as everywhere in the literature;
torch keeps its transpose, and so do these layers.  No weight is ever transposed in memory.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import torch
from torch.nn import Parameter

from pk.errors import ArgumentError, short
from pk.nn import arguments
from pk.nn.arguments import whole_number
from pk.nn.functional import check_tokens, column_parallel, gather, row_parallel
from pk.nn.shards import ALIGNMENT, Shard, check_place, common_seed, shares
from pk.ops import options as operators
from pk.ops.choose import forced
from pk.ops.model import CONFIGS
from pk.runtime.group import current
from pk.runtime.names import name_of

L = TypeVar("L", bound="ParallelLinear")


class ParallelLinear(torch.nn.Module):  # type: ignore[misc]
    """What the two layers have in common.

    group_name: of the group, "" for the caller's.  rank, world_size: this rank's place in it, whose share the layer
    holds.  shards: which parameters the ranks share, and how.  options: of the operators.
    """

    forms: tuple[str, str]
    """Operators of pk.ops: in the sequence form, and in the other."""
    shards: dict[str, Shard]

    def __init__(self, given: dict[str, Any], options: dict[str, Any]) -> None:
        """``given``: the other arguments of the constructor.  Collective, but on "meta"."""
        super().__init__()
        owner = current(given["group"])
        self.group_name, self.rank, self.world_size = name_of(given["group"]), owner.rank, owner.world_size
        self.options = options

        def look() -> str:
            self._check(given)
            operators.within(owner, options["comm_sms"])
            told = {**given, **options, "dtype": given["dtype"] or torch.get_default_dtype()}
            shown = ", ".join(f"{name}={value}" for name, value in told.items() if name not in ("group", "device"))
            return f"{type(self).__name__}({shown})"

        arguments.together(owner, given["device"], f"a {type(self).__name__}", look)
        self._make(given["bias"], given["device"], given["dtype"])

    def _check(self, given: dict[str, Any]) -> None:
        """Take over what the constructor was given, unless it cannot be."""
        self.in_features = whole_number("in_features", given["in_features"])
        self.out_features = whole_number("out_features", given["out_features"])
        self.sequence_dim = whole_number("sequence_dim", given["sequence_dim"])
        self.sequence_parallel = given["sequence_parallel"]
        arguments.flags(bias=given["bias"], sequence_parallel=self.sequence_parallel)
        arguments.check_dtype(given["dtype"])
        arguments.check_device(given["device"])
        operator = self.forms[0 if self.sequence_parallel else 1]
        config = self.options["config"]
        operators.check(operator, activation=given.get("activation"), **self.options)
        operators.check_named(config)
        if operator not in operators.MATMUL:
            forced(operator, self.options["deterministic"], self.options["comm_sms"], config)
        elif isinstance(config, str) and config not in (*CONFIGS, operators.LIBRARY):
            raise ArgumentError(
                f"config={short(config)} is no configuration.\n  There are {', '.join(CONFIGS)}, {operators.LIBRARY}."
            )

    @property
    def tokens(self) -> int | None:
        """The dimension along which the ranks share tokens; None in the form in which they do not."""
        return self.sequence_dim if self.sequence_parallel else None

    def _make(self, bias: bool, device: Any, dtype: Any) -> None:
        """Parameters for ``shards``, on "meta" without values."""
        whole = {"weight": (self.out_features, self.in_features), "bias": (self.out_features,)}
        for name, shape in whole.items():
            if name == "bias" and not bias:
                self.register_parameter("bias", None)
                continue
            held = list(shape)
            if name in self.shards:
                held[self.shards[name].dim] //= self.world_size
            self.register_parameter(name, Parameter(torch.empty(held, device=device, dtype=dtype)))
        if not self.weight.is_meta:
            self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw what ``torch.nn.Linear`` would, whole, from a seed that all ranks have, and keep this rank's share.

        Collective.  So the world size does not change what a seed gives, nor do ranks that were seeded differently
        end up with different biases.
        """
        if self.weight.is_meta:
            return
        seed = common_seed(self.group_name)
        generator = torch.Generator(device=self.weight.device).manual_seed(seed)
        bound = 1 / math.sqrt(self.in_features)
        for name, shape in (("weight", (self.out_features, self.in_features)), ("bias", (self.out_features,))):
            held = getattr(self, name)
            if held is not None:
                whole = torch.empty(shape, device=held.device, dtype=held.dtype)
                self._keep(name, whole.uniform_(-bound, bound, generator=generator))

    def _keep(self, name: str, whole: torch.Tensor) -> None:
        with torch.no_grad():
            getattr(self, name).copy_(self._share(name, whole))

    def _share(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        shard = self.shards.get(name)
        return whole if shard is None else shard.take(whole, self.rank, self.world_size)

    @classmethod
    def _of(cls: type[L], linear: torch.nn.Linear, device: Any, given: dict[str, Any]) -> L:
        arguments.check_linear(linear, "linear")
        arguments.check_device(device)
        weight, bias = linear.weight, linear.bias
        made = cls(
            linear.in_features, linear.out_features, bias is not None, device="meta", dtype=weight.dtype, **given
        )  # type: ignore[call-arg]
        for name, whole in (("weight", weight), ("bias", bias)):
            if whole is not None:
                share = made._share(name, whole.detach())
                held = share.clone(memory_format=torch.contiguous_format).to(device or whole.device)
                setattr(made, name, Parameter(held, requires_grad=whole.requires_grad))
        return made.train(linear.training)

    def extra_repr(self) -> str:
        """Shown by ``print(module)``."""
        form = f"sequence_dim={self.sequence_dim}" if self.sequence_parallel else "sequence_parallel=False"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"rank {self.rank} of {self.world_size}, {form}"
        )


class ColumnParallelLinear(ParallelLinear):
    """``activation(x @ weight.T + bias)``, every rank computing its share of the outputs.

    In the sequence form x (tokens / world, ..., in) is this rank's share of the tokens along ``sequence_dim`` and the
    result (tokens, ..., out / world): an all-gather inside the product.  With ``sequence_parallel=False`` x holds all
    tokens, alike on every rank, and the communication is in the backward pass.

    ``activation``: "relu", "gelu", "gelu_tanh" or "silu", in the product's epilogue.  ``parts``: extents of the
    output, each of which is shared by itself, as (q, k, v) of a fused projection.  ``gather_output``: every rank gets
    all outputs, which must be used alike on all.  ``save_gathered=False``: gather the input again in the backward pass
    instead of keeping it.  ``deterministic``, ``comm_sms`` and ``config`` as in :func:`pk.ops.all_gather_matmul`.

    Every part is a multiple of 8 times the world size, ``in_features`` of 8.  Making one is collective, but on "meta".
    Raises :class:`pk.errors.ArgumentError` for extents, activations and options that cannot be, and if the ranks make
    different layers; in a forward pass, for a layer that holds another rank's share, and for an input that does not
    fit.
    """

    forms = ("all_gather_matmul", "replicated_matmul")

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, group: Any = None,
        sequence_parallel: bool = True, sequence_dim: int = 0, activation: str | None = None,
        parts: tuple[int, ...] | None = None, gather_output: bool = False, save_gathered: bool = True,
        deterministic: bool = False, comm_sms: int | None = None, config: str | None = None,
        device: Any = None, dtype: Any = None,
    ) -> None:  # fmt: skip
        options = {
            "save_gathered": save_gathered, "deterministic": deterministic, "comm_sms": comm_sms, "config": config,
        }  # fmt: skip
        given = {
            "in_features": in_features, "out_features": out_features, "bias": bias, "group": group,
            "sequence_parallel": sequence_parallel, "sequence_dim": sequence_dim, "activation": activation,
            "parts": parts, "gather_output": gather_output, "device": device, "dtype": dtype,
        }  # fmt: skip
        super().__init__(given, options)

    def _check(self, given: dict[str, Any]) -> None:
        super()._check(given)
        _check_alignment("in_features", self.in_features)
        self.activation, self.gather_output = given["activation"], given["gather_output"]
        arguments.flags(gather_output=self.gather_output)
        along = shares("out_features", self.out_features, given["parts"], self.world_size)
        self.shards = {"weight": Shard(0, along), "bias": Shard(0, along)}
        if self.gather_output and len(along) > 1:
            raise ArgumentError("`gather_output` of several parts would mix them.\n  Make a layer for each part.")

    @classmethod
    def from_linear(
        cls, linear: torch.nn.Linear, *, group: Any = None, device: Any = None, **options: Any
    ) -> ColumnParallelLinear:
        """This rank's share of ``linear``, which all ranks hold alike: a copy, on ``device`` or where it was.

        ``options`` are the constructor's.
        """
        return cls._of(linear, device, {"group": group, **options})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        check_place(self)
        result = column_parallel(
            x, self.weight, self.bias, activation=self.activation, group=self.group_name, sequence_dim=self.tokens,
            **self.options,
        )  # fmt: skip
        return gather(result, -1, self.group_name) if self.gather_output else result


class RowParallelLinear(ParallelLinear):
    """``sum over ranks of x @ weight.T, + bias``, every rank holding its share of the inputs, and the whole bias.

    x is (tokens, ..., in / world), as a :class:`ColumnParallelLinear` gives it.  In the sequence form the result is
    this rank's share of the tokens along ``sequence_dim``: a reduce-scatter inside the product.  With
    ``sequence_parallel=False`` it is all tokens, the same bits on every rank: an all-reduce inside the product.

    ``in_features`` is a multiple of 8 times the world size, ``out_features`` of 8.  ``deterministic``, ``comm_sms``
    and ``config`` as in :func:`pk.ops.matmul_reduce_scatter`.  Making one is collective, but on "meta".
    Raises :class:`pk.errors.ArgumentError` as :class:`ColumnParallelLinear` does.
    """

    forms = ("matmul_reduce_scatter", "matmul_all_reduce")

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, group: Any = None,
        sequence_parallel: bool = True, sequence_dim: int = 0, parts: tuple[int, ...] | None = None,
        deterministic: bool = False, comm_sms: int | None = None, config: str | None = None,
        device: Any = None, dtype: Any = None,
    ) -> None:  # fmt: skip
        options = {"deterministic": deterministic, "comm_sms": comm_sms, "config": config}
        given = {
            "in_features": in_features, "out_features": out_features, "bias": bias, "group": group,
            "sequence_parallel": sequence_parallel, "sequence_dim": sequence_dim, "parts": parts, "device": device,
            "dtype": dtype,
        }  # fmt: skip
        super().__init__(given, options)

    def _check(self, given: dict[str, Any]) -> None:
        super()._check(given)
        _check_alignment("out_features", self.out_features)
        self.shards = {"weight": Shard(1, shares("in_features", self.in_features, given["parts"], self.world_size))}

    @classmethod
    def from_linear(
        cls, linear: torch.nn.Linear, *, group: Any = None, device: Any = None, **options: Any
    ) -> RowParallelLinear:
        """This rank's share of ``linear``, which all ranks hold alike: a copy, on ``device`` or where it was.

        ``options`` are the constructor's.
        """
        return cls._of(linear, device, {"group": group, **options})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        check_place(self)
        dim = self.tokens
        if dim is not None and isinstance(x, torch.Tensor) and -x.ndim <= dim < x.ndim:
            check_tokens(x, dim, self.world_size)
        return row_parallel(x, self.weight, self.bias, group=self.group_name, sequence_dim=self.tokens, **self.options)


def _check_alignment(name: str, extent: int) -> None:
    if extent <= 0 or extent % ALIGNMENT:
        raise ArgumentError(f"{name}={extent} must be a positive multiple of {ALIGNMENT}: rows of 16 bytes.")

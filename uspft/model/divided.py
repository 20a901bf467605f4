"""Tensor parallel modules, of whose weights a rank stores some rows or columns. A call computes
with all of these, or with a part if its layout has a higher tensor degree than the stored one.

The layout comes with each call. Under ZeRO-3 a module's weight is released after it has run, so
that no part of it is saved for the backward, which cuts the part again.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from uspft.families.projections import COLUMNS, KV, ROWS, Projection
from uspft.model.dropout import dropouts_in
from uspft.parameters.shards import used_of_stored, used_ranges
from uspft.tensor.parts import Range, Used, cut, put_back
from uspft.tensor.sums import Maker, summed, whole_head

if TYPE_CHECKING:
    from uspft.comm import Group
    from uspft.layout import Layout
    from uspft.model.attention import Bound
    from uspft.model.dropout import TokenDropout
    from uspft.parameters.shards import MatrixSplit
    from uspft.tensor.interleaved import PutOffWeight


def used_by(
    bound: Bound, held: Layout | None, columns: MatrixSplit, rows: MatrixSplit | None = None
) -> Used:
    """Return the part of this rank's shard of a parameter that a call uses.

    held: the layout in which ranks store matrices; None: always that of the call (`switching:
    move`). columns: the split over mesh columns, or Megatron's tensor parallel ranks. rows: the
    split over mesh rows.
    """
    mesh = bound.world.mesh
    found: list[tuple[Range, ...] | None] = [None] * max(2, columns.dim + 1)
    for split, group, axis in (
        (columns, mesh.columns, "mesh_columns"),
        (rows, mesh.rows, "mesh_rows"),
    ):
        if split and divides(bound, split):
            ways = ways_held(split, held, axis, group)
            found[split.dim] = used_of_stored(split, group.index, group.size, ways)
    return found


def divides(bound: Bound, split: MatrixSplit) -> bool:
    """Return whether a call's layout divides a parameter with this split. An `in_order` split, of
    features that only a mesh divides, has no effect under Megatron's tensor parallelism."""
    return bound.world.layout.is_mesh or not split.in_order


def ways_held(split: MatrixSplit, held: Layout | None, axis: str, group: Group) -> int:
    """Return the degree at which ranks store a parameter with this split along a mesh axis.

    held: as in `used_by`. group: the ranks over which the call divides it.
    """
    if held is None:
        return group.size
    return 1 if split.in_order and not held.is_mesh else int(getattr(held, axis))


class Call:
    """The arguments of a layer's current call, which its tensor parallel modules share.

    held: as in `used_by`.
    """

    bound: Bound

    def __init__(self, held: Layout | None) -> None:
        self._held, self.again = held, False
        self.dropouts: list[tuple[TokenDropout, MatrixSplit]] = []
        """The dropouts whose input features are split over ranks, each with that split."""
        self.put_off: dict[int, PutOffWeight] = {}
        """The weights whose gradients are computed later (tensor/interleaved.py), by id."""

    @property
    def group(self) -> Group:
        """The tensor parallel ranks of this call; on a mesh, its columns."""
        return self.bound.world.mesh.columns

    @property
    def on_mesh(self) -> bool:
        """Whether this call's layout is a mesh."""
        return self.bound.world.layout.is_mesh

    def begin(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Store the arguments of a call; a hook before the layer runs, recomputation included."""
        self.bound = kwargs["uspft"]
        self.again = id(self) in self.bound.begun
        self.bound.begun.add(id(self))
        for dropout, split in self.dropouts:
            dropout.ranges = self.ranges(split) if divides(self.bound, split) else None

    def enter(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Gather all tokens for a block, in a hook before it runs; on a mesh and with copies the
        block's own modules do that."""
        if self.on_mesh or self.bound.copies > 1:
            return None
        if args:
            return (self._entered(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self._entered(kwargs["hidden_states"])}

    def _entered(self, x: Tensor) -> Tensor:
        """Return x [..., t, d] gathered, [..., T, d]; blocks of experts have no batch dimension."""
        return self.bound.enter(x) if x.dim() == 3 else self.bound.enter(x[None])[0]

    def leave(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        """Sum the ranks' partial outputs of a row-split projection, in a hook after it; on a mesh
        and with copies that is already done."""
        if self.on_mesh or self.bound.copies > 1:
            return out
        return self.bound.leave(out) if out.dim() == 3 else self.bound.leave(out[None])[0]

    def ranges(self, split: MatrixSplit) -> tuple[Range, ...]:
        """Return the ranges that this rank uses along a split's dimension, in coordinates of the
        whole."""
        return used_ranges(split, self.group.index, self.group.size, self.ways(split))

    def ways(self, split: MatrixSplit) -> int:
        """Return the degree at which mesh columns store a parameter with this split."""
        return ways_held(split, self._held, "mesh_columns", self.group)

    def used(self, columns: MatrixSplit, rows: MatrixSplit | None = None) -> Used:
        """Return the part of this rank's shard that the call uses, as `used_by`."""
        return used_by(self.bound, self._held, columns, rows)

    def makers(self, split: MatrixSplit, dim: int) -> tuple[Maker, ...]:
        """Return the ranks that compute a part of this rank's KV head, in the order of its rows.

        split: of the fused projection. dim: the rows of a head.
        """
        return _makers(split, dim, (self.group.index, self.group.size, self.ways(split)))


@cache
def _makers(split: MatrixSplit, dim: int, place: tuple[int, int, int]) -> tuple[Maker, ...]:
    rank, degree, held = place
    keys = {m: used_ranges(split, m, degree, held)[1] for m in range(degree)}
    head = keys[rank][0] // dim
    own = sorted((rows, m) for m, rows in keys.items() if rows[0] // dim == head)
    return tuple(Maker(m, stop - start) for (start, stop), m in own)


class PartLinear(nn.Module):
    """A linear projection, or A or B of an adapter, that is split along one dimension.

    The bias of a row-split projection is replicated, and only the first rank adds it before the sum
    over ranks.
    """

    def __init__(self, linear: nn.Linear, split: MatrixSplit, call: Call) -> None:
        super().__init__()
        self.weight, self._split, self.call = linear.weight, split, call
        self.register_parameter("bias", linear.bias)
        self.bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's part of the projection. x: with the input features that it uses."""
        return part_of_product(x, (self.weight, self.bias), self._split, self.call)

    def here(self) -> tuple[Tensor, Tensor | None]:
        """Return the part of the weight that a call uses, and of the bias if column-split."""
        used = self.call.used(self._split)
        bias = None if self._split.dim == ROWS or self.bias is None else cut(self.bias, used[:1])
        return cut(self.weight, used), bias


def part_of_product(
    x: Tensor, held: tuple[Tensor, Tensor | None], split: MatrixSplit, call: Call
) -> Tensor:
    """Return this rank's part of a projection of x [1, T, features], split along one dimension.

    held: the stored weight and bias. split: how columns divide it.
    """
    weight, bias = held
    used, put_off = call.used(split), call.put_off.get(id(weight))
    if bias is not None and split.dim == ROWS and call.group.index:
        bias = bias * 0.0  # not left out, so that every rank has a gradient for it
    if put_off:
        return some_product(x, weight.detach(), bias, used, *put_off)
    if used[split.dim] is None:
        return nn.functional.linear(x, weight, bias)
    return some_product(x, weight, bias, used)


def some_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, used: Used, *put_off: Any
) -> Tensor:
    """Return the product of x with some ranges of a weight, plus the bias of the same rows.

    put_off: the fields of a PutOffWeight, if the weight's gradient is computed later.
    """
    if bias is not None and used[COLUMNS] is not None:
        bias = cut(bias, used[:1])
    out: Tensor = _PartProduct.apply(x, weight, bias, used, *put_off)
    return out


def wide(x: Tensor) -> torch.dtype:
    """Return the type in which a norm or a loss computes: float32 or wider."""
    return torch.promote_types(x.dtype, torch.float32)


def eps_of(norm: Any) -> float:
    """Return the epsilon of one of transformers' RMS norms."""
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)


class SplitNorm(nn.Module):
    """An RMS norm over features that are split over ranks, such as OLMo 2's over all heads."""

    def __init__(self, norm: Any, split: MatrixSplit, call: Call, added: float = 0.0) -> None:
        """Replace one of transformers' norms.

        split: of its features, by heads, which several ranks may share. added: a constant added to
        its weight: 1 in families whose norms are initialised to 0.
        """
        super().__init__()
        self.weight = norm.weight
        self._eps = eps_of(norm)
        self._split, self._call, self._added = split, call, added

    def scale(self, x: Tensor) -> Tensor:
        """Return the factor of each token of x [1, T, this rank's features], [1, T, 1]."""
        group, (units,) = self._call.group, self._split.units or self._split.stacked
        x, sharing = x.to(wide(x)), -(-group.size // units)
        if group.size == 1 or not divides(self._call.bound, self._split):
            mean = x.pow(2).mean(-1, keepdim=True)
        else:
            squares = summed(x.pow(2).sum(-1, keepdim=True), group)
            mean = squares / sharing / (x.shape[-1] * group.size // sharing)
        return torch.rsqrt(mean + self._eps)

    def here(self) -> Tensor:
        """Return the weight of this rank's features."""
        weight = cut(self.weight, self._call.used(self._split)[:1])
        return weight + self._added if self._added else weight

    def forward(self, x: Tensor) -> Tensor:
        """Return x [1, T, this rank's features] normed over all ranks' features, in x's dtype."""
        own = x.to(wide(x))
        return (self.here() * (own * self.scale(own))).to(x.dtype)


def use_part(module: nn.Module, name: str, split: MatrixSplit, call: Call) -> None:
    """Make a module read only the part of its own parameter that a call uses.

    transformers reads the parameter as an attribute; a property on a class made for this module
    overrides that. The parameter itself stays registered under its name.
    """

    def read(self: nn.Module) -> Tensor:
        if name in self.__dict__:  # a replacement for some heads
            found: Tensor = self.__dict__[name]
            return found
        held = self._parameters[name]
        assert held is not None
        if not hasattr(call, "bound"):
            return held
        used = call.used(split)[:1]
        return cut(held, used)

    kind = type(module)
    own = {name: property(read), "__module__": kind.__module__}
    module.__class__ = type(kind.__name__, (kind,), own)


class FusedHeads:
    """The heads of an attention whose queries, keys and values are one fused projection.

    transformers reads their numbers from the config and the module, which are set for each call.
    """

    def __init__(self, attention: Any, split: MatrixSplit, call: Call) -> None:
        self._config, self._dim = attention.config, attention.head_dim
        self._heads, self._kv_heads = (
            self._config.num_attention_heads,
            attention.num_key_value_heads,
        )
        self._split, self._call = split, call

    def count(self, attention: Any, args: Any) -> None:
        """Set the numbers of this rank's heads in a hook before attention runs, unless a group of
        heads has set them."""
        if attention.config is not self._config:
            return
        degree = self._call.group.size
        self._config.num_attention_heads = self._heads // degree
        attention.num_key_value_heads = max(1, self._kv_heads // degree)

    def complete(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        """Return the projection's output [1, T, features] with whole KV heads, of which this rank
        may have computed only some rows."""
        group = self._call.group
        if group.size <= self._kv_heads:
            return out
        makers = self._call.makers(self._split, self._dim)
        queries = self._heads // group.size * self._dim
        q_Tn, kv_T2n = out[0, :, :queries], out[0, :, queries:].unflatten(-1, (2, -1))
        kv_T2D = whole_head(kv_T2n, makers, group)
        return torch.cat([q_Tn, kv_T2D.flatten(1)], -1)[None]


def divide_module(
    owner: nn.Module,
    named: tuple[str, str],
    projection: Projection,
    splits: Mapping[int, MatrixSplit],
    call: Call,
) -> None:
    """Make a projection or a norm inside a block compute with the part that a call uses.

    named: the names of the block and of the module in it. splits: by a module's id.
    """
    block, last = named
    module: Any = getattr(owner, last, None)
    split = splits.get(id(module))
    if split is None:  # whole on each rank, or not in this layer
        return
    if "norm" in last:
        setattr(owner, last, SplitNorm(module, split, call))
        return
    _divide(owner, last, splits, call)
    if projection.dim == ROWS:
        call.dropouts += [(dropout, split) for dropout in dropouts_in(module)]
        enter_and_leave(owner, last, block, call)
    elif len(projection.blocks) > 1 and KV in projection.blocks:
        share_heads(owner, last, split, call)


def _divide(owner: nn.Module, name: str, splits: Mapping[int, MatrixSplit], call: Call) -> None:
    """Make a projection, and A and B of its adapter, compute with the parts that a call uses.

    splits: by a module's id.
    """
    for path, module in list(owner.get_submodule(name).named_modules(prefix=name)):
        if isinstance(module, nn.Linear) and id(module) in splits:
            parent, _, last = path.rpartition(".")
            part = PartLinear(module, splits[id(module)], call)
            setattr(owner.get_submodule(parent), last, part)


def enter_and_leave(owner: nn.Module, last: str, block: str, call: Call) -> None:
    """Register the hooks that gather a block's input, and sum the output of its last projection.

    last: that projection's name. block: the block's.
    """
    owner.register_forward_pre_hook(call.enter, with_kwargs=True)
    # An MLP may run in tiles, so its sum comes after the whole block.
    end = owner if block.startswith("mlp") else owner.get_submodule(last)
    end.register_forward_hook(call.leave)


def share_heads(attention: Any, name: str, split: MatrixSplit, call: Call) -> None:
    """Make an attention that cuts its fused projection by the config's numbers of heads use this
    rank's numbers.

    name: of the projection, whose hooks must be registered last. split: of its rows.
    """
    attention.config = copy.copy(attention.config)  # transformers' own is the whole model's
    heads = FusedHeads(attention, split, call)
    attention.register_forward_pre_hook(heads.count)
    attention.get_submodule(name).register_forward_hook(heads.complete)


class _PartProduct(torch.autograd.Function):
    """A linear product with some ranges of a weight; the gradient elsewhere is 0."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        used: Used,
        *put_off: Any,
    ) -> Tensor:
        """put_off: as in `some_product`."""
        trained = ctx.needs_input_grad[1] or any(ctx.needs_input_grad[4:])
        ctx.save_for_backward(x if trained else None, weight)
        ctx.used, ctx.sums = used, put_off[1] if put_off else None
        return nn.functional.linear(x, cut(weight, used), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        d_x = d_weight = d_bias = None
        rows = dout.flatten(0, -2)
        if ctx.needs_input_grad[0]:
            d_x = dout @ cut(weight, ctx.used)
        if ctx.needs_input_grad[1]:
            d_weight = put_back(rows.t() @ x.flatten(0, -2), weight, ctx.used)
        if ctx.needs_input_grad[2]:
            d_bias = rows.sum(0)
        if ctx.sums is None:
            return d_x, d_weight, d_bias, None
        if x is not None:
            ctx.sums.put_off(rows, x.flatten(0, -2), ctx.used)
        return d_x, None, d_bias, None, None, None

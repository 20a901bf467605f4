"""Modules of which a rank holds some rows or columns, and which compute with those that the row's
layout uses: all of them, or the part that the rank would hold if its matrices were divided further.

They ask the call for the layout. Under ZeRO-3 a module's weight is taken away after it has run: no
part of it is kept for the backward pass, which cuts the part again.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from uspft.families.projections import COLUMNS, ROWS
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
    """Return what a call uses of what this rank holds of a parameter.

    held: the layout in which matrices are held; None where it is that of each call's rows. columns,
    rows: how mesh columns, which Megatron's ranks are too, and mesh rows divide the parameter.
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
    """Return whether the rows of a call divide what is split so: Megatron's ranks leave whole what
    is divided in order, the features that only a mesh divides."""
    return bound.world.layout.is_mesh or not split.in_order


def ways_held(split: MatrixSplit, held: Layout | None, axis: str, group: Group) -> int:
    """Return how many ways ranks hold what is split so along an axis of the mesh.

    held: as of used_by. group: the ranks over which the rows of a call divide it.
    """
    if held is None:
        return group.size
    return 1 if split.in_order and not held.is_mesh else int(getattr(held, axis))


class Call:
    """What a layer was last called with; when it is recomputed, it is called again.

    held: the layout in which matrices are held; None where it is that of each call's rows.
    """

    bound: Bound

    def __init__(self, held: Layout | None) -> None:
        self._held, self.again = held, False
        self.dropouts: list[tuple[TokenDropout, MatrixSplit]] = []
        """Those that see features of which each rank has some, with the split of the features."""
        self.put_off: dict[int, PutOffWeight] = {}
        """By their identity, weights whose gradients are put off while the layer runs."""

    @property
    def group(self) -> Group:
        """The ranks over which the rows of this call divide matrices, or their columns."""
        return self.bound.world.mesh.columns

    @property
    def on_mesh(self) -> bool:
        """Whether the rows of this call have matrices in blocks on a mesh."""
        return self.bound.world.layout.is_mesh

    def begin(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Remember it, before the layer runs."""
        self.bound = kwargs["uspft"]
        self.again = id(self) in self.bound.begun
        self.bound.begun.add(id(self))
        for dropout, split in self.dropouts:
            dropout.ranges = self.ranges(split) if divides(self.bound, split) else None

    def enter(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Give a block all tokens, before it runs; on a mesh, and in copies, it takes what lies
        between blocks."""
        if self.on_mesh or self.bound.copies > 1:
            return None
        if args:
            return (self._entered(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self._entered(kwargs["hidden_states"])}

    def _entered(self, x: Tensor) -> Tensor:
        """Return [..., T, d] of x [..., t, d], which blocks of experts give without a batch."""
        return self.bound.enter(x) if x.dim() == 3 else self.bound.enter(x[None])[0]

    def leave(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        """Sum what the ranks' row-split projections have made; on a mesh, and of copies, that is
        done."""
        if self.on_mesh or self.bound.copies > 1:
            return out
        return self.bound.leave(out) if out.dim() == 3 else self.bound.leave(out[None])[0]

    def ranges(self, split: MatrixSplit) -> tuple[Range, ...]:
        """Return what this rank uses along a split's dimension, in coordinates of the whole."""
        return used_ranges(split, self.group.index, self.group.size, self.ways(split))

    def ways(self, split: MatrixSplit) -> int:
        """Return how many ways ranks hold what columns divide so."""
        return ways_held(split, self._held, "mesh_columns", self.group)

    def used(self, columns: MatrixSplit, rows: MatrixSplit | None = None) -> Used:
        """Return which of what this rank holds of a parameter the call uses, as `used_by`."""
        return used_by(self.bound, self._held, columns, rows)

    def makers(self, split: MatrixSplit, dim: int) -> tuple[Maker, ...]:
        """Return the ranks that make a part of this rank's key-value head, in order of its rows.

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
    """A projection, or one of an adapter's thin ones, that is divided along one dimension.

    The bias of a row-split one is whole, and added on one rank alone before ranks are summed.
    """

    def __init__(self, linear: nn.Linear, split: MatrixSplit, call: Call) -> None:
        super().__init__()
        self.weight, self._split, self._call = linear.weight, split, call
        self.register_parameter("bias", linear.bias)
        self.bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's part of the projection of x, whose features are those used here."""
        return part_of_product(x, (self.weight, self.bias), self._split, self._call)

    def here(self) -> tuple[Tensor, Tensor | None]:
        """Return what a call uses of the weight, and of the bias of a column-split one."""
        used = self._call.used(self._split)
        bias = None if self._split.dim == ROWS or self.bias is None else cut(self.bias, used[:1])
        return cut(self.weight, used), bias


def part_of_product(
    x: Tensor, held: tuple[Tensor, Tensor | None], split: MatrixSplit, call: Call
) -> Tensor:
    """Return this rank's part of a projection of x [1, T, features], divided along one dimension.

    held: weight and bias. split: how columns divide it.
    """
    weight, bias = held
    used, put_off = call.used(split), call.put_off.get(id(weight))
    if bias is not None and split.dim == ROWS and call.group.index:
        bias = bias * 0.0  # not left out, since a gradient of 0 is one too
    if put_off:
        return some_product(x, weight.detach(), bias, used, *put_off)
    if used[split.dim] is None:
        return nn.functional.linear(x, weight, bias)
    return some_product(x, weight, bias, used)


def some_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, used: Used, *put_off: Any
) -> Tensor:
    """Return the product of x with some ranges of a weight; of its bias those of its rows.

    put_off: of a PutOffWeight, that has the weight's gradient, where there is one.
    """
    if bias is not None and used[COLUMNS] is not None:
        bias = cut(bias, used[:1])
    out: Tensor = _PartProduct.apply(x, weight, bias, used, *put_off)
    return out


def wide(x: Tensor) -> torch.dtype:
    """Return the type in which a norm or a loss computes: float32 or wider."""
    return torch.promote_types(x.dtype, torch.float32)


def eps_of(norm: Any) -> float:
    """Return what one of transformers' RMS norms adds to the mean of squares."""
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)


class SplitNorm(nn.Module):
    """An RMS norm over features of which each rank has some, as OLMo 2's over all heads."""

    def __init__(self, norm: Any, split: MatrixSplit, call: Call, added: float = 0.0) -> None:
        """Take transformers' own norm.

        split: of its features, in heads where several ranks may have the same. added: what its
        weight stands on, 1 where a new one is 0.
        """
        super().__init__()
        self.weight = norm.weight
        self._eps = eps_of(norm)
        self._split, self._call, self._added = split, call, added

    def scale(self, x: Tensor) -> Tensor:
        """Return by what each token of x [1, T, features here] is multiplied, [1, T, 1]."""
        group, (units,) = self._call.group, self._split.units or self._split.stacked
        x, sharing = x.to(wide(x)), -(-group.size // units)
        if group.size == 1 or not divides(self._call.bound, self._split):
            mean = x.pow(2).mean(-1, keepdim=True)
        else:
            squares = summed(x.pow(2).sum(-1, keepdim=True), group)
            mean = squares / sharing / (x.shape[-1] * group.size // sharing)
        return torch.rsqrt(mean + self._eps)

    def here(self) -> Tensor:
        """Return the weight of the features here."""
        weight = cut(self.weight, self._call.used(self._split)[:1])
        return weight + self._added if self._added else weight

    def forward(self, x: Tensor) -> Tensor:
        """Return x [1, T, features here], normed over the features of all ranks, in its type."""
        own = x.to(wide(x))
        return (self.here() * (own * self.scale(own))).to(x.dtype)


def use_part(module: nn.Module, name: str, split: MatrixSplit, call: Call) -> None:
    """Let a module's own parameter be, where its code reads it, the part that a call uses.

    transformers reads it as an attribute; a property of a class of the module's own stands before
    it, and the parameter stays where it is, under its name.
    """

    def read(self: nn.Module) -> Tensor:
        if name in self.__dict__:  # what stands in for it, of some heads
            found: Tensor = self.__dict__[name]
            return found
        held = self._parameters[name]
        assert held is not None
        return cut(held, call.used(split)[:1]) if hasattr(call, "bound") else held

    kind = type(module)
    own = {name: property(read), "__module__": kind.__module__}
    module.__class__ = type(kind.__name__, (kind,), own)


class FusedHeads:
    """The heads of an attention whose query, key and value heads stand in one projection.

    Which are here, transformers asks the config and the module.
    """

    def __init__(self, attention: Any, split: MatrixSplit, call: Call) -> None:
        self._config, self._dim = attention.config, attention.head_dim
        self._heads, self._kv_heads = (
            self._config.num_attention_heads,
            attention.num_key_value_heads,
        )
        self._split, self._call = split, call

    def count(self, attention: Any, args: Any) -> None:
        """Tell the attention how many heads this call has here, before it runs, unless it is to
        make some of them alone."""
        if attention.config is not self._config:
            return
        degree = self._call.group.size
        self._config.num_attention_heads = self._heads // degree
        attention.num_key_value_heads = max(1, self._kv_heads // degree)

    def complete(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        """Return the projection's output [1, T, features] with whole key-value heads, of which this
        rank may have made some rows."""
        group = self._call.group
        if group.size <= self._kv_heads:
            return out
        makers = self._call.makers(self._split, self._dim)
        queries = self._heads // group.size * self._dim
        q_Tn, kv_T2n = out[0, :, :queries], out[0, :, queries:].unflatten(-1, (2, -1))
        kv_T2D = whole_head(kv_T2n, makers, group)
        return torch.cat([q_Tn, kv_T2D.flatten(1)], -1)[None]


class _PartProduct(torch.autograd.Function):
    """A linear product with some ranges of a weight, the rest of whose gradient is 0."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        used: Used,
        *put_off: Any,
    ) -> Tensor:
        """put_off: where it is, the PutOffWeight that has the weight's gradient."""
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

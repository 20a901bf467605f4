"""MeshSlice: matrices divided along both dimensions over a mesh of ranks, and products of them in
slices, whose transfers run behind the products of other slices.

Activations stay as they are through a whole model: tokens over mesh rows, which may have unequal
numbers of them, features over mesh columns. Of a product's three matrices the largest stays where
it is, since tokens are many: what projections into a block make (output-stationary forward), what
the projection out of it takes (left-stationary). The other of these two flows makes the gradient of
the input, the right-stationary one that of the weight. In all of them the dimension in slices is
the hidden size.

Shapes, as suffixes: t tokens of a mesh row; d hidden size, o and i features inside a block; R mesh
rows, C mesh columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from uspft.comm import Group, gather_over, sum_parts
from uspft.config.problems import Finding
from uspft.tensor.cutting import Used, cut, put_back
from uspft.tensor.flows import (
    KIND,
    left_stationary,
    next_divisor,
    output_and_right_stationary,
    output_stationary,
    right_stationary,
)
from uspft.tensor.parts import divide_heads
from uspft.tensor.tensor_algorithm import Grid

PRODUCTS = ("qkv", "out", "gate_up", "down")
"""The products of a layer, in the order in which `tensor_slices` may name their numbers."""


@dataclass(frozen=True)
class _Product:
    """What a product takes beside tensors that need gradients."""

    grid: Grid
    slices: int
    held: Sequence[Tensor]
    """The weights that are here; as parameters, since ZeRO-3 takes away what is in them until the
    backward pass."""
    used: Sequence[Used]
    """What the product uses of each of them."""

    def weights(self) -> list[Tensor]:
        """Return what the product uses of weights."""
        return [cut(w, used) for w, used in zip(self.held, self.used, strict=True)]

    def ways(self) -> list[Tensor]:
        """Return weights for their gradients to leave by, those of the last weight first.

        DeepSpeed's ZeRO-2 sums gradients in the order in which they come, which must be the same on
        ranks whose rows are not on a mesh: there each weight has a product of its own.
        """
        return [_Way.apply(w) for w in self.held]


class _Way(torch.autograd.Function):
    """A node of its own in the graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> Tensor:
        return dx


class _Inward(torch.autograd.Function):
    """Projections into a block: their outputs stay, output-stationary forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, how: _Product, *ways: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x if any(ctx.needs_input_grad[2:]) else None)
        ctx.how, weights = how, how.weights()
        made = output_stationary(x, [w.t() for w in weights], how.grid, how.slices)
        return tuple(part.contiguous() for part in made.split([len(w) for w in weights], 1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (x,), how = ctx.saved_tensors, ctx.how
        needs_x, _, *needs = ctx.needs_input_grad
        dx: Tensor | None = None
        found: list[Tensor | None] = [None] * len(needs)
        if needs_x:
            weights = [w.t() for w in how.weights()]
            dx = left_stationary(torch.cat(grads, 1), weights, how.grid, how.slices)
        if any(needs):
            made = [dy for dy, need in zip(grads, needs, strict=True) if need]
            dw = right_stationary(x, torch.cat(made, 1), how.grid, how.slices)
            parts = iter(dw.split([dy.shape[1] for dy in made], 1))
            found = [
                put_back(next(parts).t().contiguous(), w, used) if need else None
                for w, used, need in zip(how.held, how.used, needs, strict=True)
            ]
        return dx, None, *found


class _Outward(torch.autograd.Function):
    """The projection out of a block: what it takes stays, left-stationary forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, how: _Product, way: Tensor) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[2] else None)
        (weight,), ctx.how = how.weights(), how
        return left_stationary(x, weight, how.grid, how.slices)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        (x,), how = ctx.saved_tensors, ctx.how
        needs_x, _, needs = ctx.needs_input_grad
        dx, dw, on = None, None, (how.grid, how.slices)
        (weight,), (held,), (used,) = how.weights(), how.held, how.used
        if needs_x and needs:
            dx, dw = output_and_right_stationary(dy, weight, x, *on)
        elif needs_x:
            dx = output_stationary(dy, weight, *on)
        elif needs:
            dw = right_stationary(dy, x, *on)
        return dx, None, None if dw is None else put_back(dw, held, used)


class _AllFeatures(torch.autograd.Function):
    """The features of all ranks of a group forward; backward the sum of this rank's over them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _features_of_all(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return _sum_own_features(dx, ctx.group), None


class _OwnFeatures(torch.autograd.Function):
    """This rank's features of the sum over a group forward; backward those of all ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _sum_own_features(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:
        return _features_of_all(dout, ctx.group), None


def _features_of_all(x: Tensor, group: Group) -> Tensor:
    """Return [m, d] of x [m, d/P] on each of P ranks."""
    every = gather_over(x.contiguous(), group, KIND).unflatten(0, (group.size, -1))
    return every.transpose(0, 1).flatten(1)


def _sum_own_features(x: Tensor, group: Group) -> Tensor:
    """Return [m, d/P], this rank's features of the sum of x [m, d] over P ranks."""
    each = x.unflatten(1, (group.size, -1)).transpose(0, 1)
    return sum_parts(each.flatten(0, 1).contiguous(), group, KIND)


@dataclass(frozen=True)
class MeshSlice:
    """Matrices over a mesh of ranks, products in slices."""

    degree: int
    mesh: tuple[int, int]
    """Mesh rows and columns."""
    slices: tuple[int, int, int, int]
    """How many slices each of PRODUCTS is made in."""

    @property
    def splits_tokens(self) -> bool:
        """Whether a rank sees its own tokens alone between blocks: no more than inside of them."""
        return False

    def problems(self, query_heads: int, kv_heads: int, hidden: int) -> list[Finding]:
        """Return why a model cannot be split: (recipe key, what is wrong, remedy) each.

        hidden: features between blocks.
        """
        key = "parallel_config.tensor_mesh"
        shapes = [(r, self.degree // r) for r in range(1, self.degree + 1) if self.degree % r == 0]
        legal = [
            f"[{r}, {c}]"
            for r, c in shapes
            if hidden % r == hidden % c == 0 and divide_heads(query_heads, kv_heads, c)
        ]
        rows, columns = self.mesh
        remedy = f"write one of {', '.join(legal)}" if legal else "write another model_parallel"
        if hidden % rows or hidden % columns:
            what = f"hidden_size {hidden} does not split over a mesh of {rows} × {columns}"
            return [(key, what, remedy)]
        if not divide_heads(query_heads, kv_heads, columns):
            what = (
                f"{query_heads} query heads and {kv_heads} key-value heads do not split "
                f"over {columns} mesh columns"
            )
            return [(key, what, remedy)]
        both = gcd(hidden // rows, hidden // columns)
        wrong = sorted({number for number in self.slices if both % number})
        if not wrong:
            return []
        found = " and ".join(map(str, wrong))
        what = f"is {found}, which does not slice hidden_size {hidden} on {rows} × {columns} ranks"
        instead = " and ".join(str(next_divisor(both, number)) for number in wrong)
        return [("parallel_config.tensor_slices", what, f"write {instead}")]

    def inward(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        grid: Grid,
        product: int,
        used: Sequence[Used] = (),
    ) -> tuple[Tensor, ...]:
        """Return what projections into a block make of x [t, d/C], [t, o/C] each; differentiable.

        weights: [o/C, d/R] each, or what such a part, `used`, is cut out of; the projections share
        what they gather of x. product: which of PRODUCTS it is.
        """
        how = _Product(grid, self.slices[product], weights, used or [()] * len(weights))
        found: tuple[Tensor, ...] = _Inward.apply(x, how, *how.ways())
        return found

    def outward(
        self, x: Tensor, weight: Tensor, grid: Grid, product: int, used: Used = ()
    ) -> Tensor:
        """Return what the projection out of a block makes of x [t, i/C], [t, d/C]; differentiable.

        weight: [d/R, i/C], or what such a part, `used`, is cut out of. product: which of PRODUCTS
        it is.
        """
        how = _Product(grid, self.slices[product], [weight], [used])
        found: Tensor = _Outward.apply(x, how, *how.ways())
        return found

    def whole(self, weight: Tensor, grid: Grid) -> Tensor:
        """Return all features [v, d] of a weight [v, d/R] of embedding or head; differentiable."""
        if grid.rows.size == 1:
            return weight
        found: Tensor = _AllFeatures.apply(weight, grid.rows)
        return found

    def enter(self, x: Tensor, tokens: int, group: Group) -> Tensor:
        """Return all features [1, t, d] of x [1, t, d/C]; differentiable. group: mesh columns."""
        if group.size == 1:
            return x
        found: Tensor = _AllFeatures.apply(x[0], group)
        return found[None]

    def leave(self, x: Tensor, group: Group) -> Tensor:
        """Return this rank's features, [1, t, d/C], of the sum of x [1, t, d] over mesh columns."""
        if group.size == 1:
            return x
        found: Tensor = _OwnFeatures.apply(x[0], group)
        return found[None]

"""The products of MeshSlice with their gradients, and the features that mesh ranks gather and sum.

Shapes, as suffixes: t tokens of a mesh row; d hidden size, o and i features inside a block; m
tokens or rows of a table; R mesh rows, C mesh columns; P ranks of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from uspft.comm import Group, gather_over, sum_parts, with_backward
from uspft.tensor import Grid
from uspft.tensor.flows import (
    KIND,
    left_stationary,
    output_and_right_stationary,
    output_stationary,
    right_stationary,
)
from uspft.tensor.parts import Used, cut, put_back


@dataclass(frozen=True)
class SlicedProduct:
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
        return [with_backward(lambda w: w.view_as(w), lambda dw: dw, w) for w in self.held]


def inward(x: Tensor, how: SlicedProduct) -> tuple[Tensor, ...]:
    """Return what projections into a block make of x [t, d/C]: [t, o/C] each; differentiable."""
    found: tuple[Tensor, ...] = _Inward.apply(x, how, *how.ways())
    return found


def outward(x: Tensor, how: SlicedProduct) -> Tensor:
    """Return what the projection out of a block makes of x [t, i/C]: [t, d/C]; differentiable."""
    found: Tensor = _Outward.apply(x, how, *how.ways())
    return found


def features_of_all(x: Tensor, group: Group) -> Tensor:
    """Return [m, d] of x [m, d/P] on each of P ranks; differentiable."""
    found: Tensor = with_backward(partial(_gathered, group), partial(_summed_part, group), x)
    return found


def own_features_of_sum(x: Tensor, group: Group) -> Tensor:
    """Return [m, d/P], this rank's features of the sum of x [m, d] over P ranks; differentiable."""
    found: Tensor = with_backward(partial(_summed_part, group), partial(_gathered, group), x)
    return found


class _Inward(torch.autograd.Function):
    """Projections into a block: their outputs stay, output-stationary forward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, how: SlicedProduct, *ways: Tensor) -> tuple[Tensor, ...]:
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
    def forward(ctx: Any, x: Tensor, how: SlicedProduct, way: Tensor) -> Tensor:
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


def _gathered(group: Group, x: Tensor) -> Tensor:
    """Return [m, d] of x [m, d/P] on each of P ranks."""
    every = gather_over(x.contiguous(), group, KIND).unflatten(0, (group.size, -1))
    return every.transpose(0, 1).flatten(1)


def _summed_part(group: Group, x: Tensor) -> Tensor:
    """Return [m, d/P], this rank's features of the sum of x [m, d] over P ranks."""
    each = x.unflatten(1, (group.size, -1)).transpose(0, 1)
    return sum_parts(each.flatten(0, 1).contiguous(), group, KIND)

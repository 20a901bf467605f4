"""Functions of whole rows, whose tokens several ranks hold.

A differentiable all-reduce would multiply gradients by the ranks that share a row, and a plain one
would have none. What is no sum over tokens is therefore made in three steps: `document_sums` adds
up over ranks, and hands each rank's gradient to its own tokens alone; every rank works out the same
function of the sums; `once` has it count on one rank, while all ranks pass its gradient on.

Shapes: C tokens of this rank that have a target, D documents of a micro-batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from uspft.comm import Group, sum_over

if TYPE_CHECKING:
    from uspft.batch import Batch


def document_sums(values: Tensor, batch: Batch) -> Tensor:
    """Return the sum of values over each document's targets, on all ranks that share its row, [D].

    values [C]: of the batch's `chosen` tokens. Collective over those ranks. The gradient is that of
    this rank's own values.
    """
    share = batch.share
    places = torch.from_numpy(share.document_of).to(values.device, non_blocking=True)
    here = values.new_zeros(len(share.documents))
    here = here.index_add(0, places.index_select(0, batch.chosen), values)
    found: Tensor = _Summed.apply(here, batch.world.mesh.context)
    return found


def once(whole: Tensor, batch: Batch) -> Tensor:
    """Return this rank's part of what all ranks that share a micro-batch's rows have worked out.

    It is all of it on the first of them, and 0 on the others; the gradient passes on every one.
    """
    found: Tensor = _Once.apply(whole, batch.world.mesh.context.index == 0)
    return found


class _Summed(torch.autograd.Function):
    """The sum over a group's members, of which each takes its own gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return sum_over(x.clone(), group, "objective")

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, here: bool) -> Tensor:
        return x.clone() if here else torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None

"""The factors by which the gradient of every parameter is counted exactly once; no other file
decides this.

The tensor parallel ranks of a row compute partial gradients of some parameters, which must be
summed, and whole gradients of others, which are equal:

    parameter                           without use_seq_parallel        with use_seq_parallel
    split: a matrix, its adapter        partial                         partial
    replicated, inside a block:
        a norm of heads                 partial                         partial
    replicated, between blocks:
        a norm of features              whole                           partial

A rank's gradient is that of its own loss: the sum over its targets, divided by the targets of the
step. Summed over all ranks with the same part of a parameter, after each is divided by `times`,
these are the parameter's gradient. An expert's gradient includes tokens of all expert parallel
ranks, so it is counted once too; other pipeline stages do not hold the parameter and add nothing.

The sum is made in two steps:

1. in the backward, over the tensor ranks that hold the same part, if their gradients are partial
   (`summed_over`), after each is divided by `divisor`;
2. when a step's gradients are accumulated, over `Holders.zero` by an engine that averages, so that
   each rank's loss is multiplied by their number: the ranks among which ZeRO shards all parameters
   except experts. The same factor holds for experts, although fewer ranks hold them.

The norm counts each part once: on the rank for which `is_counted` is true, summed over
`Holders.model` and over the ranks among which ZeRO shards it. An engine without DeepSpeed sums over
all ranks with the same part at once, and divides by `times` alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from uspft.comm import Group
    from uspft.parameters.shards import Holders, Shards


def makes_pieces(shards: Shards, name: str, *, splits_tokens: bool) -> bool:
    """Return whether the gradients of a row's tensor parallel ranks are partial, so that they must
    be summed.

    splits_tokens: whether these ranks see different tokens between blocks (use_seq_parallel).
    """
    divided = name in shards.splits or name in shards.row_splits
    return divided or name in shards.inside or splits_tokens


def times(shards: Shards, name: str, degree: int, *, splits_tokens: bool) -> int:
    """Return how many times the sum over all ranks with the same part counts a row's gradient.

    degree: the row's tensor degree, a multiple of the layout's.
    """
    return 1 if makes_pieces(shards, name, splits_tokens=splits_tokens) else degree


def is_summed(shards: Shards, name: str) -> bool:
    """Return whether tensor ranks that hold the same part sum their gradients in the backward."""
    return shards.layout.tensor > 1 and makes_pieces(
        shards, name, splits_tokens=shards.splits_tokens
    )


def summed_over(holders: Holders, name: str) -> Group | None:
    """Return the tensor ranks over which a gradient is summed in a micro-batch's backward; None: it
    is not summed there."""
    same = holders.same.get(name)
    return same if same and same.size > 1 and is_summed(holders.shards, name) else None


def divisor(shards: Shards, name: str, degree: int, *, splits_tokens: bool) -> int:
    """Return the number by which a rank divides its gradient before it is summed in the backward.

    degree, splits_tokens: as in `times`. Raises ValueError if gradients are partial and not summed.
    """
    found = times(shards, name, degree, splits_tokens=splits_tokens)
    if is_summed(shards, name):
        return found
    apart = len(shards.replicas(name)[0])  # ranks with the same part, which do not sum
    if found % apart:
        raise ValueError(f"rows split tokens, and the layout that holds {name} does not")
    return found // apart


def is_counted(holders: Holders, name: str) -> bool:
    """Return whether the norm counts this rank's part of a parameter: on the first tensor rank with
    each part."""
    same = holders.same.get(name)
    return same is not None and same.index == 0

"""How often the gradient of a parameter is counted: this file alone decides.

Ranks that divide the matrices of a row see its tokens together, and what each of them computes of a
gradient is a piece, which others' complete, or all of it:

    what stands                         rows whose tokens they share    rows whose tokens they split
    divided: a matrix, its adapter      a piece                         a piece
    inside a block: a norm of heads     a piece                         a piece
    between blocks: a norm of features  all                             a piece

A rank's own gradient is of its loss, summed over its targets and divided by those of the step. Over
all ranks that hold the same part of a parameter these add up to its gradient, where each is divided
by `times`: by how often it is in the sum. Experts come by tokens of every rank that divides them,
so that they too are in it once; ranks of other stages hold nothing, and add nothing.

How the sum is made:

1. in a backward pass, over the tensor ranks that hold the same part, if these make pieces
   (`summed_over`), after each is divided by `divisor`;
2. where a step accumulates, over `averaged` ranks, by an engine that averages over them: the loss
   of each rank is multiplied by their number. It is that of the ranks among which ZeRO divides all
   but experts, and for experts as well, though fewer ranks hold the same of these.

The norm counts each part once: on the rank where `is_counted`, summed over those of `norm_group`
and over those that ZeRO divides it among. What an engine without DeepSpeed sums at once over all
that hold the same part, it divides by `times` alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from uspft.comm import Group
    from uspft.parameters.shards import Holders, Shards


def makes_pieces(shards: Shards, name: str, *, splits_tokens: bool) -> bool:
    """Return whether each rank that divides the matrices of a row computes a piece of a gradient,
    so that the pieces must be summed.

    splits_tokens: whether they see different tokens between blocks.
    """
    divided = name in shards.splits or name in shards.row_splits
    return divided or name in shards.inside or splits_tokens


def times(shards: Shards, name: str, degree: int, *, splits_tokens: bool) -> int:
    """Return how many times the sum over all ranks with the same part has the gradient of a row.

    degree: over how many ranks the row divides matrices, a multiple of the layout's.
    """
    return 1 if makes_pieces(shards, name, splits_tokens=splits_tokens) else degree


def is_summed(shards: Shards, name: str) -> bool:
    """Return whether tensor ranks that hold the same part sum their gradients in the backward."""
    return shards.layout.tensor > 1 and makes_pieces(
        shards, name, splits_tokens=shards.splits_tokens
    )


def summed_over(holders: Holders, name: str) -> Group | None:
    """Return the tensor ranks that sum what they have made of a gradient in the backward pass of a
    micro-batch; None where no other one has any."""
    same = holders.replicas(name)
    return same if same.size > 1 and is_summed(holders.shards, name) else None


def divisor(shards: Shards, name: str, degree: int, *, splits_tokens: bool) -> int:
    """Return the number by which a rank divides its gradient of a row before `summed_over` sums it.

    degree, splits_tokens: as of `times`. Raises ValueError where rows make pieces that nobody sums.
    """
    found = times(shards, name, degree, splits_tokens=splits_tokens)
    if is_summed(shards, name):
        return found
    apart = len(shards.replicas(name)[0])  # ranks with the same part, of which each keeps its own
    if found % apart:
        raise ValueError(f"rows split tokens, and the layout that holds {name} does not")
    return found // apart


def averaged(holders: Holders) -> int:
    """Return over how many ranks an engine averages gradients: what multiplies each rank's loss."""
    return holders.zero.size


def is_counted(shards: Shards, name: str, rank: int) -> bool:
    """Return whether the norm counts a parameter on a rank: it holds some of it, and no tensor rank
    before it holds the same."""
    first = shards.tensor_index(rank) in {same[0] for same in shards.replicas(name)}
    return first and shards.holds(name, rank)


def norm_group(holders: Holders) -> Group:
    """Return the ranks over which the squares of gradients are summed for the norm, beside those
    among which ZeRO divides what each holds."""
    return holders.model

"""The routers' load-balancing loss of whole rows, of which each rank holds a share.

It is that of Switch Transformer, arXiv 2101.03961, equations 4 to 6, as transformers has it: over
all layers together, E · Σ_e f_e · p_e with f_e the choices of expert e ÷ tokens and p_e its mean
probability. Padding does not count; packed documents count together, as their row.

Shapes: T tokens here, E experts, R rows of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad

from uspft.comm import sum_over
from uspft.tensor.parts import tokens_of_each

if TYPE_CHECKING:
    from torch import Tensor

    from uspft.comm import Group


def router_loss(
    logits: Sequence[Tensor], row_of: Tensor, rows: int, top_k: int, groups: Sequence[Group]
) -> Tensor:
    """Return this rank's part of the loss summed over rows; the parts of all ranks add up to it.

    Collective. logits: [T, E] of each layer. row_of [T]: each token's row, -1 for padding.
    groups: the ranks that share the rows are those of all of them, one within another. The product
    of two sums over ranks is no sum over ranks, but f has no gradient: with everybody's choices
    known, the loss is linear in the probabilities.
    """
    wide = torch.promote_types(logits[0].dtype, torch.float32)
    places = torch.arange(rows, device=row_of.device)
    members = (row_of == places[:, None]).to(wide)  # [R, T]
    experts = logits[0].shape[-1]
    sums = members.new_zeros(rows, experts)
    choices = torch.zeros(rows, experts, dtype=torch.float64, device=row_of.device)
    for layer in logits:
        probabilities = layer.to(wide).softmax(-1)
        chosen = probabilities.detach().topk(top_k).indices
        hits = torch.zeros_like(probabilities).scatter_(1, chosen, 1.0)
        choices += members @ hits
        sums = sums + members @ probabilities
    for group in groups:
        choices = sum_over(choices, group, "router")
    tokens = (choices.sum(1, keepdim=True) / top_k).clamp(
        min=1.0
    )  # of all layers; 0: a row of padding
    return (experts * choices / tokens.square()).to(wide).mul(sums).sum()


def own_tokens(x: Tensor, group: Group, filled: int = 0) -> Tensor:
    """Return this rank's numbers [t] of all tokens' [T], where tensor ranks divide these.

    filled: the number of what fills the last rank's up.
    """
    each = tokens_of_each(len(x), group.size)
    own = x[group.index * each :][:each]
    return pad(own, (0, each - len(own)), value=filled)

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

from uspft.comm import sum_over

if TYPE_CHECKING:
    from torch import Tensor

    from uspft.comm import Group


def router_loss(
    logits: Sequence[Tensor], row_of: Tensor, rows: int, top_k: int, group: Group
) -> Tensor:
    """Return this rank's part of the loss summed over rows; the parts of all ranks add up to it.

    Collective. logits: [T, E] of each layer. row_of [T]: each token's row, -1 for padding. group:
    the ranks that share the rows. The product of two sums over ranks is no sum over ranks, but f
    has no gradient: with everybody's choices known, the loss is linear in the probabilities.
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
    choices = sum_over(choices, group, "router")
    tokens = (choices.sum(1, keepdim=True) / top_k).clamp(
        min=1.0
    )  # of all layers; 0: a row of padding
    return (experts * choices / tokens.square()).to(wide).mul(sums).sum()

"""Attention with every score in memory: the reference that kernels are probed against."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from uspft.blocks import Block, Mask

SEEN: dict[Mask, Callable[[Tensor], Tensor]] = {
    Mask.FULL: torch.clone,
    Mask.CAUSAL: torch.tril,
    Mask.FLIPPED: torch.triu,
}


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Sequence[Block],
    scale: float,
    *,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (out [T, h, D], lse [h, T]) over the union of blocks, differentiable.

    It takes O(T · T') memory for T queries and T' keys. A query without a key has out 0 and lse
    -inf.
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    seen = torch.zeros(len(q), len(k), dtype=torch.bool, device=q.device)
    for block in blocks:
        square = seen[block.q0 : block.q1, block.k0 : block.k1]
        square |= SEEN[block.mask](torch.ones_like(square))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~seen, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    return torch.einsum("hqk,khd->qhd", weights, v), lse

"""Attention sinks: for each head a key that every query sees, with a learnt score and the value 0.

The weights of the other keys add up to less than 1 then (gpt-oss, arXiv 2508.10925, section 2.3). A
sink is joined after all real keys, as one more term of lse. With that lse and the out that belongs
to it, the kernels' backward is that of attention with sinks as it stands.

Shapes: T tokens, h query heads, D head dim; sinks [h], float32 or wider.
"""

from __future__ import annotations

import torch
from torch import Tensor


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out [T, h, D], lse [h, T]) after the sinks have taken their weight."""
    whole = torch.logaddexp(lse, sinks[:, None])
    return out * (lse - whole).exp().t()[..., None], whole


def sinks_gradient(sinks: Tensor, out: Tensor, lse: Tensor, dout: Tensor) -> Tensor:
    """Return the sinks' gradient [h] from these tokens, −Σ_t exp(sink − lse_t) · (out_t · dout_t);
    out and lse are final."""
    weights = (sinks[:, None] - lse).exp()
    return -(weights * torch.linalg.vecdot(out.to(lse.dtype), dout.to(lse.dtype)).t()).sum(1)

"""Attention over disjoint sets of keys, joined by log-sum-exp; a sink is joined last.

A sink is for each head a key that every query sees, with a learnt score and the value 0, so that
the weights of the other keys add up to less than 1 (gpt-oss, arXiv 2508.10925, section 2.3). It is
one more term of lse. With that lse and the out that belongs to it, the backward of the kernels is
that of attention with sinks as it stands.

Shapes: T tokens, h query heads, D head dim; sinks [h], float32 or wider.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from uspft.kernels.kernel import BlockOutput


class Partial:
    """Attention of T queries over the keys seen so far: out [T, h, D] and lse [h, T].

    A query that has seen no key has out 0 and lse -inf. Parts are joined in float32 or wider, by
    out = Σ out_i · exp(lse_i − lse), lse = log Σ exp(lse_i) (Ring Attention, online softmax).
    """

    def __init__(self, q: Tensor) -> None:
        tokens, heads, _ = q.shape
        self._like = q
        wide = torch.promote_types(q.dtype, torch.float32)
        self._out: Tensor | None = None
        self._lse = torch.full((heads, tokens), -torch.inf, dtype=wide, device=q.device)

    def add(self, parts: Sequence[BlockOutput]) -> None:
        """Join parts, each over keys that its queries have not seen before."""
        if self._out is None and all(a.q1 <= b.q0 for a, b in pairwise(parts)):
            self._start(parts)
            return
        if self._out is None:
            self._start([])
            assert self._out is not None
        if self._out.dtype != self._lse.dtype:
            self._out = self._out.to(self._lse.dtype)
        for q0, q1, out, lse in parts:
            old = self._lse[:, q0:q1]
            new = torch.logaddexp(old, lse)
            keep = (old - new).exp_().t().unsqueeze(-1)
            gain = (lse - new).exp_().t().unsqueeze(-1)
            self._out[q0:q1].mul_(keep).addcmul_(out, gain)
            self._lse[:, q0:q1] = new

    def _start(self, parts: Sequence[BlockOutput]) -> None:
        """Take the first parts, which need no arithmetic: no query has seen a key yet."""
        tokens = len(self._like)
        if len(parts) == 1 and (parts[0].q0, parts[0].q1) == (0, tokens):
            self._out, self._lse = parts[0].out, parts[0].lse
            return
        self._out = torch.zeros_like(self._like, memory_format=torch.contiguous_format)
        for q0, q1, out, lse in parts:
            self._out[q0:q1] = out
            self._lse[:, q0:q1] = lse

    def result(self, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return out [T, h, D] in q's dtype, contiguous, and lse [h, T]; sinks [h] are joined where
        given."""
        if self._out is None:
            self._start([])
        assert self._out is not None
        out, lse = self._out, self._lse
        if sinks is not None:
            out, lse = with_sinks(out, lse, sinks)
        return out.to(self._like.dtype).contiguous(), lse


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out [T, h, D], lse [h, T]) after the sinks have taken their weight."""
    whole = torch.logaddexp(lse, sinks[:, None])
    return out * (lse - whole).exp().t()[..., None], whole


def sinks_gradient(sinks: Tensor, out: Tensor, lse: Tensor, dout: Tensor) -> Tensor:
    """Return the sinks' gradient [h] from these tokens, −Σ_t exp(sink − lse_t) · (out_t · dout_t);
    out and lse are final."""
    weights = (sinks[:, None] - lse).exp()
    return -(weights * torch.linalg.vecdot(out.to(lse.dtype), dout.to(lse.dtype)).t()).sum(1)

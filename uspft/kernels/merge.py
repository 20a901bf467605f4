"""Attention over disjoint sets of keys, merged by log-sum-exp, and sums of its gradients; sinks are
merged last.

A sink is, for each head, a key that every query sees, with a learnt score and the value 0, so that
the weights of the other keys add up to less than 1 (gpt-oss, arXiv 2508.10925, section 2.3). It is
one more term of lse. With the lse and out that include it, the kernels' backward is that of
attention with sinks, unchanged.

Shapes: T tokens, h query heads, D head dim; sinks [h], float32 or wider.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from uspft.kernels.kernel import BlockOutput, Gradient


class Partial:
    """Attention of T queries over the keys seen so far: out [T, h, D] and lse [h, T].

    A query that has seen no key has out 0 and lse -inf. Parts are merged in float32 or wider, by
    out = Σ out_i · exp(lse_i − lse), lse = log Σ exp(lse_i) (Ring Attention, online softmax).
    """

    def __init__(self, q: Tensor) -> None:
        tokens, heads, _ = q.shape
        self._like = q
        wide = torch.promote_types(q.dtype, torch.float32)
        self._out: Tensor | None = None
        self._lse = torch.full((heads, tokens), -torch.inf, dtype=wide, device=q.device)

    def add(self, parts: Sequence[BlockOutput]) -> None:
        """Merge parts, each over keys that its queries have not seen before."""
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
        """Return out [T, h, D] in q's dtype, contiguous, and lse [h, T]; sinks [h] are merged if
        given."""
        if self._out is None:
            self._start([])
        assert self._out is not None
        out, lse = self._out, self._lse
        if sinks is not None:
            out, lse = with_sinks(out, lse, sinks)
        return out.to(self._like.dtype).contiguous(), lse


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out [T, h, D], lse [h, T]) with the sinks included in the softmax."""
    whole = torch.logaddexp(lse, sinks[:, None])
    return out * (lse - whole).exp().t()[..., None], whole


def sinks_gradient(sinks: Tensor, out: Tensor, lse: Tensor, dout: Tensor) -> Tensor:
    """Return the sinks' gradient [h] from these tokens, −Σ_t exp(sink − lse_t) · (out_t · dout_t);
    out and lse are final."""
    weights = (sinks[:, None] - lse).exp()
    return -(weights * torch.linalg.vecdot(out.to(lse.dtype), dout.to(lse.dtype)).t()).sum(1)


class Sum:
    """A sum of gradients of ranges of tokens, in float32 or wider.

    shape: [T, heads, D], or [N, T, heads, D] for N tensors such as dK and dV. like: a tensor of the
    compute dtype, on the same device. A gradient of all tokens is not copied while it is the only
    one.
    """

    def __init__(self, shape: tuple[int, ...] | torch.Size, like: Tensor) -> None:
        self._shape, self._like = tuple(shape), like
        self._whole: tuple[Tensor, ...] | None = None
        self._sum: Tensor | None = None

    def add(self, gradients: list[Gradient]) -> None:
        """Add the gradients of ranges of tokens."""
        places = [(g.start, g.stop) for g in gradients]
        if self._sum is None and self._whole is None and places == [(0, self._shape[-3])]:
            self._whole = gradients[0].tensors
            return
        total = self.open()
        for start, stop, tensors in gradients:
            for row, tensor in zip(total, tensors, strict=True):
                row[start:stop] += tensor

    def add_rows(self, places: Sequence[tuple[int, int]], rows: Tensor) -> None:
        """Add rows [N, n, heads, D]: the gradients of these ranges of tokens, concatenated."""
        at = 0
        for start, stop in places:
            self.open()[:, start:stop] += rows[:, at : at + stop - start]
            at += stop - start

    def open(self) -> Tensor:
        """Return the sum so far, [N, T, heads, D], to which more can be added in place."""
        if self._sum is None:
            wide = torch.promote_types(self._like.dtype, torch.float32)
            shape = self._shape if len(self._shape) == 4 else (1, *self._shape)
            self._sum = torch.zeros(shape, dtype=wide, device=self._like.device)
            for row, tensor in zip(self._sum, self._whole or (), strict=False):
                row += tensor
            self._whole = None
        return self._sum

    def result(self) -> Any:
        """Return the sum in the compute dtype and drop it: one tensor, or N of them if the shape
        has an N."""
        tensors = self._whole if self._whole is not None else tuple(self.open())
        self._whole = self._sum = None
        tensors = tuple(t.to(self._like.dtype) for t in tensors)
        return tensors if len(self._shape) == 4 else tensors[0]

    def rounded(self) -> Tensor:
        """Return the sum in the compute dtype as one tensor [N, T, heads, D], and drop it."""
        if self._whole is None:
            whole = self.open().to(self._like.dtype)
        else:
            whole = torch.stack([t.to(self._like.dtype) for t in self._whole])
        self._whole = self._sum = None
        return whole

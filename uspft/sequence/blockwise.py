"""Attention over blocks, with keys and values travelling round a ring of ranks (one rank: none).

Shapes: T tokens of this ring rank, h/g its query/KV heads, D head dim; ring rank i, R ring degree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from uspft.comm import Group, shift
from uspft.kernels import Kernel, Partial
from uspft.kernels.kernel import Gradient
from uspft.sequence.plan import Plan
from uspft.sequence.sums import Sum


def attend_blocks(
    qkv: tuple[Tensor, Tensor, Tensor], plan: Plan, scale: float, ring: Group, kernel: Kernel
) -> Tensor:
    """out [T, h, D] of q [T, h, D] over all keys that the plan's blocks name, differentiable.

    Ring attention (arXiv 2310.01889): at step s the keys of rank i − s are at hand and the next
    ones on their way. Keys travel again in the backward; each partial dK, dV goes straight home,
    rounded once to the compute type and summed there in float32.
    """
    out: Tensor = _BlockAttention.apply(*qkv, plan, scale, ring, kernel)
    return out


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: Plan,
        scale: float,
        ring: Group,
        kernel: Kernel,
    ) -> Tensor:
        partial = Partial(q)
        for source, keys, values in _travel(k, v, plan, ring):
            partial.add(kernel.forward((q, keys, values), plan.blocks[source], scale))
        out, lse = partial.result()
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.plan, ctx.scale, ctx.ring, ctx.kernel = plan, scale, ring, kernel
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dkv = Sum(q.shape, q), Sum((2, *k.shape), k)
        returns = _Returns(k, ctx.plan, ctx.ring, dkv)
        for source, keys, values in _travel(k, v, ctx.plan, ctx.ring):
            blocks = ctx.plan.blocks[source]
            queries, partials = ctx.kernel.backward(
                (q, keys, values), (out, lse, dout), blocks, ctx.scale
            )
            dq.add(queries)
            if source == ctx.ring.index:
                dkv.add(partials)
            returns.send(source, partials)
        returns.finish()
        dk, dv = dkv.result()
        return dq.result(), dk, dv, None, None, None, None


def _travel(k: Tensor, v: Tensor, plan: Plan, ring: Group):  # type: ignore[no-untyped-def]
    """Yield (source, keys, values) for each ring rank, own first, the next ones under way.

    Two buffers: what is at hand and what arrives.
    """
    if ring.size == 1:
        yield ring.index, k, v
        return
    hand = torch.stack((k, v))
    for step in range(ring.size):
        source = (ring.index - step) % ring.size
        wait: Callable[[], None] | None = None
        if step + 1 < ring.size:
            coming = hand.new_empty((2, plan.shares[(source - 1) % ring.size].tokens, *k.shape[1:]))
            wait = shift(hand, coming, 1, ring, "ring")
        yield source, hand[0], hand[1]
        if wait:
            wait()
            hand = coming


class _Returns:
    """Partial dK, dV on their way to the owners of the keys, one exchange a step."""

    def __init__(self, k: Tensor, plan: Plan, ring: Group, own: Sum) -> None:
        self._k, self._plan, self._ring, self._own = k, plan, ring, own
        self._pending: tuple[Callable[[], None], Tensor, Tensor] | None = None

    def send(self, source: int, partials: list[Gradient]) -> None:
        """Send what this rank found for the keys of `source`; take what another found for ours."""
        if source == self._ring.index:
            return
        part = Sum((2, self._plan.shares[source].tokens, *self._k.shape[1:]), self._k)
        part.add(partials)
        leaving = part.open().to(self._k.dtype)
        arriving = leaving.new_empty((2, *self._k.shape))
        self.finish()
        steps = (source - self._ring.index) % self._ring.size
        self._pending = shift(leaving, arriving, steps, self._ring, "ring"), leaving, arriving

    def finish(self) -> None:
        """Wait for the exchange under way and add what arrived."""
        if self._pending:
            wait, _, arriving = self._pending
            wait()
            self._own.open().add_(arriving)
            self._pending = None

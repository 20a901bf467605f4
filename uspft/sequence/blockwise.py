"""Attention over blocks, with keys and values travelling round a ring of ranks (one rank: none).

Shapes: T tokens of this ring rank, h/g its query/KV heads, D head dim; ring rank i, R ring degree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from uspft.comm import Group, Move, shift
from uspft.kernels import Kernel, Partial
from uspft.kernels.kernel import Gradient
from uspft.kernels.sinks import sinks_gradient
from uspft.sequence.algorithm import Rule, Traffic
from uspft.sequence.plan import Plan
from uspft.sequence.regions import Run, tokens_in
from uspft.sequence.sums import Sum


def attend_blocks(
    qkv: tuple[Tensor, Tensor, Tensor], plan: Plan, rule: Rule, ring: Group, kernel: Kernel
) -> Tensor:
    """out [T, h, D] of q [T, h, D] over all keys that the plan's blocks name, differentiable.

    Ring attention (arXiv 2310.01889): at step s the keys of rank i − s are at hand and the next
    ones on their way. Keys travel again in the backward; the partial dK, dV of keys that were seen
    go straight home, rounded once to the compute type and summed there in float32.
    """
    out: Tensor = _BlockAttention.apply(*qkv, rule.sinks, plan, rule.scale, ring, kernel)
    return out


def ring_traffic(plans: Sequence[Plan], pair_bytes: int) -> Traffic:
    """What the busiest rank sends, forward and backward; pair_bytes: of one token's k and v.

    Keys forward and again backward, gradients home; for one causal document R ranks of t tokens
    send 3 · (R − 1) · t pairs each.
    """
    most, messages = 0, 0
    for plan in plans:
        me, ring = plan.ring_index, plan.ring
        sources = [(me - step) % ring for step in range(ring - 1)]
        passed = [j for step, j in enumerate(sources) if plan.hops[j] > step] * 2
        home = [places for j in range(ring) if j != me and (places := plan.places(me, j))]
        sent = [plan.shares[j].tokens for j in passed] + [tokens_in(places) for places in home]
        most, messages = max(most, sum(sent)), max(messages, len(sent))
    return Traffic(most * pair_bytes, messages)


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        plan: Plan,
        scale: float,
        ring: Group,
        kernel: Kernel,
    ) -> Tensor:
        partial = Partial(q)
        for source, keys, values in _travel(k, v, plan, ring):
            partial.add(kernel.forward((q, keys, values), plan.blocks[source], scale))
            del keys, values  # or they would live on beside the next two
        out, lse = partial.result(sinks)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.plan, ctx.scale, ctx.ring, ctx.kernel = plan, scale, ring, kernel
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        dq, dkv = Sum(q.shape, q), Sum((2, *k.shape), k)
        returns = _Returns(k, ctx.plan, ctx.ring, dkv)
        for source, keys, values in _travel(k, v, ctx.plan, ctx.ring):
            blocks = ctx.plan.blocks[source]
            queries, partials = ctx.kernel.backward(
                (q, keys, values), (out, lse, dout), blocks, ctx.scale
            )
            del keys, values
            dq.add(queries)
            if source == ctx.ring.index:
                dkv.add(partials)
            returns.send(source, partials)
        returns.finish()
        dk, dv = dkv.result()
        dsinks = None if sinks is None else sinks_gradient(sinks, out, lse, dout)
        return dq.result(), dk, dv, dsinks, None, None, None, None


def _travel(k: Tensor, v: Tensor, plan: Plan, ring: Group):  # type: ignore[no-untyped-def]
    """Yield (source, keys, values) for each ring rank, own first, the next ones under way.

    Two buffers: what is at hand and what arrives. Keys that no rank further on needs stay behind.
    """
    if ring.size == 1:
        yield ring.index, k, v
        return
    hand = torch.stack((k, v))
    for step in range(ring.size):
        source, following = ((ring.index - s) % ring.size for s in (step, step + 1))
        wait: Callable[[], None] | None = None
        if step + 1 < ring.size:
            leaves, comes = plan.hops[source] > step, plan.hops[following] > step
            tokens = plan.shares[following].tokens if comes else 0
            coming = hand.new_empty((2, tokens, *k.shape[1:]))
            move = Move(hand if leaves else hand[:, :0], coming, 1)
            (wait,) = shift([move], ring, "ring")
        yield source, hand[0], hand[1]
        if wait:
            wait()
            hand = coming


class _Returns:
    """Partial dK, dV on their way to the owners of the keys, one exchange a step."""

    def __init__(self, k: Tensor, plan: Plan, ring: Group, own: Sum) -> None:
        self._k, self._plan, self._ring, self._own = k, plan, ring, own
        self._pending: tuple[Callable[[], None], Tensor, Tensor, tuple[Run, ...]] | None = None

    def send(self, source: int, partials: list[Gradient]) -> None:
        """Send what this rank found for the keys of `source`; take what another found for ours."""
        me, ring = self._ring.index, self._ring.size
        if source == me:
            return
        plan, heads = self._plan, self._k.shape[1:]
        seen = plan.places(me, source)
        tokens = plan.shares[source].tokens if seen else 0
        part = Sum((2, tokens, *heads), self._k)
        part.add(partials)
        cuts = [part.open()[:, start:stop] for start, stop in seen] or [part.open()]
        whole = torch.cat(cuts, dim=1) if len(cuts) > 1 else cuts[0]
        leaving = whole.to(self._k.dtype).contiguous()
        steps = (source - me) % ring
        home = plan.places((me - steps) % ring, me)  # another's queries saw these keys of ours
        arriving = leaving.new_empty((2, tokens_in(home), *heads))
        self.finish()
        (wait,) = shift([Move(leaving, arriving, steps)], self._ring, "ring")
        self._pending = wait, leaving, arriving, home

    def finish(self) -> None:
        """Wait for the exchange under way and add what arrived."""
        if self._pending:
            wait, _, arriving, home = self._pending
            wait()
            self._own.add_rows(home, arriving)
            self._pending = None

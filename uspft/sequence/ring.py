"""Ring attention: keys and values travel, queries stay (arXiv 2310.01889, zigzag: 2405.07719).

Shapes, as suffixes: t tokens of this ring rank, s tokens of the rank whose keys are at hand; h/g
query/KV heads on this rank, D head dim; 2: keys and values, or their gradients. This is ring rank i
of R, the ring degree.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from uspft.comm import Group, Move, shift
from uspft.kernels import Kernel, Partial, Qkv
from uspft.kernels.kernel import Gradient
from uspft.kernels.merge import Sum, sinks_gradient
from uspft.sequence.algorithm import QkvGradients, Rule, Saved
from uspft.sequence.rows.share import Share
from uspft.sequence.rows.spans import Span, tokens_in


@dataclass(frozen=True)
class RingPasses:
    """The forward and the backward of ring attention over all keys in a share's blocks.

    At step s rank i computes with the keys of rank i − s while the next ones are on their way. Keys
    travel again in the backward. The partial dK and dV of keys that were seen go straight home to
    the owner, rounded once to the compute type, and are summed there in float32 or wider.
    """

    share: Share

    def forward(self, qkv: Qkv, rule: Rule, ring: Group, kernel: Kernel) -> tuple[Tensor, ...]:
        q_thD, k_tgD, v_tgD = qkv
        partial = Partial(q_thD)
        for source, k_sgD, v_sgD in _travel(k_tgD, v_tgD, self.share, ring):
            blocks = self.share.blocks[source]
            partial.add(kernel.forward((q_thD, k_sgD, v_sgD), blocks, rule.scale))
            del k_sgD, v_sgD  # else they would be kept beside the next two
        return partial.result(rule.sinks)

    def backward(
        self, qkv: Qkv, saved: Saved, rule: Rule, ring: Group, kernel: Kernel
    ) -> QkvGradients:
        q_thD, k_tgD, v_tgD = qkv
        kept = saved[0], saved[1], saved[-1]
        dq_thD, dkv_2tgD = Sum(q_thD.shape, q_thD), Sum((2, *k_tgD.shape), k_tgD)
        returns = _Returns(k_tgD, self.share, ring, dkv_2tgD)
        for source, k_sgD, v_sgD in _travel(k_tgD, v_tgD, self.share, ring):
            blocks = self.share.blocks[source]
            queries, partials = kernel.backward((q_thD, k_sgD, v_sgD), kept, blocks, rule.scale)
            del k_sgD, v_sgD
            dq_thD.add(queries)
            del queries  # as soon as it can: else each would be there beside what is made next
            if source == ring.index:
                dkv_2tgD.add(partials)
                continue
            part = returns.part(source, partials)
            del partials
            returns.send(source, part)
        returns.finish()
        dk_tgD, dv_tgD = dkv_2tgD.result()
        dsinks = None if rule.sinks is None else sinks_gradient(rule.sinks, *kept)
        return dq_thD.result(), dk_tgD, dv_tgD, dsinks


def _travel(k_tgD: Tensor, v_tgD: Tensor, share: Share, ring: Group):  # type: ignore[no-untyped-def]
    """Yield (source, keys, values) for each ring rank, this rank's own first, while the next ones
    are under way.

    There are two buffers: one for what is at hand, one for what arrives. Keys that no rank further
    on needs stay behind.
    """
    if ring.size == 1:
        yield ring.index, k_tgD, v_tgD
        return
    hand_2sgD = torch.stack((k_tgD, v_tgD))
    for step in range(ring.size):
        source, following = ((ring.index - s) % ring.size for s in (step, step + 1))
        wait: Callable[[], None] | None = None
        if step + 1 < ring.size:
            leaves, comes = share.hops[source] > step, share.hops[following] > step
            tokens = share.keys[following].tokens if comes else 0
            coming_2sgD = hand_2sgD.new_empty((2, tokens, *k_tgD.shape[1:]))
            move = Move(hand_2sgD if leaves else hand_2sgD[:, :0], coming_2sgD, 1)
            (wait,) = shift([move], ring, "ring")
            del move  # else it would hold in the last step what is at hand in this one
        yield source, hand_2sgD[0], hand_2sgD[1]
        if wait:
            wait()
            hand_2sgD = coming_2sgD


class _Returns:
    """Partial dK and dV on their way home to the owners of the keys, in one exchange for each
    step."""

    def __init__(self, k: Tensor, share: Share, ring: Group, own: Sum) -> None:
        self._k, self._share, self._ring, self._own = k, share, ring, own
        self._pending: tuple[Callable[[], None], Tensor, Tensor, tuple[Span, ...]] | None = None

    def part(self, source: int, partials: list[Gradient]) -> Sum:
        """Return what this rank found for those keys of rank `source` that it sees."""
        seen = self._share.places(self._ring.index, source)
        part = Sum((2, tokens_in(seen), *self._k.shape[1:]), self._k)
        part.add([_among(seen, gradient) for gradient in partials])
        return part

    def send(self, source: int, part: Sum) -> None:
        """Send a part to rank `source`, and begin to receive what another rank found for this
        rank's keys."""
        me, ring = self._ring.index, self._ring.size
        leaving = part.rounded()
        self.finish()
        steps = (source - me) % ring
        # This rank's keys that another's queries saw.
        home = self._share.places((me - steps) % ring, me)
        arriving = leaving.new_empty((2, tokens_in(home), *self._k.shape[1:]))
        (wait,) = shift([Move(leaving, arriving, steps)], self._ring, "ring")
        self._pending = wait, leaving, arriving, home

    def finish(self) -> None:
        """Wait for the exchange under way, and add what arrived to this rank's own gradients."""
        if self._pending:
            (wait, leaving, arriving, home), self._pending = self._pending, None
            wait()
            del leaving
            self._own.add_rows(home, arriving)


def _among(seen: tuple[Span, ...], gradient: Gradient) -> Gradient:
    """Return the gradient of a range of tokens that are all seen, by its place among those."""
    start = sum(min(b, gradient.start) - a for a, b in seen if a < gradient.start)
    return Gradient(start, start + gradient.stop - gradient.start, gradient.tensors)

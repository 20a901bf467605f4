"""Ring attention: keys and values are passed round the ring, queries stay (arXiv 2310.01889,
zigzag: 2405.07719).

Shapes, as suffixes: t tokens of this ring rank, s tokens of the rank whose keys are present; g KV
heads on this rank, D head dim; 2: keys and values. This is ring rank i of R, the ring degree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from uspft.comm import Group, Move, shift
from uspft.kernels.kernel import Gradient
from uspft.sequence.passes import HomeByRing, KeyPasses, KeysAtHand
from uspft.sequence.rows.share import Share
from uspft.sequence.rows.spans import Span, tokens_in


@dataclass(frozen=True)
class RingPasses(KeyPasses):
    """Ring attention over all keys in a share's blocks.

    At step s rank i computes with the keys of rank i − s while the next ones are being received.
    Keys are passed round again in the backward.
    """

    share: Share

    def come(
        self, k_tgD: Tensor, v_tgD: Tensor, ring: Group, kept: Sequence[Tensor] = ()
    ) -> Iterator[KeysAtHand]:
        """Yield each rank's keys, this one's first.

        There are two buffers: one for the present keys, one for those being received. Keys that no
        rank further on needs are not passed on.
        """
        share = self.share
        if ring.size == 1:
            yield KeysAtHand(None, share.blocks_here, k_tgD, v_tgD)
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
                del move  # otherwise the last step would keep the previous step's keys in memory
            yield KeysAtHand(source if step else None, share.blocks[source], *hand_2sgD)
            if wait:
                wait()
                hand_2sgD = coming_2sgD

    def home(self, k_tgD: Tensor, ring: Group) -> _RingHome:
        return _RingHome(k_tgD, ring, self.share)


class _RingHome(HomeByRing):
    """Sends gradients of keys to their owners; a step's transfer is waited for when the next step's
    gradients are computed."""

    def __init__(self, k_tgD: Tensor, ring: Group, share: Share) -> None:
        super().__init__(k_tgD, ring, "ring")
        self._share = share

    def add(self, source: object, partials: list[Gradient]) -> None:
        if not isinstance(source, int):
            self.own.add(partials)
            return
        me, ring = self.ring.index, self.ring.size
        seen, steps = self._share.places(me, source), (source - me) % ring
        among = [_among(seen, gradient) for gradient in partials]
        partials.clear()
        leaving = self.summed(tokens_in(seen), among)
        self.finish()
        self.send([(steps, leaving, self._share.places((me - steps) % ring, me))])


def _among(seen: tuple[Span, ...], gradient: Gradient) -> Gradient:
    """Return the gradient of a range of seen tokens, with the range counted among the seen tokens
    only."""
    start = sum(min(b, gradient.start) - a for a, b in seen if a < gradient.start)
    return Gradient(start, start + gradient.stop - gradient.start, gradient.tensors)

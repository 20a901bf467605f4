"""The forward and backward of a ring rank's attention over keys that arrive piece by piece;
subclasses say how keys are brought in and how their gradients are sent back.

Shapes, as suffixes: t tokens of this ring rank, n those of the keys at hand; h/g query/KV heads on
this rank, D head dim; 2: keys and values, or their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from uspft.blocks import Block
from uspft.comm import Group, Move, shift
from uspft.kernels import Kernel, Partial, Qkv
from uspft.kernels.kernel import Gradient
from uspft.kernels.merge import Sum, sinks_gradient
from uspft.sequence.algorithm import Passes, QkvGradients, Rule, Saved
from uspft.sequence.rows.spans import Span, tokens_in


class KeysAtHand(NamedTuple):
    """Keys and values [n, g, D] that are present now, and the blocks of queries that attend to
    them."""

    source: object
    """The transfer that brought them, which determines where their gradients go; None: they are the
    rank's own."""
    blocks: Sequence[Block]
    k: Tensor
    v: Tensor


class KeyPasses(Passes, Protocol):
    """A way to bring keys to queries and to send their gradients back; attention itself is the same
    for all."""

    @property
    def keep(self) -> bool:
        """Whether received keys are saved for the backward; otherwise they are transferred
        again."""
        return False

    def come(
        self, k_tgD: Tensor, v_tgD: Tensor, ring: Group, kept: Sequence[Tensor] = ()
    ) -> Iterator[KeysAtHand]:
        """Yield keys as they arrive, the rank's own among them, while the next transfers run. kept:
        keys and values in turn that were saved in the forward."""
        ...

    def home(self, k_tgD: Tensor, ring: Group) -> GradientsHome:
        """Return a sink for the gradients of keys and values."""
        ...

    def forward(self, qkv: Qkv, rule: Rule, ring: Group, kernel: Kernel) -> tuple[Tensor, ...]:
        (q_thD, k_tgD, v_tgD), kept = qkv, list[Tensor]()
        partial = Partial(q_thD)
        for source, blocks, k_ngD, v_ngD in self.come(k_tgD, v_tgD, ring):
            partial.add(kernel.forward((q_thD, k_ngD, v_ngD), blocks, rule.scale))
            kept += [k_ngD, v_ngD] if self.keep and source is not None else []
            del k_ngD, v_ngD  # otherwise they would stay in memory with the next ones
        return *partial.result(rule.sinks), *kept

    def backward(
        self, qkv: Qkv, saved: Saved, rule: Rule, ring: Group, kernel: Kernel
    ) -> QkvGradients:
        (q_thD, k_tgD, v_tgD), (out_thD, lse_ht, *kept, dout_thD) = qkv, saved
        final, dq_thD = (out_thD, lse_ht, dout_thD), Sum(q_thD.shape, q_thD)
        home = self.home(k_tgD, ring)
        for source, blocks, k_ngD, v_ngD in self.come(k_tgD, v_tgD, ring, kept):
            queries, partials = kernel.backward((q_thD, k_ngD, v_ngD), final, blocks, rule.scale)
            del k_ngD, v_ngD
            dq_thD.add(queries)
            del queries  # freed early: otherwise each would stay in memory with the next result
            home.add(source, partials)
        dk_tgD, dv_tgD = home.result()
        dsinks = None if rule.sinks is None else sinks_gradient(rule.sinks, *final)
        return dq_thD.result(), dk_tgD, dv_tgD, dsinks


class GradientsHome(Protocol):
    """Collects partial dK and dV and sums them at the keys' owners, in float32 or wider."""

    def add(self, source: object, partials: list[Gradient]) -> None:
        """Add the gradients of the keys of a source; the list may be emptied."""
        ...

    def result(self) -> tuple[Tensor, Tensor]:
        """Return the complete dK and dV [t, g, D] of the rank's own keys."""
        ...


class HomeByRing:
    """Sends gradients to the ring ranks that own the keys, in the compute dtype."""

    def __init__(self, k_tgD: Tensor, ring: Group, kind: str) -> None:
        """kind: the name under which the transfers are counted."""
        self.like, self.ring, self._kind = k_tgD, ring, kind
        self.own = Sum((2, *k_tgD.shape), k_tgD)
        self._coming: list[tuple[Callable[[], None], Tensor, tuple[Span, ...]]] = []

    def summed(self, tokens: int, partials: list[Gradient]) -> Tensor:
        """Return the sum of the partial gradients of this many tokens, [2, tokens, g, D] in the
        compute dtype."""
        found = Sum((2, tokens, *self.like.shape[1:]), self.like)
        found.add(partials)
        partials.clear()
        return found.rounded()

    def send(self, parts: Sequence[tuple[int, Tensor, tuple[Span, ...]]]) -> None:
        """Start to send gradients to their owners. parts: (how many ranks further round the ring,
        the gradients to send there, the local ranges of this rank's keys whose gradients arrive in
        turn)."""
        shape = self.like.shape[1:]
        moves = [
            Move(part.contiguous(), self.like.new_empty((2, tokens_in(places), *shape)), offset)
            for offset, part, places in parts
        ]
        waits = shift(moves, self.ring, self._kind)
        each = zip(waits, moves, parts, strict=True)
        self._coming += [(wait, move.out, places) for wait, move, (_, _, places) in each]

    def finish(self) -> None:
        """Wait for the transfers, and add what arrived to the gradients of the rank's own keys."""
        while self._coming:
            wait, came, places = self._coming.pop(0)
            wait()
            self.own.add_rows(places, came)

    def result(self) -> tuple[Tensor, Tensor]:
        self.finish()
        found: tuple[Tensor, Tensor] = self.own.result()
        return found

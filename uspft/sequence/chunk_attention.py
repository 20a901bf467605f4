"""Attention of one chunk of a row (of a pipeline that splits rows) over its own keys and the saved
keys of earlier chunks.

Chunks run forward in order and backward in reverse. Each layer saves those keys and values of a
chunk that later chunks see. The backwards of later chunks add to the chunk's dK and dV, which are
complete when its own backward runs; that frees them.

Shapes, as suffixes: t tokens of the chunk on this ring rank, n of those that are saved of a chunk,
m of all keys up to its end that its queries see; h/g query/KV heads on this rank, D head dim; 2:
keys and values, or their gradients.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from uspft.comm import Group
from uspft.kernels import Kernel, Qkv
from uspft.kernels.kernel import Gradient
from uspft.kernels.merge import Sum
from uspft.sequence.algorithm import Passes, QkvGradients, Rule, Saved
from uspft.sequence.chunked import ChunkShare
from uspft.sequence.kept_keys import KeptKeys, LayerKeys
from uspft.sequence.passes import GradientsHome, KeyPasses, KeysAtHand
from uspft.sequence.rows.share import Share
from uspft.sequence.rows.spans import Span


def of_chunk(passes: Passes, share: Share, keys: LayerKeys | None) -> Passes:
    """Return the forward and backward of attention for a share, which may be that of a chunk.

    passes: the forward and backward over given keys. keys: the saved keys of earlier chunks in this
    layer; None: the share is of whole rows, and `passes` is returned.
    """
    if keys is None:
        return passes
    assert isinstance(share, ChunkShare)
    own = share, keys
    return ChunkPasses(*own) if share.ring == 1 else ChunkOverRanks(*own, passes)


@dataclass(frozen=True)
class ChunkPasses(KeyPasses):
    """The forward and backward of a chunk's attention, if the ring degree is 1: keys of earlier
    chunks are in memory, and the chunk's own come last."""

    share: ChunkShare
    keys: LayerKeys

    def come(
        self, k_tgD: Tensor, v_tgD: Tensor, ring: Group, kept: Sequence[Tensor] = ()
    ) -> Iterator[KeysAtHand]:
        for chunk, blocks in enumerate(self.share.behind):
            if blocks:
                yield KeysAtHand(chunk, blocks, self.keys[chunk].k, self.keys[chunk].v)
        if self.share.square:
            yield KeysAtHand(None, self.share.square, k_tgD, v_tgD)

    def home(self, k_tgD: Tensor, ring: Group) -> _ChunkHome:
        return _ChunkHome(self.share, self.keys, k_tgD)

    def forward(self, qkv: Qkv, rule: Rule, ring: Group, kernel: Kernel) -> tuple[Tensor, ...]:
        made = super().forward(qkv, rule, ring, kernel)
        _keep(self.share, self.keys, *qkv[1:])
        return made


class _ChunkHome(GradientsHome):
    """A sink for gradients of keys: those of earlier chunks' keys are added to these chunks' sums,
    those of the chunk's own keys to what later chunks contributed."""

    def __init__(self, share: ChunkShare, keys: LayerKeys, k_tgD: Tensor) -> None:
        self._share, self._keys, self._k_tgD = share, keys, k_tgD

    @cached_property
    def _own(self) -> Sum:
        return _found_later(self._share, self._keys, self._k_tgD)

    def add(self, source: object, partials: list[Gradient]) -> None:
        (self._keys[source].sum if isinstance(source, int) else self._own).add(partials)
        partials.clear()

    def result(self) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = self._own.result()
        return found


@dataclass(frozen=True)
class ChunkOverRanks:
    """The forward and backward of a chunk's attention, if ring ranks share the chunk.

    over: the algorithm's forward and backward, which get as keys those of this rank in all chunks
    up to this one.
    """

    share: ChunkShare
    keys: LayerKeys
    over: Passes

    def forward(self, qkv: Qkv, rule: Rule, ring: Group, kernel: Kernel) -> tuple[Tensor, ...]:
        made = self.over.forward(self._up_to_end(qkv), rule, ring, kernel)
        _keep(self.share, self.keys, *qkv[1:])
        return made

    def backward(
        self, qkv: Qkv, saved: Saved, rule: Rule, ring: Group, kernel: Kernel
    ) -> QkvGradients:
        dq_thD, dk_mgD, dv_mgD, dsinks = self.over.backward(
            self._up_to_end(qkv), saved, rule, ring, kernel
        )
        own = _found_later(self.share, self.keys, qkv[1])
        self._share_out(own, dk_mgD, dv_mgD)
        del dk_mgD, dv_mgD
        return dq_thD, *own.result(), dsinks

    def _share_out(self, own: Sum, dk_mgD: Tensor, dv_mgD: Tensor) -> None:
        """Add the gradients of keys and values up to the chunk's end to their chunks' sums.

        own: this chunk's sum.
        """
        pieces = self.share.pieces
        places = pairwise(accumulate((b - a for _, (a, b) in pieces), initial=0))
        for (chunk, (a, b)), (first, last) in zip(pieces, places, strict=True):
            home = own if chunk == self.share.number else self.keys[chunk].sum
            for total, part in zip(home.open(), (dk_mgD, dv_mgD), strict=True):
                total[a:b] += part[first:last]

    def _up_to_end(self, qkv: Qkv) -> Qkv:
        """Return queries [t, h, D], and keys and values [m, g, D] up to the chunk's end."""
        q_thD, k_tgD, v_tgD = qkv
        pieces = self.share.pieces
        if [*pieces] == [(self.share.number, (0, len(k_tgD)))] or not pieces:
            return qkv
        keys = {chunk: one.k for chunk, one in self.keys.items()} | {self.share.number: k_tgD}
        values = {chunk: one.v for chunk, one in self.keys.items()} | {self.share.number: v_tgD}
        k_mgD, v_mgD = (
            torch.cat([x[chunk][a:b] for chunk, (a, b) in pieces]) for x in (keys, values)
        )
        return q_thD, k_mgD, v_mgD


def _keep(share: ChunkShare, keys: LayerKeys, k_tgD: Tensor, v_tgD: Tensor) -> None:
    """Save those of a chunk's keys and values that later chunks see, in its first forward."""
    if share.number in keys:
        forget_own(share, keys)
    elif places := share.kept_places:
        keys[share.number] = KeptKeys(_picked(k_tgD, places), _picked(v_tgD, places))


def forget_own(share: Share, keys: LayerKeys) -> None:
    """Free a chunk's saved keys and values in a layer that is recomputed in the chunk's own
    backward, when no other chunk needs them."""
    assert isinstance(share, ChunkShare)
    if share.number in keys:
        keys[share.number].forget()


def _found_later(share: ChunkShare, keys: LayerKeys, k_tgD: Tensor) -> Sum:
    """Return the sum of later chunks' contributions to this one's dK and dV, and free its saved
    keys and values."""
    places = share.kept_places
    kept = keys.pop(share.number) if places else None
    if kept and [*places] == [(0, len(k_tgD))]:
        return kept.sum
    found = Sum((2, *k_tgD.shape), k_tgD)
    if kept:
        found.add_rows(places, kept.sum.open())
    return found


def _picked(x_tgD: Tensor, places: Sequence[Span]) -> Tensor:
    """Return the tokens at some places, [n, g, D], copied, so that no larger tensor stays in
    memory."""
    x_tgD = x_tgD.detach()
    own = x_tgD.untyped_storage().nbytes() == x_tgD.numel() * x_tgD.element_size()
    if [*places] == [(0, len(x_tgD))]:
        return x_tgD if own else x_tgD.clone(memory_format=torch.contiguous_format)
    return torch.cat([x_tgD[a:b] for a, b in places])

"""Attention of a chunk of a row over its own keys and those of earlier chunks, which are kept.

Chunks run forward in their order and backward in the reverse one. The keys and values of a chunk to
which later chunks attend are kept in each layer. The backwards of later chunks add to its dK and
dV, which are thus complete when its own backward runs; that frees what was kept.

Shapes, as suffixes: t tokens of the chunk on this ring rank, n of those that are kept of a chunk, m
of all up to its end that its queries see; h/g query/KV heads on this rank, D head dim; 2: keys and
values, or their gradients.
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
    """Return the forward and the backward of a chunk's attention, where the share is a chunk's.

    passes: those over all keys that the share's queries see. keys: what is kept of the chunks in
    this layer; None: the share is of whole rows.
    """
    if keys is None:
        return passes
    assert isinstance(share, ChunkShare)
    own = share, keys
    return ChunkPasses(*own) if share.ring == 1 else ChunkOverRanks(*own, passes)


@dataclass(frozen=True)
class ChunkPasses(KeyPasses):
    """The attention of a chunk that no ranks split: keys come from memory, the chunk's own last."""

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
    """The gradients of earlier chunks' keys are added to those chunks' sums, those of its own to
    what later chunks found."""

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
    """The forward and the backward of the attention of a chunk that ring ranks share: another
    algorithm brings each rank's keys up to the chunk's end to the queries of all."""

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
        """Add what was found for keys up to the chunk's end to the sums of their chunks. own: of
        this one."""
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
    """Keep of a chunk's keys and values what later ones see, in its first forward."""
    if share.number in keys:
        forget_own(share, keys)
    elif places := share.kept_places:
        keys[share.number] = KeptKeys(_picked(k_tgD, places), _picked(v_tgD, places))


def forget_own(share: Share, keys: LayerKeys) -> None:
    """Let go of a chunk's own keys and values in a layer that runs for the second time, in the
    chunk's own backward."""
    assert isinstance(share, ChunkShare)
    if share.number in keys:
        keys[share.number].forget()


def _found_later(share: ChunkShare, keys: LayerKeys, k_tgD: Tensor) -> Sum:
    """Return the sum of what later chunks found for this one's dK and dV, and let go of the
    rest."""
    places = share.kept_places
    kept = keys.pop(share.number) if places else None
    if kept and [*places] == [(0, len(k_tgD))]:
        return kept.sum
    found = Sum((2, *k_tgD.shape), k_tgD)
    if kept:
        found.add_rows(places, kept.sum.open())
    return found


def _picked(x_tgD: Tensor, places: Sequence[Span]) -> Tensor:
    """Return the tokens of some places, [n, g, D], in memory that nothing else shares, unless that
    is all of x's own."""
    x_tgD = x_tgD.detach()
    own = x_tgD.untyped_storage().nbytes() == x_tgD.numel() * x_tgD.element_size()
    if [*places] == [(0, len(x_tgD))]:
        return x_tgD if own else x_tgD.clone(memory_format=torch.contiguous_format)
    return torch.cat([x_tgD[a:b] for a, b in places])

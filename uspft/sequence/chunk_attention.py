"""Attention of a chunk of a row over its own keys and those of earlier chunks, which are kept.

Chunks go forward in their order and back in the reverse one. What later chunks' queries see of a
chunk's keys and values is kept, layer by layer and chunk by chunk; their backwards add to its dK
and dV, which are complete when its own backward comes. That lets go of what was kept.

Shapes, as suffixes: t tokens of the chunk, n of those that are kept of a chunk, h/g query/KV heads
on this rank, D head dim; 2: keys and values, or their gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from uspft.comm import Group
from uspft.kernels import Kernel, Partial
from uspft.kernels.merge import sinks_gradient
from uspft.sequence.algorithm import QkvGradients, Rule, Saved, Tensors
from uspft.sequence.kept_keys import KeptKeys, LayerKeys
from uspft.sequence.rows.chunks import ChunkShare
from uspft.sequence.rows.spans import Span
from uspft.sequence.sums import Sum


@dataclass(frozen=True)
class ChunkPasses:
    """The forward and the backward of a chunk's attention."""

    share: ChunkShare
    keys: LayerKeys

    def forward(self, qkv: Tensors, rule: Rule, ring: Group, kernel: Kernel) -> tuple[Tensor, ...]:
        q_thD, k_tgD, v_tgD = qkv
        partial = Partial(q_thD)
        for chunk, blocks in enumerate(self.share.behind):
            if blocks:
                kept = self.keys[chunk]
                partial.add(kernel.forward((q_thD, kept.k, kept.v), blocks, rule.scale))
        if self.share.blocks_here:
            partial.add(kernel.forward(qkv, self.share.blocks_here, rule.scale))
        number, places = self.share.number, self.share.kept_places
        if number in self.keys:  # the second run of a layer, in this chunk's own backward
            self.keys[number].forget()
        elif places:
            self.keys[number] = KeptKeys(_picked(k_tgD, places), _picked(v_tgD, places))
        return partial.result(rule.sinks)

    def backward(
        self, qkv: Tensors, saved: Saved, rule: Rule, ring: Group, kernel: Kernel
    ) -> QkvGradients:
        q_thD, k_tgD, _ = qkv
        found = saved[0], saved[1], saved[-1]
        dq_thD = Sum(q_thD.shape, q_thD)
        for chunk, blocks in enumerate(self.share.behind):
            if blocks:
                kept = self.keys[chunk]
                earlier = q_thD, kept.k, kept.v
                queries, partials = kernel.backward(earlier, found, blocks, rule.scale)
                dq_thD.add(queries)
                kept.sum.add(partials)
                del queries, partials  # else they would be there beside what is made next
        dkv_2tgD = self._found_later(k_tgD)
        if self.share.blocks_here:
            queries, partials = kernel.backward(qkv, found, self.share.blocks_here, rule.scale)
            dq_thD.add(queries)
            dkv_2tgD.add(partials)
            del queries, partials
        dk_tgD, dv_tgD = dkv_2tgD.result()
        dsinks = None if rule.sinks is None else sinks_gradient(rule.sinks, *found)
        return dq_thD.result(), dk_tgD, dv_tgD, dsinks

    def _found_later(self, k_tgD: Tensor) -> Sum:
        """Return the sum of what later chunks found for this one's dK and dV, and let go of the
        rest."""
        places = self.share.kept_places
        kept = self.keys.pop(self.share.number) if places else None
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

"""Attention in plain torch operations, for any device and any dtype: with every score in memory,
which is the reference that kernels are probed against, and in tiles, for scores that are
soft-capped and for wide heads.

A score s becomes cap · tanh(s / cap) (Gemma 2, arXiv 2408.00118, section 2), which torch's flash
kernels do not have; nor do flash kernels take heads of more than 256 features (Gemma 4's). A block
is cut until no piece has more than a tile of scores, so memory does not grow with the block.

Shapes: n queries and m keys of a piece, g KV heads, r query heads for each of them, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from uspft.blocks import WIDEST, Block, Mask
from uspft.kernels.kernel import BlockGradients, BlockOutput, Gradient, Kernel, KernelSaved, Qkv

TILE_SCORES = 2**18
"""How many scores of one head are in memory at once, in each of a few tensors. It does not depend
on the number of heads, so that heads computed separately are cut into the same pieces."""

SEEN: dict[Mask, Callable[[Tensor], Tensor]] = {
    Mask.FULL: torch.clone,
    Mask.CAUSAL: torch.tril,
    Mask.FLIPPED: torch.triu,
}


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Sequence[Block],
    scale: float,
    *,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (out [T, h, D], lse [h, T]) over the union of blocks, differentiable.

    It takes O(T · T') memory for T queries and T' keys. A query without a key has out 0 and lse
    -inf.
    """
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    seen = torch.zeros(len(q), len(k), dtype=torch.bool, device=q.device)
    for block in blocks:
        square = seen[block.q0 : block.q1, block.k0 : block.k1]
        square |= SEEN[block.mask](torch.ones_like(square))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~seen, -torch.inf)
    lse = torch.logsumexp(scores, -1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    return torch.einsum("hqk,khd->qhd", weights, v), lse


class TorchCapped:
    """Attention with a soft-cap, or without, written out in float32 or wider."""

    name = "torch"

    def __init__(self, softcap: float | None) -> None:
        self.softcap = softcap

    def forward(self, qkv: Qkv, blocks: Sequence[Block], scale: float) -> list[BlockOutput]:
        parts = []
        for piece in pieces(blocks):
            q, k, v = _by_group(qkv, piece)
            capped, _ = self._scores(q, k, piece, scale)
            lse = capped.logsumexp(-1)
            out = torch.einsum("grnm,mgd->ngrd", (capped - lse[..., None]).exp_(), v)
            parts.append(BlockOutput(piece.q0, piece.q1, out.flatten(1, 2), lse.flatten(0, 1)))
        return parts

    def backward(
        self, qkv: Qkv, saved: KernelSaved, blocks: Sequence[Block], scale: float
    ) -> BlockGradients:
        queries, keys = [], []
        groups = qkv[1].shape[1]
        for piece in pieces(blocks):
            q, k, v = _by_group(qkv, piece)
            rows = slice(piece.q0, piece.q1)
            out, dout = (_wide(x[rows]).unflatten(1, (groups, -1)) for x in (saved[0], saved[2]))
            lse = saved[1][:, rows].unflatten(0, (groups, -1))[..., None]
            capped, slope = self._scores(q, k, piece, scale)
            weights = (capped - lse).exp_()
            dv = torch.einsum("grnm,ngrd->mgd", weights, dout)
            along = torch.einsum("ngrd,ngrd->grn", out, dout)[..., None]
            dscores = torch.einsum("ngrd,mgd->grnm", dout, v).sub_(along)
            dscores.mul_(weights).mul_(scale)
            if slope is not None:
                dscores.mul_(slope)
            dq = torch.einsum("grnm,mgd->ngrd", dscores, k).flatten(1, 2)
            dk = torch.einsum("grnm,ngrd->mgd", dscores, q)
            queries.append(Gradient(piece.q0, piece.q1, (dq,)))
            keys.append(Gradient(piece.k0, piece.k1, (dk, dv)))
        return queries, keys

    def _scores(
        self, q: Tensor, k: Tensor, piece: Block, scale: float
    ) -> tuple[Tensor, Tensor | None]:
        """Return the capped scores [g, r, n, m], -inf where a key is not seen, and the slope of the
        cap at each; None without a cap."""
        capped, slope = torch.einsum("ngrd,mgd->grnm", q, k), None
        if self.softcap is None:
            capped.mul_(scale)
        else:
            bent = capped.mul_(scale / self.softcap).tanh_()
            slope = 1 - bent.square()
            capped = bent.mul_(self.softcap)
        if piece.mask is not Mask.FULL:
            seen = SEEN[piece.mask](torch.ones_like(capped[0, 0], dtype=torch.bool))
            capped.masked_fill_(~seen, -torch.inf)
        return capped, slope


class ByWidth:
    """A kernel for the head dims that it supports, and plain PyTorch attention for wider heads."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel, self._written = kernel, TorchCapped(kernel.softcap)
        self.name, self.softcap = kernel.name, kernel.softcap

    def _of(self, q: Tensor) -> Kernel:
        return self._kernel if q.shape[-1] <= WIDEST else self._written

    def forward(self, qkv: Qkv, blocks: Sequence[Block], scale: float) -> list[BlockOutput]:
        return self._of(qkv[0]).forward(qkv, blocks, scale)

    def backward(
        self, qkv: Qkv, saved: KernelSaved, blocks: Sequence[Block], scale: float
    ) -> BlockGradients:
        return self._of(qkv[0]).backward(qkv, saved, blocks, scale)


def pieces(blocks: Sequence[Block]) -> Iterator[Block]:
    """Yield the blocks, cut in halves until none has more than a tile of scores."""
    for block in blocks:
        if (block.q1 - block.q0) * (block.k1 - block.k0) <= TILE_SCORES:
            yield block
        else:
            yield from pieces(_halves(block))


def _halves(block: Block) -> list[Block]:
    """Return a block cut in two along its longer side; a block on the diagonal is cut into two such
    blocks and the full square between them."""
    q0, q1, k0, k1, mask = block
    q, k = (q0 + q1) // 2, (k0 + k1) // 2
    if mask is Mask.FULL:
        if q1 - q0 < k1 - k0:
            return [Block(q0, q1, k0, k, mask), Block(q0, q1, k, k1, mask)]
        return [Block(q0, q, k0, k1, mask), Block(q, q1, k0, k1, mask)]
    first, second = Block(q0, q, k0, k0 + q - q0, mask), Block(q, q1, k0 + q - q0, k1, mask)
    if mask is Mask.CAUSAL:
        return [first, second, Block(q, q1, k0, k0 + q - q0, Mask.FULL)]
    return [first, second, Block(q0, q, k0 + q - q0, k1, Mask.FULL)]


def _by_group(qkv: Qkv, piece: Block) -> Qkv:
    """Return q [n, g, r, D], k and v [m, g, D] of a piece, in float32 or wider."""
    q, k, v = qkv
    keys = slice(piece.k0, piece.k1)
    by_group = _wide(q[piece.q0 : piece.q1]).unflatten(1, (k.shape[1], -1))
    return by_group, _wide(k[keys]), _wide(v[keys])


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))

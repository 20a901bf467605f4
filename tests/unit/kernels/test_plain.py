"""Blocks of capped scores are cut into pieces that cover them."""

from __future__ import annotations

import pytest
import torch

from uspft.kernels import Block, Mask, plain
from uspft.kernels.plain import SEEN


def test_pieces_of_blocks_cover_each_score_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain, "TILE_SCORES", 40)
    for block in (
        Block(3, 30, 5, 32, Mask.CAUSAL),
        Block(0, 29, 4, 33, Mask.FLIPPED),
        Block(1, 4, 0, 33, Mask.FULL),
        Block(0, 33, 7, 8, Mask.FULL),
    ):
        pieces = list(plain.pieces([block]))
        met = torch.zeros(33, 33, dtype=torch.int)
        for piece in pieces:
            assert (piece.q1 - piece.q0) * (piece.k1 - piece.k0) <= 40
            square = met[piece.q0 : piece.q1, piece.k0 : piece.k1]
            square += SEEN[piece.mask](torch.ones_like(square))
        whole = torch.zeros_like(met)
        square = whole[block.q0 : block.q1, block.k0 : block.k1]
        square += SEEN[block.mask](torch.ones_like(square))
        assert torch.equal(met, whole)

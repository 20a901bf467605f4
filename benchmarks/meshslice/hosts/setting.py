"""What one launch of four hosts measures, and the rate of the links between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from uspft.families import ModelShape
from uspft.planner.mesh import FLOWS, MeshProduct, mesh_products

HOSTS = 4
SQUARE = (2, 2)
"""Mesh rows and mesh columns of everything that is measured on one mesh alone."""
MESHES = (SQUARE, (1, 4), (4, 1))
ELEMENT_BYTES = 4
HEAD_DIM = 64


@dataclass(frozen=True)
class Setting:
    """A setting is one launch of the four hosts.

    part: what is measured. mbit: the rate of the hosts' links; None: all ranks are on one host.
    ratio: what Collective's transfers are to take at that rate, over its products. side: of the
    square matrices of `overlap`. hidden, tokens: of the block of `block` and `baselines`.
    """

    part: str
    mbit: int | None
    ratio: float | None
    side: int
    hidden: int
    tokens: int
    rounds: int
    slices: tuple[int, ...]

    @property
    def shape(self) -> ModelShape:
        """The shape of a model of one block, which at a hidden size of 2,048 has LLaMA 3.2's."""
        heads = self.hidden // HEAD_DIM
        return ModelShape(
            model_type="llama",
            hidden_size=self.hidden,
            layers=1,
            heads=heads,
            kv_heads=heads // 4,
            head_dim=HEAD_DIM,
            intermediate_size=4 * self.hidden,
            vocab_size=256,
            max_positions=self.tokens,
            rope=None,
            tied=False,
            attention_bias=False,
            raw={},
        )

    @property
    def products(self) -> tuple[MeshProduct, ...]:
        """The four products of the block."""
        return mesh_products(self.shape)

    @property
    def square(self) -> tuple[int, int, int]:
        """Tokens of a mesh row, hidden size and features of a mesh column in `overlap`."""
        rows, columns = SQUARE
        return self.side // rows, self.side, self.side // columns


def sent_bytes(tokens: int, hidden: int, features: int, mesh: tuple[int, int]) -> int:
    """Return what a rank sends in any flow of a product, along its mesh row and its mesh column.

    tokens: those of a mesh row. features: those of a mesh column.
    """
    rows, columns = mesh
    along_row = tokens * hidden * (columns - 1) // columns
    along_column = hidden * features * (rows - 1) // rows
    return ELEMENT_BYTES * (along_row + along_column)


def block_bytes(products: Sequence[MeshProduct], tokens: int, mesh: tuple[int, int]) -> int:
    """Return what a rank sends in all flows of a block's products, of so many tokens in all."""
    rows, columns = mesh
    return sum(
        len(FLOWS[one.kept]) * sent_bytes(tokens // rows, one.hidden, one.features(columns), mesh)
        for one in products
    )


def rate_mbit(sent: int, product_seconds: float, ratio: float) -> int:
    """Return the Mbit/s at which so many bytes take `ratio` times as long as the products."""
    return max(1, math.ceil(8e-6 * sent / (ratio * product_seconds)))

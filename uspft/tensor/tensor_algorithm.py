"""The seam: what a tensor-parallel algorithm must say about itself."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from uspft.comm import Group
from uspft.config.problems import Finding


class TensorAlgorithm(Protocol):
    """One way to split matrices over ranks: a dataclass of its degree and its options."""

    @property
    def degree(self) -> int:
        """How many ranks hold parts of one matrix."""
        ...

    @property
    def splits_tokens(self) -> bool:
        """Whether a rank sees its own tokens alone between the blocks of split matrices."""
        ...

    def problems(self, query_heads: int, kv_heads: int, *, fused: bool) -> list[Finding]:
        """Return why a model cannot be split: (recipe key, what is wrong, remedy) each.

        fused: whether its query, key and value projections are one matrix.
        """
        ...

    def enter(self, x: Tensor, tokens: int, group: Group) -> Tensor:
        """Return what column-split matrices take, [1, T, d], of what lies between blocks."""
        ...

    def leave(self, x: Tensor, group: Group) -> Tensor:
        """Return what lies between blocks, of the part that this rank's row-split matrices made."""
        ...

    def cost(self, blocks: int, tokens: int, hidden: int, element_bytes: int) -> tuple[int, int]:
        """Return the bytes and messages that a rank sends for so many blocks, forward and backward.

        tokens: those that the ranks of a matrix have together. hidden: features between blocks.
        """
        ...

"""Megatron's tensor parallelism: each pair of matrices is split by columns and then by rows
(1909.08053), and optionally tokens are split between blocks (2205.05198).

A block begins with column-split matrices and ends with a row-split one. Entering a block gives
every rank all tokens; leaving it sums the ranks' partial outputs. Each is the other's transpose, so
that a block sends as much forward as backward.

Shapes, as suffixes: T tokens of all tensor ranks together, t one rank's of those; d hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from uspft.config.problems import Finding
from uspft.tensor.parts import divide_heads, tokens_of_each

if TYPE_CHECKING:
    from torch import Tensor

    from uspft.comm import Group


@dataclass(frozen=True)
class Megatron:
    """Each pair of matrices split by columns, then by rows, over `degree` ranks."""

    degree: int
    splits_tokens: bool = False
    """Whether norms and residuals between blocks get only a rank's own tokens: instead of an
    all-reduce there is an all-gather into a block and a reduce-scatter out of it."""
    copies: int = 1
    """The number of groups of a rank's tokens that take turns in a block, so that one's
    communication overlaps with another's computation."""

    def problems(self, query_heads: int, kv_heads: int, hidden: int) -> list[Finding]:
        """Return why heads cannot be split: (recipe key, what is wrong, remedy) each."""
        every = range(1, query_heads + 1)
        legal = [n for n in every if divide_heads(query_heads, kv_heads, n)]
        if self.degree in legal:
            return []
        what = (
            f"{query_heads} query heads and {kv_heads} key-value heads do not split over "
            f"{self.degree} ranks"
        )
        remedy = f"write one of {', '.join(map(str, legal))}"
        return [("parallel_config.model_parallel", what, remedy)]

    def enter(self, x: Tensor, tokens: int, group: Group) -> Tensor:
        """Return all tokens [1, T, d], for column-split matrices; differentiable.

        x: [1, t, d] where tokens are split, else [1, T, d]. tokens: T.
        """
        if group.size == 1:
            return x
        from uspft.tensor.sums import all_tokens, for_all

        return all_tokens(x[0], tokens, group)[None] if self.splits_tokens else for_all(x, group)

    def leave(self, x: Tensor, group: Group) -> Tensor:
        """Return the sum over ranks of the row-split matrix's partial outputs, [1, T, d];
        differentiable.

        Where tokens are split it is [1, t, d], padded with zeros on the last rank.
        """
        if group.size == 1:
            return x
        from uspft.tensor.sums import own_tokens_of_sum, sum_of_all

        return own_tokens_of_sum(x[0], group)[None] if self.splits_tokens else sum_of_all(x, group)

    def cost(self, blocks: int, tokens: int, hidden: int, element_bytes: int) -> tuple[int, int]:
        """Return the bytes and messages that a rank sends for this many blocks, forward and
        backward.

        Each way it is an all-reduce, or an all-gather and a reduce-scatter, which send the same
        bytes except for padding.
        """
        others = self.degree - 1
        if self.splits_tokens:
            each = tokens_of_each(tokens, self.degree) * hidden * element_bytes
            return 4 * blocks * others * each, 4 * blocks * others
        each = 2 * others * tokens * hidden * element_bytes // self.degree
        return 2 * blocks * each, 2 * blocks * 2 * others

"""The interface of a tensor-parallel algorithm. Each algorithm is one file, and
config/algorithms.py lists them."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING, Protocol

from uspft.config.algorithms import TENSOR
from uspft.config.problems import Finding

if TYPE_CHECKING:
    from torch import Tensor

    from uspft.comm import Group
    from uspft.config import ParallelBlock
    from uspft.layout import Layout


class Grid(Protocol):
    """A mesh of ranks, as one of them sees it."""

    @property
    def rows(self) -> Group:
        """The ranks of its mesh column, in the order of mesh rows."""
        ...

    @property
    def columns(self) -> Group:
        """The ranks of its mesh row, in the order of mesh columns."""
        ...


class TensorAlgorithm(Protocol):
    """One way to split matrices over ranks: a dataclass of its degree and its options."""

    @property
    def degree(self) -> int:
        """The number of ranks that hold the parts of one matrix."""
        ...

    @property
    def splits_tokens(self) -> bool:
        """Whether each rank has different tokens between blocks (attention and MLP)."""
        ...

    @property
    def copies(self) -> int:
        """The number of copies of a rank's tokens that take turns, so that one's transfers overlap
        with another's products (`fine_grain_interleave`); 1: none."""
        ...

    def problems(self, query_heads: int, kv_heads: int, hidden: int) -> list[Finding]:
        """Return why a model cannot be split: (recipe key, what is wrong, remedy) each.

        hidden: the hidden size.
        """
        ...

    def enter(self, x: Tensor, tokens: int, group: Group) -> Tensor:
        """Return the input of a block's column-split matrices, [1, T, d], from a rank's hidden
        states between blocks."""
        ...

    def leave(self, x: Tensor, group: Group) -> Tensor:
        """Return a rank's hidden states between blocks, from the partial output of its row-split
        matrix."""
        ...


def tensor_algorithm(parallel: ParallelBlock, layout: Layout) -> TensorAlgorithm:
    """Return the algorithm of a recipe's `parallel_config` under a layout, with its options."""
    row = TENSOR[parallel.tensor_parallel_algo]
    options = {name: getattr(parallel, key) for key, name in row.options.items()}
    algorithm: TensorAlgorithm = resolve_name(row.code)(layout.tensor, **options)
    return algorithm

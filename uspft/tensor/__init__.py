"""How a matrix is split: what a tensor-parallel algorithm must say about itself. Each is one file,
and config/algorithms.py lists them."""

from __future__ import annotations

from collections.abc import Sequence
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Protocol

from uspft.config.algorithms import TENSOR
from uspft.config.problems import Finding
from uspft.tensor.parts import Used

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
        """How many ranks hold parts of one matrix."""
        ...

    @property
    def splits_tokens(self) -> bool:
        """Whether a rank sees its own tokens alone between the blocks of split matrices."""
        ...

    @property
    def copies(self) -> int:
        """In how many copies of a rank's tokens blocks work by turns."""
        ...

    def problems(self, query_heads: int, kv_heads: int, hidden: int) -> list[Finding]:
        """Return why a model cannot be split: (recipe key, what is wrong, remedy) each.

        hidden: features between blocks.
        """
        ...

    def enter(self, x: Tensor, tokens: int, group: Group) -> Tensor:
        """Return what column-split matrices take, [1, T, d], of what lies between blocks."""
        ...

    def leave(self, x: Tensor, group: Group) -> Tensor:
        """Return what lies between blocks, of the part that this rank's row-split matrices made."""
        ...


class MeshAlgorithm(TensorAlgorithm, Protocol):
    """One way to multiply matrices that lie on a mesh in blocks."""

    def inward(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        grid: Grid,
        product: int,
        used: Sequence[Used] = (),
    ) -> tuple[Tensor, ...]:
        """Return what projections into a block make of this rank's part of x; differentiable.

        product: the place of the product among those of a layer. used: which part of each weight
        that is here is multiplied; left out, all of it.
        """
        ...

    def outward(
        self, x: Tensor, weight: Tensor, grid: Grid, product: int, used: Used = ()
    ) -> Tensor:
        """Return this rank's part of what the projection out of a block makes; differentiable."""
        ...

    def whole(self, weight: Tensor, grid: Grid) -> Tensor:
        """Return all features of an embedding's or a head's weight; differentiable."""
        ...


def tensor_algorithm(parallel: ParallelBlock, layout: Layout) -> TensorAlgorithm:
    """Return the algorithm of a recipe's `parallel_config` under a layout, with its options."""
    row = TENSOR[parallel.tensor_parallel_algo]
    options = {name: getattr(parallel, key) for key, name in row.options.items()}
    algorithm: TensorAlgorithm = resolve_name(row.code)(layout.tensor, **options)
    return algorithm

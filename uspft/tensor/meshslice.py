"""MeshSlice: matrices split along both dimensions over a mesh of ranks, and their products computed
in slices, so that one slice's transfer overlaps with another's product.

Activations have the same split through the whole model: tokens over mesh rows, possibly in unequal
numbers, and features over mesh columns. Of a product's three matrices the largest stays in place,
which is an activation because tokens are many: the output of projections into a block
(output-stationary forward), the input of the projection out of it (left-stationary). The gradient
of the input uses the other of these two flows, that of the weight the right-stationary one. All of
them slice the hidden size.

Shapes, as suffixes: t tokens of a mesh row; d hidden size, o and i features inside a block; R mesh
rows, C mesh columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING

from uspft.config.problems import Finding
from uspft.tensor import Grid
from uspft.tensor.parts import divide_heads, next_divisor

if TYPE_CHECKING:
    from torch import Tensor

    from uspft.comm import Group
    from uspft.tensor.parts import Used

PRODUCTS = ("qkv", "out", "gate_up", "down")
"""The products of a layer, in the order of the numbers in `tensor_slices`."""


@dataclass(frozen=True)
class MeshSlice:
    """Matrices over a mesh of ranks, with products in slices."""

    degree: int
    mesh: tuple[int, int]
    """Mesh rows and columns."""
    slices: tuple[int, int, int, int]
    """The number of slices of each of PRODUCTS."""

    @property
    def splits_tokens(self) -> bool:
        """Whether a rank has fewer tokens between blocks than inside of them: never."""
        return False

    @property
    def copies(self) -> int:
        """One: sliced products overlap with transfers by themselves."""
        return 1

    def problems(self, query_heads: int, kv_heads: int, hidden: int) -> list[Finding]:
        """Return why a model cannot be split: (recipe key, what is wrong, remedy) each.

        hidden: features between blocks.
        """
        key = "parallel_config.tensor_mesh"
        shapes = [(r, self.degree // r) for r in range(1, self.degree + 1) if self.degree % r == 0]
        legal = [
            f"[{r}, {c}]"
            for r, c in shapes
            if hidden % r == hidden % c == 0 and divide_heads(query_heads, kv_heads, c)
        ]
        rows, columns = self.mesh
        remedy = f"write one of {', '.join(legal)}" if legal else "write another model_parallel"
        if hidden % rows or hidden % columns:
            what = f"hidden_size {hidden} does not split over a mesh of {rows} × {columns}"
            return [(key, what, remedy)]
        if not divide_heads(query_heads, kv_heads, columns):
            what = (
                f"{query_heads} query heads and {kv_heads} key-value heads do not split "
                f"over {columns} mesh columns"
            )
            return [(key, what, remedy)]
        both = gcd(hidden // rows, hidden // columns)
        wrong = sorted({number for number in self.slices if both % number})
        if not wrong:
            return []
        found = " and ".join(map(str, wrong))
        what = f"is {found}, which does not slice hidden_size {hidden} on {rows} × {columns} ranks"
        instead = " and ".join(str(next_divisor(both, number)) for number in wrong)
        return [("parallel_config.tensor_slices", what, f"write {instead}")]

    def inward(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        grid: Grid,
        product: int,
        used: Sequence[Used] = (),
    ) -> tuple[Tensor, ...]:
        """Return the outputs [t, o/C] of projections into a block for x [t, d/C]; differentiable.

        weights: [o/C, d/R] each, or larger tensors whose part `used` is; the projections share the
        gathered slices of x. product: the index in PRODUCTS.
        """
        from uspft.tensor.flows import SlicedProduct, inward

        slices = self.slices[product]
        return inward(x, SlicedProduct(grid, slices, weights, used or [()] * len(weights)))

    def outward(
        self, x: Tensor, weight: Tensor, grid: Grid, product: int, used: Used = ()
    ) -> Tensor:
        """Return the output [t, d/C] of the projection out of a block for x [t, i/C];
        differentiable.

        weight: [d/R, i/C], or a larger tensor whose part `used` is. product: the index in PRODUCTS.
        """
        from uspft.tensor.flows import SlicedProduct, outward

        return outward(x, SlicedProduct(grid, self.slices[product], [weight], [used]))

    def whole(self, weight: Tensor, grid: Grid) -> Tensor:
        """Return all features [v, d] of a weight [v, d/R] of embedding or head; differentiable."""
        if grid.rows.size == 1:
            return weight
        from uspft.tensor.flows import features_of_all

        return features_of_all(weight, grid.rows)

    def enter(self, x: Tensor, tokens: int, group: Group) -> Tensor:
        """Return all features [1, t, d] of x [1, t, d/C]; differentiable.

        group: mesh columns.
        """
        if group.size == 1:
            return x
        from uspft.tensor.flows import features_of_all

        return features_of_all(x[0], group)[None]

    def leave(self, x: Tensor, group: Group) -> Tensor:
        """Return this rank's features, [1, t, d/C], of the sum of x [1, t, d] over mesh columns."""
        if group.size == 1:
            return x
        from uspft.tensor.flows import own_features_of_sum

        return own_features_of_sum(x[0], group)[None]

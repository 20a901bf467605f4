"""MeshSlice: matrices divided along both dimensions over a mesh of ranks, and products of them in
slices, whose transfers run behind the products of other slices.

Activations stay as they are through a whole model: tokens over mesh rows, which may have unequal
numbers of them, features over mesh columns. Of a product's three matrices the largest stays where
it is, since tokens are many: what projections into a block make (output-stationary forward), what
the projection out of it takes (left-stationary). The other of these two flows makes the gradient of
the input, the right-stationary one that of the weight. In all of them the dimension in slices is
the hidden size.

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
"""The products of a layer, in the order in which `tensor_slices` may name their numbers."""


@dataclass(frozen=True)
class MeshSlice:
    """Matrices over a mesh of ranks, products in slices."""

    degree: int
    mesh: tuple[int, int]
    """Mesh rows and columns."""
    slices: tuple[int, int, int, int]
    """How many slices each of PRODUCTS is made in."""

    @property
    def splits_tokens(self) -> bool:
        """Whether a rank sees its own tokens alone between blocks: no more than inside of them."""
        return False

    @property
    def copies(self) -> int:
        """One: products in slices hide transfers themselves."""
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
        """Return what projections into a block make of x [t, d/C], [t, o/C] each; differentiable.

        weights: [o/C, d/R] each, or what such a part, `used`, is cut out of; the projections share
        what they gather of x. product: which of PRODUCTS it is.
        """
        from uspft.tensor.flows import SlicedProduct, inward

        slices = self.slices[product]
        return inward(x, SlicedProduct(grid, slices, weights, used or [()] * len(weights)))

    def outward(
        self, x: Tensor, weight: Tensor, grid: Grid, product: int, used: Used = ()
    ) -> Tensor:
        """Return what the projection out of a block makes of x [t, i/C], [t, d/C]; differentiable.

        weight: [d/R, i/C], or what such a part, `used`, is cut out of. product: which of PRODUCTS
        it is.
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
        """Return all features [1, t, d] of x [1, t, d/C]; differentiable. group: mesh columns."""
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

"""The matrices that a token is multiplied by, from the config of a model alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from uspft.families import ModelShape

SplitSide = Literal["inputs", "outputs", "none"]


@dataclass(frozen=True)
class ProductShape:
    """The shape of one matrix of a layer, or of as many experts as it has copies.

    splits: the side along which tensor ranks divide it, in units that are not cut (a head's width).
    """

    inputs: int
    outputs: int
    splits: SplitSide = "none"
    unit: int = 1
    per_token: int = 1
    """How many of its copies a token meets."""
    copies: int = 1

    @property
    def parameters(self) -> int:
        return self.inputs * self.outputs * self.copies

    @property
    def met(self) -> int:
        """The number of parameters that one token is multiplied by."""
        return self.inputs * self.outputs * self.per_token

    def on(self, tensor: int) -> ProductShape:
        """Return what the tensor rank with most of the matrix holds.

        A head's part is never cut, but replicated.
        """
        if self.splits == "none":
            return self
        whole = self.inputs if self.splits == "inputs" else self.outputs
        part = -(-(whole // self.unit) // tensor) * self.unit
        sizes = (part, self.outputs) if self.splits == "inputs" else (self.inputs, part)
        return ProductShape(*sizes, self.splits, self.unit, self.per_token, self.copies)


def layer_projections(shape: ModelShape) -> list[ProductShape]:
    """Return query, key, value and output projections, then those of the MLP or of the experts."""
    hidden, dim = shape.hidden_size, shape.head_dim
    heads, kv_heads = shape.heads * dim, shape.kv_heads * dim
    found = [
        ProductShape(hidden, heads, "outputs", dim),
        ProductShape(hidden, kv_heads, "outputs", dim),
        ProductShape(hidden, kv_heads, "outputs", dim),
        ProductShape(heads, hidden, "inputs", dim),
    ]
    met, experts, inner = 1, 1, shape.intermediate_size
    if named := shape.raw.get("num_experts_per_tok"):
        met = int(named)
        experts = int(shape.raw.get("num_local_experts") or shape.raw.get("num_experts") or met)
        inner = int(shape.raw.get("moe_intermediate_size") or inner)
        found.append(ProductShape(hidden, experts))
    found += [ProductShape(hidden, inner, "outputs", 1, met, experts)] * 2
    return [*found, ProductShape(inner, hidden, "inputs", 1, met, experts)]


def head_projection(shape: ModelShape) -> ProductShape:
    """Return the output head, whose vocabulary tensor ranks divide."""
    return ProductShape(shape.hidden_size, shape.vocab_size, "outputs")


def parameters_of(shape: ModelShape, tensor: int = 1) -> tuple[int, int]:
    """Return how many parameters a tensor rank holds: outside the layers, and of one layer.

    Biases are left out.
    """
    head = head_projection(shape).on(tensor).parameters
    layer = sum(one.on(tensor).parameters for one in layer_projections(shape))
    return head * (1 if shape.tied else 2) + shape.hidden_size, layer + 2 * shape.hidden_size


def expert_parameters(shape: ModelShape, tensor: int = 1) -> int:
    """Return how many of a layer's parameters on a tensor rank are those of its experts."""
    return sum(one.on(tensor).parameters for one in layer_projections(shape) if one.copies > 1)


def met_parameters(shape: ModelShape) -> int:
    """Return how many parameters a token is multiplied by, as MFU counts them.

    The embedding look-up is left out, and of the experts those count that a token meets.
    """
    layer = sum(one.met for one in layer_projections(shape))
    return layer * shape.layers + head_projection(shape).met

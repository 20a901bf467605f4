"""The models whose layers are simulated, and the flows of their products."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from benchmarks.meshslice.programs import Product
from uspft.planner.mesh_products import FLOWS, kept_of

SEQUENCE = 2048
BLOCK, MAX_SLICES = 8, 64


@dataclass(frozen=True)
class Transformer:
    """A model by its public sizes; its MLP is four times as wide, and every head has its keys."""

    name: str
    layers: int
    hidden: int
    heads: int

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        """The inputs and outputs of a layer's products."""
        h = self.hidden
        return {"qkv": (h, 3 * h), "out": (h, h), "up": (h, 4 * h), "down": (4 * h, h)}


GPT_3 = Transformer("GPT-3 175B", 96, 12288, 96)
MEGATRON_NLG = Transformer("Megatron-NLG 530B", 105, 20480, 128)
MODELS = (GPT_3, MEGATRON_NLG)


def flows(tokens: int, inputs: int, outputs: int) -> list[Product]:
    """Return a product's flows: forward, gradient of the input, of the weight. The largest of its
    matrices stays where it is."""
    stays = kept_of(tokens, inputs, outputs)
    sizes = {
        "output": (tokens, inputs, outputs),
        "input": (tokens, outputs, inputs),
        "weight": (inputs, tokens, outputs),
    }[stays]
    return [Product(flow, *sizes) for flow in FLOWS[stays]]


def slice_counts(product: Product, rows: int, columns: int) -> list[int]:
    """Return the numbers of slices that a mesh allows, of blocks that suit a TPU's memory."""
    held = [product.sliced // ranks for ranks in (rows, columns) if product.sliced % ranks == 0]
    if len(held) < 2:
        return []
    return [count for count in range(1, MAX_SLICES + 1) if gcd(*held) % (count * BLOCK) == 0]

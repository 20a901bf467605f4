"""The models whose layers are simulated, and the flows of their products."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.meshslice.programs import Product
from benchmarks.meshslice.torus import ELEMENT_BYTES
from uspft.layout import Layout
from uspft.planner.mesh import FLOWS, MeshProduct, Stationary
from uspft.planner.products import ProductShape

SEQUENCE = 2048


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


def kept_of(tokens: float, inputs: int, outputs: int) -> Stationary:
    """Return the largest matrix of a product, which should stay in place in all three flows."""
    if outputs > inputs and tokens >= inputs:
        return "output"
    return "input" if inputs >= outputs and tokens >= outputs else "weight"


def mesh_product(
    name: str, tokens: int, inputs: int, outputs: int, kept: Stationary | None = None
) -> MeshProduct:
    """Return a product as the planner has it. kept: the matrix that stays where it is in all flows;
    None: the largest one."""
    stays = kept or kept_of(tokens, inputs, outputs)
    whole = ProductShape(inputs, outputs, "inputs" if stays == "input" else "outputs")
    hidden = outputs if stays == "input" else inputs
    return MeshProduct(name, stays, hidden, (whole,), ELEMENT_BYTES, gathers_once=False)


def flows(product: MeshProduct, tokens: int) -> list[Product]:
    """Return a product's flows: forward, gradient of the input, of the weight."""
    down, sliced, across = map(round, product.sides(tokens, Layout()))
    return [Product(flow, down, sliced, across) for flow in FLOWS[product.kept]]

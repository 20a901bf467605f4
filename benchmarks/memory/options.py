"""The model that is counted, and what is counted of ours: one option after another."""

from __future__ import annotations

from benchmarks.memory.report import OURS, OURS_OFFLOADED
from uspft.config.recipe import MemoryBlock
from uspft.families import ModelShape
from uspft.model.tile_sizes import mlp_tile_tokens, tile_tokens

MODEL = "meta-llama/Llama-3.1-8B"


def ours(shape: ModelShape, ranks: int) -> dict[str, MemoryBlock]:
    """Return what is counted of ours: one option after another."""
    inner = shape.intermediate_size
    tiled: dict[str, object] = {
        "recompute": "attention",
        "mlp_tile_tokens": mlp_tile_tokens("auto", inner),
    }
    options: dict[str, dict[str, object]] = {
        "uspft, recompute: nothing": {"recompute": "nothing"},
        "uspft, recompute: exchange": {"recompute": "exchange"},
        "uspft, recompute: attention": {"recompute": "attention"},
        OURS: tiled,
        OURS_OFFLOADED: {**tiled, "offload_activations": "cpu"},
    }
    if ranks == 1:
        del options["uspft, recompute: exchange"]
    tile = tile_tokens("auto", shape.vocab_size)
    return {
        name: MemoryBlock.model_validate({**each, "loss_tile_tokens": tile})
        for name, each in options.items()
    }

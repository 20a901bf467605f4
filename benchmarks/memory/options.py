"""The model that is counted, and what is counted of ours: one option after another."""

from __future__ import annotations

from benchmarks.memory.report import GROUPS, GROUPS_EXCHANGE, GROUPS_RING, OURS, OURS_OFFLOADED
from uspft.config.recipe import MemoryBlock
from uspft.families import ModelShape
from uspft.layout import Layout
from uspft.model.tile_sizes import mlp_tile_tokens, tile_tokens

MODEL = "meta-llama/Llama-3.1-8B"
LAYOUTS = {
    1: ("whole", Layout()),
    8: ("ulysses_cp", Layout(ulysses=8)),
    32: ("planned_cp", Layout(ulysses=8, ring=4)),
}
"""Ours by number of ranks; ALST has Ulysses over all of them."""


RANKS_OF_A_HOST = 8


def ways(shape: ModelShape, ranks: int) -> dict[str, tuple[str, Layout, MemoryBlock]]:
    """Return what is counted of ours, with algorithm and layout: one option after another, then
    groups of heads in the same layout, of one query head each, and on one host in those without
    Ulysses, of all query heads of a KV head, which send no byte more."""
    found = {name: (*LAYOUTS[ranks], memory) for name, memory in ours(shape, ranks).items()}
    last, per_kv = found[OURS_OFFLOADED][-1], shape.heads // shape.kv_heads
    found[GROUPS] = *LAYOUTS[ranks], last.model_copy(update={"attention_heads": 1})
    if ranks == RANKS_OF_A_HOST:
        every = last.model_copy(update={"attention_heads": per_kv})
        found[GROUPS_RING] = "ring_cp", Layout(ring=ranks), every
        found[GROUPS_EXCHANGE] = "planned_cp", Layout(ring=ranks), every
    return found


def ours(shape: ModelShape, ranks: int) -> dict[str, MemoryBlock]:
    """Return what is counted of ours with all heads at once: one option after another."""
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

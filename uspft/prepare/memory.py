"""What `auto` means among the keys of `memory`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from uspft.config.algorithms import AUTO
from uspft.model.loss import tile_tokens
from uspft.model.tiles import mlp_tile_tokens
from uspft.planner.products import layer_projections

if TYPE_CHECKING:
    from uspft.config.recipe import MemoryBlock
    from uspft.families import ModelShape


def settled_memory(block: MemoryBlock, shape: ModelShape) -> MemoryBlock:
    """Return the block with every `auto` settled.

    Where no layer is checkpointed, `recompute` stays as it is.
    """
    found: dict[str, Any] = {}
    if block.loss_tile_tokens == AUTO:
        found["loss_tile_tokens"] = tile_tokens(AUTO, shape.vocab_size)
    if block.mlp_tile_tokens == AUTO:
        last = layer_projections(shape)[-1]
        found["mlp_tile_tokens"] = mlp_tile_tokens(AUTO, last.per_token * last.inputs)
    if block.recompute == AUTO and block.gradient_checkpointing:
        found["recompute"] = "nothing"
    return block.model_copy(update=found)

"""The preparation of a model before its engine is built: splitting its matrices, and saving
memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from uspft.model import grid, parallel
from uspft.model.experts import spread_experts
from uspft.model.head_groups import attend_in_groups
from uspft.model.hf_config import heads_of
from uspft.model.offload import offload_inputs
from uspft.model.recompute import Recompute, recompute_layers
from uspft.model.tiles import work_in_tiles
from uspft.pipeline.stages import Stages, first_layers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from uspft.config.recipe import MemoryBlock
    from uspft.parameters.shards import Holders
    from uspft.world import World


def divide_matrices(
    model: Any, worlds: Sequence[World], holders: Holders, *, moves: bool = False
) -> None:
    """Make a model, loaded with this rank's shards, compute with them.

    worlds: the layouts of its rows. moves: whether weights move between layouts, so that a rank
    always stores what each call's rows use.
    """
    if any(world.layout.is_mesh for world in worlds):
        calls = grid.split_model(model, holders)
    else:
        copies = any(world.tensor.copies > 1 for world in worlds)
        calls = parallel.split_model(model, holders, moves=moves, copies=copies)
    spread_experts(model, holders, calls)


def save_memory(
    model: Any, block: MemoryBlock, stages: Stages | None = None
) -> tuple[Recompute | None, bool]:
    """Apply the recipe's memory savings to a model's layers.

    stages: the layers of each; None: a single one. Returns what of attention checkpointed layers
    recompute, and whether what they save is offloaded to the host.
    """
    stages = stages or Stages.of_sizes([model.config.num_hidden_layers], 1)
    layers = first_layers(block.gradient_checkpointing, stages)
    tile = None if block.mlp_tile_tokens == "none" else int(block.mlp_tile_tokens)
    if block.heads_at_once:
        attend_in_groups(model, block.heads_at_once, heads_of(model.config), tile)
    if offload := block.offload_activations == "cpu":
        offload_inputs(model)
    recompute = recompute_layers(model, block, layers)
    if tile:
        work_in_tiles(model, tile)
    return recompute, offload

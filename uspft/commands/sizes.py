"""What of a recipe only the model's sizes settle."""

from __future__ import annotations

from uspft.commands.place import CONFIGS
from uspft.config import Fault, ModelShape, Recipe, check_length, read_shape, with_factor
from uspft.model.loss import tile_tokens


def with_tiles(recipe: Recipe, vocabulary: int) -> Recipe:
    """The recipe with `memory.loss_tile_tokens: auto` as a number."""
    if recipe.memory.loss_tile_tokens != "auto":
        return recipe
    update = {"loss_tile_tokens": tile_tokens("auto", vocabulary)}
    return recipe.model_copy(update={"memory": recipe.memory.model_copy(update=update)})


def with_scaling(recipe: Recipe, shape: ModelShape) -> Recipe:
    """The recipe with the factor of `model.rope_scaling` as a number."""
    model = with_factor(recipe.model, shape, recipe.data.sequence_length)
    return recipe.model_copy(update={"model": model})


def with_fetched(recipe: Recipe, local: Recipe) -> tuple[Recipe, Recipe]:
    """Both recipes with what the model's folder says, which may not have been here before.

    local: the recipe with folders in place of hub ids. Raises Fault for a model that cannot be
    trained, and for rows longer than it.
    """
    shape = read_shape(local.model, CONFIGS)
    findings = shape if isinstance(shape, list) else []
    if isinstance(shape, ModelShape):
        findings = check_length(shape, local.model, local.data.sequence_length)
    if findings or not isinstance(shape, ModelShape):
        raise Fault(findings)
    return with_scaling(recipe, shape), with_scaling(local, shape)

"""What a model that is here says of a recipe: its config, whether its weights fit, what trains."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from uspft.config import Recipe


class ExaminedModel(NamedTuple):
    """transformers' config; what trains, for a person, where that is not all."""

    config: Any
    trains: str | None


def examine_model(recipe: Recipe) -> ExaminedModel:
    """Build a model that is here on meta, compare its weights, and choose what trains.

    Raises Fault, WeightsError.
    """
    # Seconds of imports, which a recipe that is refused before does without.
    from uspft.model.config import model_config
    from uspft.model.fit import require_fit, require_model
    from uspft.model.trained import choose_trained, what_trains

    config = model_config(recipe.model, recipe.data.sequence_length)
    named = recipe.model.config is None
    model = require_model(config, "model.name_or_path" if named else "model.config")
    if named:
        require_fit(model, Path(recipe.model.name_or_path or ""))
    choose_trained(model, recipe.model, recipe.seed)
    return ExaminedModel(config, what_trains(model, recipe.model))

"""What a model's config, and its weights where they are here, say of a recipe."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from uspft.families.shape import config_file
from uspft.prepare.invocation import CONFIGS

if TYPE_CHECKING:
    from uspft.config import Recipe


class ExaminedModel(NamedTuple):
    """transformers' config; what trains, for a person, where that is not all; the numbers of
    parameters that train, and of all."""

    config: Any
    trains: str | None
    trained: int
    parameters: int


def examine_model(recipe: Recipe) -> ExaminedModel:
    """Build the model on meta, compare its weights where they are here, and choose what trains.

    Its config must be on this machine. Raises Fault, WeightsError.
    """
    # Seconds of imports, which a recipe that is refused before does without.
    from uspft.model.build import parameter_count
    from uspft.model.fit import require_fit, require_model
    from uspft.model.hf_config import model_config
    from uspft.model.trained import choose_trained, what_trains

    file = config_file(recipe.model, CONFIGS)
    assert isinstance(file, Path)  # what is wrong with it has been told
    config = model_config(recipe.model, recipe.data.sequence_length, file)
    named = recipe.model.config is None
    model = require_model(config, "model.name_or_path" if named else "model.config")
    folder = Path(recipe.model.name_or_path or "")
    if named and os.path.isdir(folder):
        require_fit(model, folder)
    choose_trained(model, recipe.model, recipe.seed)
    trained = parameter_count(model, trained_only=True)
    return ExaminedModel(config, what_trains(model, recipe.model), trained, parameter_count(model))

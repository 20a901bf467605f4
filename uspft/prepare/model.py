"""The examination of a recipe's model: its config, and its weights where they are here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from uspft.families.shape import config_file
from uspft.prepare.invocation import CONFIGS

if TYPE_CHECKING:
    from uspft.config import Recipe


class ExaminedModel(NamedTuple):
    """Facts about a recipe's model, which is built on the meta device to find them."""

    config: Any
    """The model's config, as transformers reads it."""
    trains: str | None
    """What trains, for a person to read; None where all of the model trains."""
    trained: int
    """How many parameters train."""
    parameters: int
    """How many parameters there are in all."""


def examine_model(recipe: Recipe) -> ExaminedModel:
    """Build the model on meta, compare it with weights that are here, and choose what trains.

    Its config must be on this machine. Raises Fault or WeightsError.
    """
    # These imports take seconds, which a recipe that is refused before does without.
    from uspft.model.build import parameter_count
    from uspft.model.fit import require_fit, require_model
    from uspft.model.hf_config import model_config
    from uspft.model.trained import choose_trained, what_trains

    file = config_file(recipe.model, CONFIGS)
    assert isinstance(file, Path)  # anything else was refused before
    config = model_config(recipe.model, recipe.data.sequence_length, file)
    named = recipe.model.config is None
    model = require_model(config, "model.name_or_path" if named else "model.config")
    folder = Path(recipe.model.name_or_path or "")
    if named and os.path.isdir(folder):
        require_fit(model, folder, grows=bool(recipe.model.add_tokens))
    choose_trained(model, recipe.model, recipe.seed)
    trained = parameter_count(model, trained_only=True)
    return ExaminedModel(config, what_trains(model, recipe.model), trained, parameter_count(model))

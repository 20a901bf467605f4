"""What a model that is here says of a recipe: its config, and whether its weights fit it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from uspft.config import Recipe


def examine_model(recipe: Recipe) -> Any:
    """The config of a model that is here, after building it on meta and comparing its weights.

    Raises Fault, WeightsError.
    """
    # Seconds of imports, which a recipe that is refused before does without.
    from uspft.model.config import model_config
    from uspft.model.fit import require_fit, require_model

    config = model_config(recipe.model, recipe.data.sequence_length)
    named = recipe.model.config is None
    model = require_model(config, "model.name_or_path" if named else "model.config")
    if named:
        require_fit(model, Path(recipe.model.name_or_path or ""))
    return config

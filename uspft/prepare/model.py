"""The examination of a recipe's model: its config, and its weights where they are here."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from uspft.config import Fault, Finding
from uspft.config.strategies import KEY, strategies_of
from uspft.families.shape import config_file
from uspft.layout import Layout
from uspft.prepare.invocation import CONFIGS

if TYPE_CHECKING:
    from uspft.config import Recipe
    from uspft.config.degrees import Strategy
    from uspft.parameters.shards import Shards


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
    active: int
    """How many of all a token meets, which are fewer where it chooses experts."""


def must_be_built(recipe: Recipe) -> bool:
    """Tell whether a recipe names parts of its model, or weights that are here, which it takes a
    built model to check."""
    model = recipe.model
    names = model.adapter or model.freeze or model.overrides or model.add_tokens
    folder = model.name_or_path if model.config is None else None
    return bool(names or strategies_of(recipe) or (folder and os.path.isdir(folder)))


def examine_model(recipe: Recipe) -> ExaminedModel:
    """Build the model on meta, compare it with weights that are here, and choose what trains.

    Its config must be on this machine. Where tensor degrees switch in place, the part of each
    parameter that rows use lies inside what ranks hold. Raises Fault or WeightsError.
    """
    # These imports take seconds, which a recipe that is refused before does without.
    from uspft.model.build import (
        choose_trained,
        parameter_count,
        require_fit,
        require_model,
        what_trains,
    )
    from uspft.model.hf_config import model_config

    file = config_file(recipe.model, CONFIGS)
    assert isinstance(file, Path | dict)  # anything else was refused before
    config = model_config(recipe.model, recipe.data.sequence_length, file)
    named = recipe.model.config is None
    model = require_model(config, "model.name_or_path" if named else "model.config")
    folder = Path(recipe.model.name_or_path or "")
    if named and os.path.isdir(folder):
        require_fit(model, folder, grows=bool(recipe.model.add_tokens))
    choose_trained(model, recipe.model, recipe.seed)
    _require_inside(recipe, model)
    return ExaminedModel(
        config,
        what_trains(model, recipe.model),
        trained=parameter_count(model, trained_only=True),
        parameters=parameter_count(model),
        active=parameter_count(model, active_only=True),
    )


def _require_inside(recipe: Recipe, model: Any) -> None:
    """Require that every strategy uses a part of what ranks hold. Raises Fault.

    Ranks hold the least tensor degree of all. Weights that move are stored at each, and strategies
    whose ranks hold blocks have the same mesh.
    """
    every = strategies_of(recipe)
    degrees = {one.model_parallel for one in every}
    if len(degrees) < 2 or recipe.parallel_config.switching == "move":
        return
    from uspft.model.parallel import shards_of

    layout, most = Layout(min(degrees)), max(degrees)
    shards = shards_of(model, layout, splits_tokens=False, tensor_of_rows=most)
    if findings := inside_findings(every, shards):
        raise Fault(findings)


def inside_findings(strategies: Sequence[Strategy], stored: Shards) -> list[Finding]:
    """Return the strategies that use more of a parameter than ranks hold.

    stored: who holds what under the strategy of the least tensor degree, which divides all others.
    On a mesh columns use parts as those of so many ranks; mesh rows use parts of what is whole.
    """
    from uspft.parameters.shards import outside

    degrees = [one.model_parallel for one in strategies]
    least, found = degrees.index(stored.layout.tensor), []
    for number, one in enumerate(strategies):
        if name := outside(stored, one.model_parallel // one.mesh_rows):
            what = f"is {one.model_parallel}, and its parts of {name} do not lie inside those of"
            there = f"{KEY}[{least}], {stored.layout.tensor} ways"
            remedy = "write switching: move, or degrees that divide the model's heads"
            key = f"{KEY}[{number}].model_parallel"
            found.append((key, f"{what} {there}", remedy))
    return found

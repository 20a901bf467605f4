"""The routers' auxiliary loss of models with experts in other tools' configurations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from uspft.config.inputs import ModelBlock
from uspft.convert.conversion import Conversion
from uspft.families.shape import ModelShape, read_shape
from uspft.families.table import FAMILIES

ASKS, FACTOR = "output_router_logits", "router_aux_loss_coef"
"""The fields of config.json that ask for the routers' loss, and weigh it."""


def routers(
    run: Conversion,
    key: str,
    model: str,
    default: float | None = None,
    there: str = "over each device's batches there",
) -> None:
    """Convert the coefficient of the routers' loss.

    model: the tool's key for the model. default: the coefficient where the key is left out; None:
    that of the model's config, which then counts whatever the config asks for. there: over what the
    tool averages.
    """
    asks, factor = (f"model.overrides.{name}" for name in (ASKS, FACTOR))
    if run.settled("model.overrides", key):
        return
    say = f"averaged over rows here, {there}"
    config = _config_of_experts(run, model)
    if config is not None and not config:
        run.idle("the model has no routers with such a loss", key)
    elif run.value(key):
        run.put(factor, run.number(key, default=0.0), key, say=say)
        run.put(asks, True)
    elif run.written(key) and config is None:
        what = "left out: a model with experts has no routers' loss there"
        run.changed(key, f"{what}: if this is one whose config.json asks for it, add {asks}=false")
    elif run.written(key):
        run.put(asks, False, key)
    elif default is None and config is None:
        what = "of a model with experts the routers' loss counts there"
        run.changed(key, f"{what}: if this is one, add {asks}=true")
    elif default is None and config and config.get(FACTOR, 0.001):
        run.put(asks, True, why="the routers' loss counts there, whatever config.json asks for")
        run.changed(key, f"here `{asks}: true`, with the coefficient of config.json; {say}")
    elif default == 0 and config and config.get(ASKS):
        run.put(asks, False, why=f"{key}, 0 where it is left out")


def _config_of_experts(run: Conversion, model: str) -> Mapping[str, Any] | None:
    """Return the config of a model whose routers can have a loss; empty for any other model, None
    where the config is not on this machine."""
    name = run.given.get("model.name_or_path", run.value(model))
    place = str(run.theirs.place(str(name)) or name)
    try:
        shape = read_shape(ModelBlock(name_or_path=place), Path(__file__).parents[2] / "configs")
    except ValueError:  # no name
        return None
    if not isinstance(shape, ModelShape):
        return None
    family = FAMILIES[shape.model_type]
    return shape.full if family.routed and family.balanced else {}

"""Checks that a config gives a model and that a folder's weights fit it, from headers only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from uspft.config.problems import Fault, said
from uspft.model.build import empty_model
from uspft.parameters.experts import corrections, is_router
from uspft.parameters.grown import table_names
from uspft.parameters.source import FolderWeights, WeightsError


def require_model(config: Any, key: str) -> Any:
    """Return the model of a config, on meta.

    Raises Fault, naming key, where transformers makes none, or where the routers' loss is asked for
    and the model has no router.
    """
    try:
        model = empty_model(config, config.dtype)
    except Exception as error:  # a field of the config, and transformers has no kind for it
        why = f"{type(error).__name__}: {said(error)}"
        what = f"transformers cannot make a model of this config: {why}"
        raise Fault([(key, what, "mend its config.json or model.overrides")]) from error
    if getattr(config, "output_router_logits", False) and not any(map(is_router, model.modules())):
        what = "output_router_logits is true, and no layer of this config has experts"
        raise Fault([(key, what, "write model.overrides.output_router_logits: false")])
    return model


def require_fit(model: Any, folder: Path, *, grows: bool = False) -> None:
    """Require that names and shapes in the folder's safetensors files are the model's.

    A tensor for a bias or norm that the model was built without is refused too: it would be dropped
    in silence. Tensors of layers beyond the model's are allowed, since model.overrides can shorten
    it, and so are buffers. grows: whether embedding and head may have more rows than the folder's,
    for new tokens. Raises WeightsError.
    """
    held = FolderWeights(folder).shapes()
    named = {**dict(model.named_parameters()), **corrections(model)}
    wanted = {name: tuple(value.shape) for name, value in named.items()}
    for name in table_names(model) & held.keys() & wanted.keys() if grows else ():
        if held[name][0] < wanted[name][0]:
            held[name] = (wanted[name][0], *held[name][1:])
    modules = dict(model.named_modules())
    missing = [name for name in wanted if name not in held]
    other = [
        f"{name} {held[name]}, config {shape}"
        for name, shape in wanted.items()
        if held.get(name, shape) != shape
    ]
    unused = []
    for name in held:
        owner, _, attribute = name.rpartition(".")
        if owner in modules and getattr(modules[owner], attribute, None) is None:
            unused.append(name)
    for names, what in (
        (missing, "lacks parameters of the model"),
        (other, "holds other shapes than its config.json says"),
        (unused, "holds parameters that its config.json leaves out"),
    ):
        if names:
            remedy = "save weights and config.json together, or correct model.overrides"
            raise WeightsError(f"{folder} {what}: {_first(names)}", remedy)


def _first(names: Sequence[str]) -> str:
    return names[0] + (f", and {len(names) - 1} more" if len(names) > 1 else "")

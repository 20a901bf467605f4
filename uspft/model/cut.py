"""A model cut into stages of layers: transformers' own forward, of some layers alone."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from uspft.families.table import FAMILIES, LayerCut


def cut_layers(base: Any, layers: range) -> Any:
    """Return a base model (`model.base_model`) that takes hidden states through some layers.

    They are the base model's own layers; what the first takes enters as `inputs_embeds`, and after
    the last layer comes the final norm, after others nothing. The base model itself is left as it
    is. Raises ValueError for a family of which it is not known what its stages need.
    """
    family = FAMILIES.get(base.config.model_type)
    needs = family.cut if family else None
    if needs is None:
        raise ValueError(f"stages of model_type `{base.config.model_type}` are not available yet")
    return _cut(base, layers, needs)


def _cut(base: Any, layers: range, needs: LayerCut) -> Any:
    found = copy.copy(base)
    for registered in ("_modules", "_forward_hooks", "_forward_pre_hooks"):
        found.__dict__[registered] = copy.copy(base.__dict__[registered])
    found.layers = nn.ModuleList(base.layers[layers.start : layers.stop])
    del found.embed_tokens
    if layers.stop < len(base.layers):
        found.norm = nn.Identity()
    # The layers keep the whole config: by it they are made, and it names their attention.
    found.config = copy.deepcopy(base.config)
    found.config.num_hidden_layers = len(layers)
    for field in needs.by_layer:
        every = getattr(base.config, field)
        setattr(found.config, field, every and every[layers.start : layers.stop])
    for attribute, value in needs.after_first.items() if layers.start else ():
        setattr(found, attribute, value)
    return found

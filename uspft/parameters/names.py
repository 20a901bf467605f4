"""The parameters of a module by their names in files, without the words that peft inserts for an
adapter; and the pipeline stage that has a parameter, by its name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from uspft.pipeline.stages import Stages
    from uspft.tensor.parts import Shape

ADAPTER = "default"
"""The name that peft gives a model's only adapter."""
BESIDE = "_adapter"
"""The suffix of the module of a parameter's adapter, after the parameter's own name."""
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
"""The number of a layer in the names of its parameters."""
_TABLE = "embed_tokens."
_INSERTED = re.compile(rf"\.(base_layer|{ADAPTER})(?=\.|$)|(\.weight)?{BESIDE}(?=\.lora_)")


ParametersByName = dict[str, tuple["nn.Parameter", list[tuple["nn.Module", str]]]]
"""Each parameter by its name in files, with its (module, attribute) places."""


def plain_name(name: str) -> str:
    """Return the name of a parameter or module as files have it."""
    return _INSERTED.sub("", name)


def is_adapter(name: str) -> bool:
    """Tell whether a parameter is an adapter's."""
    return ".lora_A." in name or ".lora_B." in name


def is_table(name: str) -> bool:
    """Tell whether a parameter is a table of embeddings, by its name in files."""
    return _TABLE in name


def layer_of(name: str) -> int | None:
    """Return the number of the layer that a parameter is in, from 0; None if it is in none."""
    found = _LAYER.search(name)
    return int(found[1]) if found else None


def stage_of(name: str, stages: Stages) -> int:
    """Return the stage that has a parameter, by its name in files."""
    if (layer := layer_of(name)) is not None:
        return stages.of_layer(layer)
    return 0 if is_table(name) else stages.count - 1


def ranks_of(names: Iterable[str], stages: Stages) -> dict[str, int]:
    """Return by name, the pipeline index of the rank that stores a parameter."""
    return {name: stages.rank_of(stage_of(name, stages)) for name in names}


def places(model: nn.Module) -> ParametersByName:
    """Return every parameter by its first name in files, with all (module, attribute) pairs that
    refer to it.

    Tied parameters have several pairs.
    """
    found: dict[int, tuple[str, nn.Parameter, list[tuple[nn.Module, str]]]] = {}
    for prefix, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            name = plain_name(f"{prefix}.{attribute}" if prefix else attribute)
            found.setdefault(id(parameter), (name, parameter, []))[2].append((module, attribute))
    return {name: (parameter, owners) for name, parameter, owners in found.values()}


def shapes_of(parameters: ParametersByName) -> dict[str, Shape]:
    """Return the whole shape of each parameter of a model on meta, by its name in files."""
    return {name: tuple(parameter.shape) for name, (parameter, _) in parameters.items()}

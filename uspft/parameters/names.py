"""The parameters of a module by their names in files, without the words that peft inserts for an
adapter."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from uspft.parameters.part import Shape

ADAPTER = "default"
"""The name that peft gives a model's only adapter."""
BESIDE = "_adapter"
"""The suffix of the module of a parameter's adapter, after the parameter's own name."""
_INSERTED = re.compile(rf"\.(base_layer|{ADAPTER})(?=\.|$)|(\.weight)?{BESIDE}(?=\.lora_)")


def plain_name(name: str) -> str:
    """Return the name of a parameter or module as files have it."""
    return _INSERTED.sub("", name)


def is_adapter(name: str) -> bool:
    """Tell whether a parameter is an adapter's."""
    return ".lora_A." in name or ".lora_B." in name


def places(model: nn.Module) -> dict[str, tuple[nn.Parameter, list[tuple[nn.Module, str]]]]:
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


def shapes_of(model: nn.Module) -> dict[str, Shape]:
    """Return the whole shape of every parameter of a model on meta, by its name in files."""
    return {name: tuple(parameter.shape) for name, (parameter, _) in places(model).items()}

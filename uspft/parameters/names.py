"""Names of parameters with an adapter, into which peft inserts words that files do without."""

from __future__ import annotations

import re

ADAPTER = "default"
"""The name that peft gives a model's only adapter."""
BESIDE = "_adapter"
"""The end of the name of a module that is the adapter of the parameter that it is named after."""
_INSERTED = re.compile(rf"\.(base_layer|{ADAPTER})(?=\.|$)|(\.weight)?{BESIDE}(?=\.lora_)")


def plain_name(name: str) -> str:
    """Return the name of a parameter or module as files have it."""
    return _INSERTED.sub("", name)


def is_adapter(name: str) -> bool:
    """Tell whether a parameter is an adapter's."""
    return ".lora_A." in name or ".lora_B." in name

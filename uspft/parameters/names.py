"""Names of parameters with an adapter, into which peft inserts words that files do without."""

from __future__ import annotations

import re

ADAPTER = "default"
"""The name that peft gives a model's only adapter."""
_INSERTED = re.compile(rf"\.(base_layer|{ADAPTER})(?=\.|$)")


def plain_name(name: str) -> str:
    """Return the name of a parameter or module as files have it."""
    return _INSERTED.sub("", name)


def is_adapter(name: str) -> bool:
    """Tell whether a parameter is an adapter's."""
    return ".lora_A." in name or ".lora_B." in name

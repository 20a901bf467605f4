"""Names of parameters with an adapter: what peft inserts into them, and files do without."""

from __future__ import annotations

import re

ADAPTER = "default"
"""peft's name of a model's only adapter."""
_INSERTED = re.compile(rf"\.(base_layer|{ADAPTER})(?=\.|$)")


def plain_name(name: str) -> str:
    """The name of a parameter or module as files have it."""
    return _INSERTED.sub("", name)


def is_adapter(name: str) -> bool:
    """Whether a parameter is an adapter's."""
    return ".lora_A." in name or ".lora_B." in name

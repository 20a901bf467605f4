"""Where a command runs: what `__main__` read from the environment, as a value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

CONFIGS = Path(__file__).parents[2] / "configs"
"""The shapes of hub models and the fragments of recipes, beside the package."""


@dataclass(frozen=True)
class Invocation:
    """The command as typed, the environment of child processes, and the cache folder."""

    command: str
    environment: Mapping[str, str] = field(default_factory=dict)
    cache: Path = Path(".cache")
    ranks: int | None = None
    """`--ranks N`: another number of processes than this machine would start."""

"""The surroundings of a command, as one value made from argv and the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from uspft.called import to_type
from uspft.launcher import Loss, Meeting

CONFIGS = Path(__file__).parents[2] / "configs"
"""The folder beside the package that holds shapes of hub models and fragments of recipes."""


@dataclass(frozen=True)
class Invocation:
    """A command as typed, the environment of its child processes, its cache folder and hosts."""

    command: str
    environment: Mapping[str, str] = field(default_factory=dict)
    cache: Path = Path(".cache")
    ranks: int | None = None
    """The N of `--ranks N`: another number of processes than this machine would start."""
    meeting: Meeting = field(default_factory=Meeting)
    """The line to the other hosts of the run."""
    losses: tuple[Loss, ...] = ()
    """How earlier starts of the run were lost, where this one follows them."""

    def to_type(self, *words: str) -> str:
        """Return a command of uspft with these words, to be typed where the user stands."""
        return to_type(self.environment, *words)

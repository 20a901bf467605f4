"""The results of a layout's first steps, as ranks leave them for the command."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

GROUPS = (
    ("adapter", re.compile(r"lora_")),
    ("embedding", re.compile(r"embed_tokens")),
    ("head", re.compile(r"lm_head")),
    ("norm", re.compile(r"norm")),
    ("attention", re.compile(r"attn|attention")),
    ("mlp", re.compile(r"mlp|expert|moe|router|gate")),
    ("other", re.compile("")),
)
"""The groups that parameters are reported in, of which the first that fits is taken; a tied head is
the embedding's."""


def group_of(name: str) -> str:
    """The group that a parameter is reported in."""
    return next(group for group, pattern in GROUPS if pattern.search(name))


@dataclass
class Measured:
    """What each step gave."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)
    stopped: str | None = None
    """Why there are no more steps, or None."""


@dataclass(frozen=True)
class Difference:
    """The largest relative difference in a group, and the parameter that has it."""

    value: float
    parameter: str


@dataclass(frozen=True)
class Result:
    """What one layout gave, and how its gradients differ from the reference's, by group."""

    measured: Measured
    differences: dict[str, Difference]
    seconds: float = 0.0

    def leave(self, path: Path) -> None:
        """Append the result to a file as a line."""
        with path.open("a") as file:
            file.write(json.dumps(asdict(self)) + "\n")


def results(path: Path) -> list[Result]:
    """Return the results that were left in a file; none where there is no such file."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [_read(json.loads(line)) for line in lines]


def _read(tree: dict[str, Any]) -> Result:
    found = {group: Difference(**one) for group, one in tree["differences"].items()}
    return Result(Measured(**tree["measured"]), found, tree["seconds"])

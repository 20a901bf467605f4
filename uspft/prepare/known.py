"""The facts by which a recipe is resolved: machine, model, data, and what was predicted of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from uspft.config import Recipe
from uspft.families import ModelShape
from uspft.job import placed
from uspft.planner.machine import Hardware
from uspft.prepare.cluster import Cluster
from uspft.segments import Segments
from uspft.switching.choose.choice import SwitchingChoice
from uspft.switching.choose.drawn_steps import DrawnSteps


class Weighed(NamedTuple):
    """What several layouts in one step were predicted to take, beside each alone."""

    choice: SwitchingChoice
    drawn: DrawnSteps
    """The steps that were predicted."""
    source: str
    """Of which samples the lengths are, for a person."""


@dataclass(frozen=True)
class Known:
    """The facts by which a recipe is resolved; each stage of preparation adds some."""

    hosts: int = 1
    gpus: int = 0
    """How many GPUs this host has."""
    ranks: int | None = None
    """How many processes all hosts have together, where the command says so."""
    shape: ModelShape | None = None
    """The sizes of the model."""
    corpus: Path | None = None
    """The folder of the tokenised training data, once that is read."""
    evaluation: Mapping[str, Path] = field(default_factory=dict)
    """The folders of the tokenised evaluation sets, by title."""
    rows: Sequence[Segments] = ()
    """The documents of the run's first rows; none where the data is not read yet."""
    memory_bytes: int | None = None
    """Memory of the host that has least, where the run has several."""
    cluster: Cluster | None = None
    """The hardware file that the run is planned by, and why."""
    weighed: Weighed | None = None
    """Of a recipe with strategies, what they take; known once the data's lengths are."""
    formats: Sequence[str] = ()
    """The format of each source of training and then of evaluation data, in their order."""
    kernel: str | None = None
    """The attention kernel that ranks have chosen."""
    places: Mapping[str, str] = field(default_factory=dict)
    """The folder on this host that each key of `model` with a hub id stands for."""

    def hardware_on(self, ranks: int) -> Hardware:
        """Return the cluster's figures where so many ranks run, as many on each host."""
        assert self.cluster
        return self.cluster.hardware.on_hosts_of(-(-ranks // self.hosts))

    def here(self, recipe: Recipe) -> Recipe:
        """Return the recipe as this host reads it, with folders in place of hub ids."""
        return placed(recipe, self.places)

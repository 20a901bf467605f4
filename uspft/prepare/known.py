"""The facts by which a recipe is resolved: machine, model, data, and what was predicted of them;
and the hardware file that it means: the one that it names, that of the GPU's name, or a shipped
one."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from uspft.config import Finding, Recipe, RecipeError
from uspft.config.algorithms import AUTO
from uspft.config.messages import closest
from uspft.families import ModelShape
from uspft.job import placed
from uspft.planner.machine import Hardware, device_of, read_hardware
from uspft.prepare.invocation import CONFIGS
from uspft.segments import Segments
from uspft.switching.choose.choice import SwitchingChoice
from uspft.switching.choose.drawn_steps import DrawnSteps

KEY = "launch.hardware"
STANDS_IN = {"cuda": "h100", "cpu": "cpu"}
"""The shipped file that a run on a device takes where no other is known to fit it."""

DRIVERS = ("libcuda.so.1", "libnvidia-ml.so.1", "libamdhip64.so")
"""The libraries of which torch needs one to see a GPU."""


class Cluster(NamedTuple):
    """The hardware that a run is planned for, and why it is that."""

    hardware: Hardware
    why: str

    @property
    def sentence(self) -> str:
        """The file's name, why it was taken, and what it describes, for a person."""
        return f"{self.hardware.name} ({self.why}): {self.hardware.what}"


def shipped() -> dict[str, Path]:
    """Return the files of configs/hardware/ by name."""
    return {file.stem: file for file in sorted((CONFIGS / "hardware").glob("*.yaml"))}


def has_driver() -> bool:
    """Tell whether a driver of GPUs is on this host."""
    for name in DRIVERS:
        try:
            ctypes.CDLL(name)
        except OSError:
            continue
        return True
    return False


def gpu_count() -> int:
    """Return how many GPUs torch sees on this host; it is not imported where there is no driver."""
    if "torch" not in sys.modules and not has_driver():
        return 0
    import torch

    return torch.cuda.device_count()


def gpu_name() -> str | None:
    """Return the name of this host's first GPU, or None where there is none to be asked."""
    if not gpu_count():
        return None
    import torch

    try:
        return torch.cuda.get_device_name(0)
    except (AssertionError, RuntimeError):  # torch without CUDA, or a driver that does not answer
        return None


def cluster_of(wish: str, device: str, gpu: str | None) -> tuple[Cluster | None, list[Finding]]:
    """Return what `launch.hardware` means for a run on cpu or cuda, or what is wrong with it.

    wish: auto, a shipped name, or a path that is read from the folder of the command. gpu: the name
    of this host's GPU.
    """
    files = shipped()
    if wish != AUTO:
        file = files.get(wish) or Path(wish)
        if wish not in files and not os.path.isfile(file):
            return None, [_unknown(wish, list(files))]
        try:
            return Cluster(read_hardware(file), f"as {KEY} says"), []
        except RecipeError as error:
            return None, [
                (KEY, ": ".join(filter(None, (one.where, one.key, one.what))), one.remedy)
                for one in error.problems
            ]
    words = device_of(gpu or "") if device == "cuda" else None
    for file in files.values() if words else ():
        hardware = read_hardware(file)
        if hardware.device == words:
            return Cluster(hardware, f"by the GPU's name, {gpu}"), []
    why = "shipped figures"
    if device == "cuda":
        why += f", none being there for {gpu}" if gpu else ", there being no GPU here"
    return Cluster(read_hardware(files[STANDS_IN[device]]), why), []


def _unknown(wish: str, names: list[str]) -> Finding:
    what = f"`{wish}` is no file, and no name in configs/hardware"
    near = closest(wish, names)
    remedy = f"did you mean `{near}`? Names are" if near else "write auto, a file or one of"
    return KEY, what, f"{remedy} {', '.join(names)}"


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
    places: Mapping[str, str] = field(default_factory=dict)
    """The folder on this host that each key of `model` with a hub id stands for."""

    def hardware_on(self, ranks: int) -> Hardware:
        """Return the cluster's figures where so many ranks run, as many on each host."""
        assert self.cluster
        return self.cluster.hardware.on_hosts_of(-(-ranks // self.hosts))

    def here(self, recipe: Recipe) -> Recipe:
        """Return the recipe as this host reads it, with folders in place of hub ids."""
        return placed(recipe, self.places)

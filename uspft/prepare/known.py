"""The facts by which a recipe is resolved: machine, model, data and predictions; and the planner's
views of two of them: the recipe's hardware file, and its step."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from uspft.config import Finding, Recipe, RecipeError
from uspft.config.algorithms import AUTO
from uspft.config.messages import closest
from uspft.config.recipe import MemoryBlock
from uspft.families import ModelShape
from uspft.layout import Layout
from uspft.model.tile_sizes import mlp_tile_tokens, tile_tokens
from uspft.planner.machine import Hardware, device_of, read_hardware
from uspft.planner.options import RECOMPUTES, Options, options_of
from uspft.planner.products import has_groups, inner_matrices
from uspft.planner.step_shape import StepShape
from uspft.prepare.host import CONFIGS
from uspft.segments import Segments
from uspft.switching.choose.choice import SwitchingChoice
from uspft.switching.choose.drawn_steps import DrawnSteps

KEY = "launch.hardware"
STANDS_IN = {"cuda": "h100", "cpu": "cpu"}
"""The hardware file for each device where no other is known to fit."""


class Cluster(NamedTuple):
    """The hardware that a run is planned for, and why this one."""

    hardware: Hardware
    why: str

    @property
    def sentence(self) -> str:
        """The file's name, why it was taken, and what it describes."""
        return f"{self.hardware.name} ({self.why}): {self.hardware.what}"


def shipped() -> dict[str, Path]:
    """Return the files of configs/hardware/ by name."""
    return {file.stem: file for file in sorted((CONFIGS / "hardware").glob("*.yaml"))}


def cluster_of(wish: str, device: str, gpu: str | None) -> tuple[Cluster | None, list[Finding]]:
    """Return the hardware that `launch.hardware` means for a run on cpu or cuda, or what is wrong
    with it.

    wish: auto, a shipped name, or a path relative to the working directory. gpu: the name of this
    host's GPU.
    """
    files = shipped()
    if wish != AUTO:
        file = files.get(wish) or Path(wish)
        if wish not in files and not os.path.isfile(file):
            near = closest(wish, list(files))
            remedy = f"did you mean `{near}`? Names are" if near else "write auto, a file or one of"
            what = f"`{wish}` is no file, and no name in configs/hardware"
            return None, [(KEY, what, f"{remedy} {', '.join(files)}")]
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


class Weighed(NamedTuple):
    """The predicted times of several layouts in one step, and of each layout alone."""

    choice: SwitchingChoice
    drawn: DrawnSteps
    """The sample steps that were predicted."""
    source: str
    """A phrase for the samples whose lengths were used."""


@dataclass(frozen=True)
class Known:
    """The facts by which a recipe is resolved; each stage of preparation adds some."""

    hosts: int = 1
    gpus: int = 0
    """How many GPUs this host has."""
    ranks: int | None = None
    """The number of processes on all hosts, if the command gives it."""
    shape: ModelShape | None = None
    """The sizes of the model."""
    corpus: Path | None = None
    """The folder of the tokenised training data, once it exists."""
    evaluation: Mapping[str, Path] = field(default_factory=dict)
    """The folders of the tokenised evaluation sets, by title."""
    rows: Sequence[Segments] = ()
    """The documents of the run's first rows; empty before the data is read."""
    memory_bytes: int | None = None
    """Memory of the host with the least, if the run has several."""
    cluster: Cluster | None = None
    """The hardware file that the run is planned by, and why."""
    weighed: Weighed | None = None
    """The predicted times of strategies, once the data's lengths are known."""
    formats: Sequence[str] = ()
    """The format of each source of training data and then of evaluation data."""
    places: Mapping[str, str] = field(default_factory=dict)
    """The local folder for each key of `model` with a hub id."""

    def hardware_on(self, ranks: int) -> Hardware:
        """Return the cluster's figures for this number of ranks, the same on each host."""
        assert self.cluster
        return self.cluster.hardware.on_hosts_of(-(-ranks // self.hosts))


def step_shape(recipe: Recipe, model: ModelShape) -> StepShape:
    """Return the recipe's step, with rows of one document each."""
    # Keys that config.json omits have transformers' defaults, such as the number of experts per
    # token.
    whole = replace(model, raw=model.full)
    options = options_of(settled_memory(recipe, whole), Layout())
    row = Segments.single(recipe.data.sequence_length)
    return StepShape(whole, row, options)


def recomputes_of(recipe: Recipe, device: str) -> Collection[str]:
    """Return the values that `memory.recompute` may have on a device: all under `auto`, but on CPUs
    only the first."""
    asked, again = recipe.memory.recompute, recipe.memory.gradient_checkpointing
    if asked == AUTO and again and device != "cpu":
        return RECOMPUTES
    return {asked if asked in RECOMPUTES else RECOMPUTES[0]}


def settled_memory(recipe: Recipe, shape: ModelShape) -> Recipe:
    """Return the recipe with its `auto` tile sizes resolved."""
    block = recipe.memory
    found: dict[str, Any] = {}
    if block.loss_tile_tokens == AUTO:
        found["loss_tile_tokens"] = tile_tokens(AUTO, shape.vocab_size)
    if block.mlp_tile_tokens == AUTO:
        found["mlp_tile_tokens"] = _mlp_tile(AUTO, shape)
    return recipe.changed(memory=found)


def _mlp_tile(wish: str | int, shape: ModelShape) -> int | None:
    """Return the tokens per tile of a model's MLPs; None for all at once."""
    last = inner_matrices(shape, experts=shape.routed)[-1]
    return mlp_tile_tokens(wish, last.per_token * last.inputs)


def saving_most(asked: MemoryBlock, shape: ModelShape, layout: Layout, options: Options) -> Options:
    """Return the options that save the most memory: where the recipe leaves it open, all of
    attention is recomputed, in the smallest groups of heads."""
    if asked.recompute == AUTO and options.checkpointing:
        options = replace(options, recompute=RECOMPUTES[-1])
    grouped = asked.attention_heads == AUTO and options.recompute != "exchange"
    if grouped and has_groups(shape, layout):
        options = replace(options, at_once=1)
    return options

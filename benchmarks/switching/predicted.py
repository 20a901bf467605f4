"""What `plan`'s formula says of a contender's step, from the cluster's own figures."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from benchmarks.switching.contenders import Contender
from benchmarks.switching.setting import HOSTS
from uspft.config.strategies import row_lengths, strategies_of, under
from uspft.layout import Layout, layout_of
from uspft.planner.machine import read_hardware
from uspft.planner.memory.formula import USABLE_SHARE
from uspft.planner.options import options_of
from uspft.planner.ways import way_of
from uspft.prepare.examine import Examined
from uspft.prepare.make_plan import step_of
from uspft.switching.choose.choice import SwitchingChoice, choose
from uspft.switching.choose.drawn_steps import DrawnSteps
from uspft.switching.choose.layout_set import LayoutSet
from uspft.switching.choose.priced import PricedLayout, priced
from uspft.switching.choose.priced import Setting as Given

MEMORY_BYTES = 1e12
"""No bound: the contenders are given."""
SLACK = 1.02
"""What `auto` has more than its one layout needs."""


@dataclass(frozen=True)
class EveryStep(DrawnSteps):
    """Steps of which each has just these samples."""

    @cached_property
    def steps(self) -> list[list[int]]:
        return [list(self.lengths)]


def predicted_seconds(one: Contender, found: Examined, lengths: tuple[int, ...]) -> float:
    """Return the seconds of a step by the planner; found: its recipe, with launch.hardware."""
    assert isinstance(found.recipe.launch.hardware, str)
    given, drawn = _given(found, Path(found.recipe.launch.hardware), lengths)
    # A group takes as many rows at once as it does in the run, whatever the memory has room for.
    given = replace(given, rows_at_once=found.recipe.training.micro_batch_size)
    return _mix(given, found, drawn, moves=one.moves).seconds(drawn)


def choice_of(found: Examined, hardware: Path, lengths: tuple[int, ...]) -> SwitchingChoice:
    """Return what `strategies: auto` takes, and all static layouts beside it, where ranks have the
    memory that the one layout of a recipe needs."""
    given, drawn = _given(found, hardware, lengths)
    mix = _mix(given, found, drawn)
    need = MEMORY_BYTES * USABLE_SHARE - mix.memory(mix.buckets[0]) + mix.buckets[0].row_bytes
    rows = found.recipe.training.micro_batch_size
    memory = SLACK * need / USABLE_SHARE
    return choose(replace(given, memory_bytes=memory, rows_at_once=rows), drawn)


def _given(found: Examined, hardware: Path, lengths: tuple[int, ...]) -> tuple[Given, DrawnSteps]:
    ranks, recipe = found.layout.ranks, found.recipe
    figures = read_hardware(hardware).on_hosts_of(ranks // HOSTS)
    drawn = EveryStep(lengths, len(lengths), recipe.data.sequence_length)
    return Given(step_of(found), figures, ranks, MEMORY_BYTES), drawn


def _mix(given: Given, found: Examined, drawn: DrawnSteps, *, moves: bool = False) -> LayoutSet:
    every = range(len(strategies_of(found.recipe)))
    buckets = tuple(_priced(given, found, number, drawn) for number in every)
    return LayoutSet(given, buckets, min(bucket.layout.tensor for bucket in buckets), moves)


def _priced(given: Given, found: Examined, number: int, drawn: DrawnSteps) -> PricedLayout:
    alone, length = under(found.recipe, number), row_lengths(found.recipe)[number]
    layout = layout_of(alone.parallel_config, found.layout.ranks)
    assert isinstance(layout, Layout)  # or the recipe would have been refused
    setting = replace(given, step=replace(given.step, options=options_of(alone, layout)))
    return priced(setting, way_of(alone, layout), length, drawn.typical(length))

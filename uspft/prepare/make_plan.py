"""A recipe as the planner's input: its step, its cluster, its own layout, and the prices that ranks
deal rows out by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from uspft.config import Fault, read
from uspft.config.algorithms import AUTO, row_of
from uspft.config.strategies import strategies_of
from uspft.job import ChunkPrices, Prices
from uspft.planner.machine import Hardware
from uspft.planner.memory import row_memory
from uspft.planner.options import RECOMPUTES, options_of
from uspft.planner.rank import Ranking, ranking
from uspft.planner.row_time import chunk_prices, row_time
from uspft.planner.stages import schedule_of
from uspft.planner.step import micro_step_seconds
from uspft.planner.step_shape import StepShape
from uspft.planner.ways import Space, Way, WhyNot
from uspft.prepare.examine import Examined, examine
from uspft.prepare.files import find_paths
from uspft.prepare.known import cluster_of, matrices_of, stage_of, step_shape
from uspft.prepare.left_open import open_keys, space_of, wrong_in
from uspft.prepare.memory import saving_most
from uspft.prepare.pipelines import says_layers
from uspft.segments import Segments
from uspft.sequence import of_recipe


def examine_for_plan(
    target: Path, overrides: Sequence[str], hosts: int, ranks: int | None
) -> Examined:
    """Examine the recipe for the device of the hardware that it names, whatever is here."""
    loaded = read(target, overrides).loaded
    launch = find_paths(loaded.recipe, target).recipe.launch
    if launch.device == AUTO and launch.hardware != AUTO:
        cluster, findings = cluster_of(launch.hardware, "cpu", None)
        if cluster and not findings:
            device = "cuda" if cluster.hardware.device else "cpu"
            overrides = [*overrides, f"launch.device={device}"]
    return examine(target, overrides, hosts, ranks, trains=False)


def hardware_of(found: Examined) -> Hardware:
    """Return the cluster's figures for as many ranks as this run puts on a host."""
    return found.known.hardware_on(found.layout.ranks)


def step_of(found: Examined) -> StepShape:
    """Return the recipe's step, with rows of one document each.

    Raises Fault where the model's config is not on this machine.
    """
    recipe, model = found.recipe, found.shape
    if model is None:
        what = f"the sizes of {recipe.model.name_or_path} are not on this machine"
        raise Fault([("model.name_or_path", what, "name its folder, or a model of configs/models")])
    return step_shape(recipe, model)


def own_way(found: Examined) -> Way:
    """Return the recipe's own layout and algorithm, and how its step runs."""
    parallel, again = found.recipe.parallel_config, found.recipe.memory.recompute
    schedule = schedule_of(parallel)
    if not says_layers(found.loaded.recipe):  # the rows that a step is priced by deal them out
        schedule = schedule._replace(sizes=())
    row = row_of(parallel.context_parallel_algo, found.layout.context)
    asked = {name: getattr(parallel, key) for key, name in row.options.items()}
    return Way(
        found.layout,
        row,
        parallel.use_seq_parallel and found.layout.tensor > 1,
        stage_of(found.recipe),
        found.recipe.training.micro_batch_size,
        again if again in RECOMPUTES else RECOMPUTES[0],
        schedule=schedule,
        options=tuple((name, value) for name, value in asked.items() if value not in (None, AUTO)),
    )


def ranking_of(found: Examined, step: StepShape, among: WhyNot = lambda _: None) -> Ranking:
    """Return every layout for the recipe's ranks that its other keys allow, ranked by predicted
    time. among: what else leaves layouts out, but not the recipe's own."""
    own, recipe, hardware = own_way(found), found.recipe, hardware_of(found)
    asked = found.loaded.recipe.model_copy(update={"launch": recipe.launch})
    left = space_of(asked)
    space = Space(
        experts=None if step.model.experts > 1 else {1},
        meshes=recipe.parallel_config.on_a_mesh,
        stages=left.stages,
        rows=left.rows,
        recomputes=left.recomputes,
        pipelines=None,
        schedulers={own.schedule.scheduler},
        virtual={1, 2, 4, own.schedule.virtual},
        chunks=own.schedule.chunks,
    )
    wrong = wrong_in(recipe, step.model, hardware, open_keys(asked))

    def why_not(way: Way) -> str | None:
        return among(way) or wrong(way)

    options = options_of(recipe, found.layout)
    saving = partial(saving_most, asked.memory, step.model)
    how: dict[str, Any] = {"own": own, "why_not": why_not, "saving": saving}
    return ranking(step, found.layout.ranks, space, hardware, options, **how)


def chunk_prices_of(found: Examined) -> ChunkPrices | None:
    """Return the prices by which a recipe's rows are cut into chunks that take equal time; None
    where no rows are."""
    recipe, layout = found.recipe, found.layout
    parallel = recipe.parallel_config
    if parallel.seq_split_num == 1 or parallel.sequence_chunks != "time":
        return None
    step, algorithm = step_of(found), of_recipe(recipe, layout)
    return chunk_prices(step, layout, algorithm, hardware_of(found))


def prices_of(found: Examined) -> Prices | None:
    """Return the prices of a recipe's strategies by the cost model; None where it has one layout.

    A row's seconds are a line in its pairs of query and key, through those of a row without
    documents and of one that a document fills.
    """
    if not strategies_of(found.recipe):
        return None
    step, hardware = step_of(found), hardware_of(found)
    rows, pairs, beside, layouts, taken = [], [], [], [], []
    for alone, layout in found.each_layout:
        length, algorithm = alone.data.sequence_length, of_recipe(alone, layout)
        shape = replace(step, **matrices_of(alone.parallel_config))
        empty, full = (
            row_time(shape, layout, algorithm, hardware, row)
            for row in (Segments((0,), length), Segments.single(length))
        )
        layouts.append(layout)
        rows.append(empty.row)
        pairs.append((full.row - empty.row) / (length * (length + 1) // 2))
        beside.append(full.beside)
        row = row_of(alone.parallel_config.context_parallel_algo, layout.context)
        options = options_of(alone, layout)
        taken.append(row_memory(options, step.model, row, layout, length)[0])
    stored = min(layouts, key=lambda layout: layout.tensor)
    together = micro_step_seconds(step, stored, hardware)
    return Prices(tuple(rows), tuple(pairs), max(beside), together, tuple(taken))

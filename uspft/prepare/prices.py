"""What rows cost under each strategy of a recipe, by which ranks deal them out."""

from __future__ import annotations

from dataclasses import replace

from uspft.config.algorithms import row_of
from uspft.config.strategies import strategies_of, under
from uspft.job import ChunkPrices, Prices
from uspft.layout import Layout, layout_of
from uspft.planner.chunks import chunk_prices
from uspft.planner.memory import options_of, row_memory
from uspft.planner.row_time import micro_step_seconds, row_time
from uspft.prepare.examine import Examined
from uspft.prepare.make_plan import hardware_of, step_of
from uspft.prepare.step import matrices_of
from uspft.segments import Segments
from uspft.sequence import of_recipe


def chunk_prices_of(found: Examined, hosts: int) -> ChunkPrices | None:
    """Return the prices by which a recipe's rows are cut into chunks that take equal time; None
    where no rows are."""
    recipe, layout = found.recipe, found.layout
    parallel = recipe.parallel_config
    if parallel.seq_split_num == 1 or parallel.sequence_chunks != "time":
        return None
    step, algorithm = step_of(found), of_recipe(recipe, layout)
    return chunk_prices(step, layout, algorithm, hardware_of(found, hosts))


def prices_of(found: Examined, hosts: int) -> Prices | None:
    """Return the prices of a recipe's strategies by the cost model; None where it has one layout.

    A row's seconds are a line in its pairs of query and key, through those of a row without
    documents and of one that a document fills.
    """
    recipe = found.recipe
    if not strategies_of(recipe):
        return None
    step, hardware = step_of(found), hardware_of(found, hosts)
    rows, pairs, beside, layouts, taken = [], [], [], [], []
    for number in range(len(strategies_of(recipe))):
        alone = under(recipe, number)
        layout = layout_of(alone.parallel_config, found.layout.ranks)
        assert isinstance(layout, Layout)  # or the recipe would have been refused
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
    held = min(layouts, key=lambda layout: layout.tensor)
    together = micro_step_seconds(step, held, hardware)
    return Prices(tuple(rows), tuple(pairs), max(beside), together, tuple(taken))

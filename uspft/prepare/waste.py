"""What of a layout does no work, or hides none, where a recipe is legal and yet asks for more than
there is."""

from __future__ import annotations

from collections.abc import Iterator

from uspft.config import Recipe
from uspft.config.strategies import KEY, layouts_of, strategies_of
from uspft.engine.deepspeed_config import micro_batches
from uspft.layout import Layout, layout_of
from uspft.prepare.examine import Examined
from uspft.prepare.step import stage_of


def wasted(found: Examined) -> list[str]:
    """Return a line `key: what; remedy` for each thing that leaves ranks without work."""
    lines = list(_prefetch(found.recipe, found.layout))
    for number, recipe in enumerate(layouts_of(found.recipe)):
        layout = layout_of(recipe.parallel_config, found.layout.ranks)
        assert isinstance(layout, Layout)  # anything else was refused before
        at = f"{KEY}[{number}]" if strategies_of(found.recipe) else "parallel_config"
        lines += _heads(recipe, layout, found, at)
    several = found.is_open or strategies_of(found.recipe)
    if not several:  # else samples are dealt out by what they cost
        lines += _rows(found.recipe, found.layout)
    return lines


def _prefetch(recipe: Recipe, layout: Layout) -> Iterator[str]:
    """Where layers are split in stages, ZeRO-3 fetches no weights ahead: ranks run their stages in
    another order each time, and DeepSpeed knows what comes next from one order alone."""
    if layout.pipeline > 1 and stage_of(recipe) == 3:
        yield (
            "deepspeed.zero_optimization.stage: is 3, beside parallel_config.pipeline_stage "
            f"{layout.pipeline}: weights are not fetched ahead there, so each layer waits for its "
            "own; write 1 or 2 where a stage's weights fit"
        )


def _heads(recipe: Recipe, layout: Layout, found: Examined, at: str) -> Iterator[str]:
    """Where Ulysses has more ranks than there are query heads, some of them attend with none."""
    heads = found.shape.heads // layout.mesh_columns if found.shape else layout.ulysses
    if layout.ulysses > heads:
        named = recipe.parallel_config.ulysses_degree_in_cp is not None
        key = f"{at}.{'ulysses_degree_in_cp' if named else 'context_parallel'}"
        of = f"{heads} query heads" + (" of a tensor rank" if layout.mesh_columns > 1 else "")
        yield (
            f"{key}: Ulysses splits {of} over {layout.ulysses} ranks: {layout.ulysses - heads} of "
            f"them compute no attention; split heads {heads} ways at most, and tokens the rest"
        )


def _rows(recipe: Recipe, layout: Layout) -> Iterator[str]:
    """Where a step has fewer rows than places for them, replicas compute padding."""
    rows, micro = recipe.training.global_batch_size, recipe.training.micro_batch_size
    passes = micro_batches(recipe, layout)
    at_once = micro * layout.data
    empty = passes * at_once - rows
    if empty:
        turns = f"{passes} passes" if passes > 1 else "one pass"
        of = f"{layout.data} replicas, {micro} rows each" if micro > 1 else f"{layout.data} rows"
        few = f"{rows} rows a step leave" if rows > 1 else "a row a step leaves"
        yield (
            f"training.global_batch_size: {few} {empty} of {passes * at_once} places empty "
            f"({turns} of {of}), which compute padding; "
            f"write a multiple of {at_once}, or use fewer processes"
        )

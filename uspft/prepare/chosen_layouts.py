"""The recipe that `strategies: auto` becomes: a list of layouts, or one."""

from __future__ import annotations

from typing import Any

from uspft.config import Recipe
from uspft.config.algorithms import AlgorithmRow, Splits
from uspft.config.degrees import Strategy
from uspft.layout import Layout
from uspft.prepare.known import Weighed


def with_layouts(recipe: Recipe, weighed: Weighed) -> Recipe:
    """Return the recipe with the chosen layouts for `strategies: auto`, or with the one layout that
    is as fast and as many packed rows in a step as its samples make."""
    found, mix = weighed.choice, weighed.choice.mix
    if found.switches and mix:
        listed = tuple(
            Strategy(max_length=one.length, **degrees_of(one.layout, one.row))
            for one in mix.buckets
        )
        way = "move" if mix.moves else "in_place"
        return _with(recipe, strategies=listed, switching=way)
    best = found.best_static
    assert best  # or the choice would have been refused
    layout = best.priced.layout
    degrees = {**degrees_of(layout, best.priced.row), "data_parallel": layout.data}
    rows = {"global_batch_size": weighed.drawn.packed_rows}
    training = recipe.training.model_copy(update=rows)
    return _with(recipe.model_copy(update={"training": training}), strategies=None, **degrees)


def _with(recipe: Recipe, **values: object) -> Recipe:
    parallel = recipe.parallel_config.model_copy(update=values)
    return recipe.model_copy(update={"parallel_config": parallel})


def degrees_of(layout: Layout, row: AlgorithmRow) -> dict[str, Any]:
    """Return what a recipe says of a layout whose matrices are split in Megatron's way, and tokens
    between them."""
    shared = layout.context > 1
    return {
        "model_parallel": layout.tensor,
        "use_seq_parallel": layout.tensor > 1,
        "context_parallel": layout.context,
        "context_parallel_algo": row.name if shared else None,
        "ulysses_degree_in_cp": layout.ulysses if shared and row.splits is Splits.BOTH else None,
    }

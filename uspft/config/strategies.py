"""The strategies of a recipe: layouts that a run switches between inside one step, by length."""

from __future__ import annotations

from uspft.config.degrees import Degrees, ParallelBlock, Strategy
from uspft.config.recipe import Recipe

KEY = "parallel_config.strategies"


def strategies_of(recipe: Recipe) -> tuple[Strategy, ...]:
    """Return the strategies that a recipe lists, shortest rows first; none where it has one layout,
    or leaves them to be chosen."""
    found = recipe.parallel_config.strategies
    return found if isinstance(found, tuple) else ()


def row_lengths(recipe: Recipe) -> tuple[int, ...]:
    """Return the tokens of the rows of each strategy, which rise; none is above those of `data`."""
    most = recipe.data.sequence_length
    return tuple(min(one.max_length, most) for one in strategies_of(recipe))


def ranks_go_together(recipe: Recipe) -> bool:
    """Return whether all ranks run as many micro-batches, since each is a collective of all that
    divide weights (ZeRO-2, 3) or experts."""
    stage: int = recipe.deepspeed.zero_optimization.get("stage", 1)
    return stage > 1 or recipe.parallel_config.expert_parallel > 1


def degrees_of(layout: Degrees) -> dict[str, object]:
    """Return the keys that a layout has, wherever it stands."""
    return {key: getattr(layout, key) for key in Degrees.model_fields}


def under(recipe: Recipe, number: int) -> Recipe:
    """Return the recipe of the rows of one strategy: its layout, and rows of its length."""
    parallel = each_alone(recipe.parallel_config)[number]
    data = recipe.data.model_copy(update={"sequence_length": row_lengths(recipe)[number]})
    return recipe.model_copy(update={"parallel_config": parallel, "data": data})


def each_alone(parallel: ParallelBlock) -> list[ParallelBlock]:
    """Return a block for each strategy, with its layout and no other."""
    every = parallel.strategies if isinstance(parallel.strategies, tuple) else ()
    return [parallel.model_copy(update={**degrees_of(one), "strategies": None}) for one in every]


def alike(parallel: ParallelBlock) -> ParallelBlock:
    """Return the block whose strategies all have its own layout: of rows that stay the same."""
    if not isinstance(parallel.strategies, tuple):
        return parallel
    own = degrees_of(parallel)
    every = tuple(one.model_copy(update=own) for one in parallel.strategies)
    return parallel.model_copy(update={"strategies": every})


def layouts_of(recipe: Recipe) -> list[Recipe]:
    """Return a recipe for each of its strategies; the recipe itself where it has one layout."""
    return [under(recipe, number) for number in range(len(strategies_of(recipe)))] or [recipe]

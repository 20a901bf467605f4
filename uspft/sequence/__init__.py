"""How a sequence is split: one algorithm, one file."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

from uspft.sequence.algorithm import Algorithm, Cost, Heads, Rule, Split, Traffic
from uspft.sequence.allgather import AllGather
from uspft.sequence.auto import ring_ranks_of_a_host
from uspft.sequence.plan import Plan
from uspft.sequence.planned import Planned
from uspft.sequence.ring import Ring
from uspft.sequence.ulysses import Ulysses
from uspft.sequence.usp import Usp
from uspft.sequence.whole import Whole

if TYPE_CHECKING:
    from uspft.config import Recipe
    from uspft.layout import Layout

ALGORITHMS = {cls.name: cls for cls in (Whole, Ulysses, Ring, Usp, AllGather, Planned)}
"""Recipe name → algorithm. Tests and the README's table iterate over it."""

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Cost",
    "Heads",
    "Plan",
    "Rule",
    "Split",
    "Traffic",
    "choose",
    "of_recipe",
]


def choose(name: str | None, ulysses: int, ring: int, **options: Any) -> Algorithm:
    """The algorithm that a recipe names, at these degrees; `whole` where nothing is shared.

    options: those of all algorithms; each takes its own.
    """
    if ulysses * ring == 1:
        return Whole()
    cls = ALGORITHMS[name or ""]
    own = {field.name for field in fields(cls)}
    algorithm: Algorithm = cls(
        ulysses=ulysses, ring=ring, **{k: v for k, v in options.items() if k in own}
    )
    return algorithm


def of_recipe(recipe: Recipe, layout: Layout, window: int | None = None) -> Algorithm:
    """The algorithm of a recipe under a layout; window: the one that all layers have, if any.

    Keys that the planned exchange has received stay for the backward, unless memory is short enough
    for gradient checkpointing.
    """
    parallel = recipe.parallel_config
    stages = parallel.exchange_stages if isinstance(parallel.exchange_stages, int) else 0
    return choose(
        parallel.context_parallel_algo,
        layout.ulysses,
        layout.ring,
        stages=stages,
        keep=not recipe.memory.gradient_checkpointing,
        window=window,
        per_host=_ring_ranks_per_host(recipe, layout),
    )


def _ring_ranks_per_host(recipe: Recipe, layout: Layout) -> int | None:
    processes = recipe.launch.processes
    if not isinstance(processes, int):
        return None
    return ring_ranks_of_a_host(processes, layout.tensor * layout.ulysses, layout.ring)

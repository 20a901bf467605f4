"""How a sequence is split: one algorithm, one file; config/algorithms.py lists them."""

from __future__ import annotations

from dataclasses import fields
from importlib import import_module
from typing import TYPE_CHECKING, Any

from uspft.config.algorithms import row_of
from uspft.layout import ring_ranks_of_a_host
from uspft.sequence.algorithm import Algorithm, Rule, Split
from uspft.sequence.rows.share import Share
from uspft.sequence.rows.traffic import Cost, Heads, Traffic

if TYPE_CHECKING:
    from uspft.config import Recipe
    from uspft.config.algorithms import AlgorithmRow
    from uspft.layout import Layout

__all__ = [
    "Algorithm",
    "Cost",
    "Heads",
    "Rule",
    "Share",
    "Split",
    "Traffic",
    "make_algorithm",
    "of_recipe",
]


def make_algorithm(
    row: AlgorithmRow,
    ulysses: int,
    ring: int,
    *,
    keep: bool = True,
    window: int | None = None,
    per_host: int | None = None,
    **options: Any,
) -> Algorithm:
    """The algorithm of a row of the table, at these degrees.

    keep: received keys stay for the backward. window: the sliding window that all layers have, if
    any. per_host: ring ranks of one host, where a row spans several. Of these an algorithm takes
    what it has a field for. options: its own, by field; raises ValueError for one it does not have.
    """
    unknown = sorted(options.keys() - set(row.options.values()))
    if unknown:
        raise ValueError(f"{row.name} has no option {', '.join(unknown)}")
    module, _, name = row.code.partition(":")
    cls = getattr(import_module(module), name)
    facts = {"keep": keep, "window": window, "per_host": per_host}
    own = {field.name for field in fields(cls)}
    algorithm: Algorithm = cls(
        ulysses=ulysses, ring=ring, **{k: v for k, v in facts.items() if k in own}, **options
    )
    return algorithm


def of_recipe(recipe: Recipe, layout: Layout, window: int | None = None) -> Algorithm:
    """The algorithm of a recipe under a layout; window: the one that all layers have, if any.

    What has been received stays for the backward, unless memory is short enough for gradient
    checkpointing. An option that is `auto` or null is left to the algorithm.
    """
    parallel = recipe.parallel_config
    row = row_of(parallel.context_parallel_algo, layout.context)
    values = {name: getattr(parallel, key) for key, name in row.options.items()}
    processes = recipe.launch.processes
    return make_algorithm(
        row,
        layout.ulysses,
        layout.ring,
        keep=not recipe.memory.gradient_checkpointing,
        window=window,
        per_host=ring_ranks_of_a_host(processes, layout) if isinstance(processes, int) else None,
        **{name: value for name, value in values.items() if value not in (None, "auto")},
    )

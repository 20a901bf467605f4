"""Sequence parallelism: the algorithms that the table of config/algorithms.py names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import cache
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from uspft.config.algorithms import row_of
from uspft.sequence.algorithm import Algorithm, Attend, Inside, Rule, Split
from uspft.sequence.chunked import Cut
from uspft.sequence.rows.heads import Heads
from uspft.sequence.rows.share import Share
from uspft.sequence.rows.traffic import FORWARDS, ONCE, Cost, Forwards, Traffic

if TYPE_CHECKING:
    from uspft.config import ParallelBlock, Recipe
    from uspft.config.algorithms import AlgorithmRow
    from uspft.job import ChunkPrices
    from uspft.layout import Layout

__all__ = [
    "FORWARDS",
    "ONCE",
    "Algorithm",
    "Attend",
    "Cost",
    "Forwards",
    "Heads",
    "Inside",
    "Rule",
    "Share",
    "Split",
    "Traffic",
    "algorithm_options",
    "chunk_multiple",
    "cut_of",
    "make_algorithm",
    "of_recipe",
    "ring_ranks_of_a_host",
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
    """Return the algorithm of a row of the table at these degrees.

    keep: whether received keys and values are saved for the backward. window: the sliding window
    that all layers have, if any. per_host: how many ring ranks one host has, where several hosts
    share a row of tokens. An algorithm without a field for one of these three ignores it. options:
    the algorithm's own, by field. Raises ValueError for an option that it does not have.
    """
    unknown = sorted(options.keys() - set(row.options.values()))
    if unknown:
        raise ValueError(f"{row.name} has no option {', '.join(unknown)}")
    cls, own = _class_of(row.code)
    facts = {"keep": keep, "window": window, "per_host": per_host}
    algorithm: Algorithm = cls(
        ulysses=ulysses, ring=ring, **{k: v for k, v in facts.items() if k in own}, **options
    )
    return algorithm


@cache
def _class_of(code: str) -> tuple[Callable[..., Algorithm], frozenset[str]]:
    """Return an algorithm's class from `module:Class`, and its field names."""
    cls = resolve_name(code)
    return cls, frozenset(field.name for field in fields(cls))


def chunk_multiple(layout: Layout, splits_tokens: bool) -> int:
    """Return the number that must divide the tokens of a chunk.

    The ranks that share a row divide a chunk equally, ring ranks into two parts each; and under
    use_seq_parallel (splits_tokens) tensor ranks do too.
    """
    tensor = layout.mesh_columns if splits_tokens else 1
    return layout.context * tensor * (2 if layout.ring > 1 else 1)


def cut_of(parallel: ParallelBlock, layout: Layout, prices: ChunkPrices | None) -> Cut | None:
    """Return how a recipe's rows are cut into chunks; None: they are not.

    prices: by which chunks take equal time; None: chunks have equal tokens.
    """
    if parallel.seq_split_num == 1:
        return None
    multiple = chunk_multiple(layout, parallel.use_seq_parallel)
    by = (prices.token_seconds, prices.pair_seconds) if prices else ()
    return Cut(parallel.seq_split_num, multiple, *by)


def ring_ranks_of_a_host(processes: int, layout: Layout) -> int | None:
    """Return how many neighbouring ring ranks run on one host with this many processes.

    None if that is one or all of them, or if hosts would have unequal numbers.
    """
    here, left = divmod(processes, layout.mesh_columns * layout.ulysses)
    divides = not left and 1 < here < layout.ring and layout.ring % here == 0
    return here if divides else None


def of_recipe(recipe: Recipe, layout: Layout) -> Algorithm:
    """Return the algorithm of a recipe in a layout."""
    row = row_of(recipe.parallel_config.context_parallel_algo, layout.context)
    return make_algorithm(
        row, layout.ulysses, layout.ring, **algorithm_options(recipe, row, layout)
    )


def algorithm_options(recipe: Recipe, row: AlgorithmRow, layout: Layout) -> dict[str, Any]:
    """Return what a recipe says of an algorithm in a layout, as arguments of `make_algorithm`.

    Received keys and values are saved for the backward unless the recipe uses gradient
    checkpointing, since memory is then short, or chunks of rows, each of which would save them. An
    option that is `auto` or null is left to the algorithm.
    """
    parallel, processes = recipe.parallel_config, recipe.launch.processes
    values = {name: getattr(parallel, key) for key, name in row.options.items()}
    short = recipe.memory.gradient_checkpointing or recipe.memory.heads_at_once
    return {
        "keep": not (short or parallel.seq_split_num > 1),
        "per_host": ring_ranks_of_a_host(processes, layout) if isinstance(processes, int) else None,
        **{name: value for name, value in values.items() if value not in (None, "auto")},
    }

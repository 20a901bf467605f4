"""The layers of each stage of a pipeline: as a recipe says, or balanced by cost.

p ranks have v virtual stages each; stage j·p + r is the j-th of rank r, as in schedules.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf
from operator import add
from typing import TYPE_CHECKING

from uspft.config.messages import as_written
from uspft.config.problems import Finding
from uspft.pipeline.schedules import PLAIN, Schedule, Scheduler

if TYPE_CHECKING:
    from uspft.config import ParallelBlock, Recipe

Each = Sequence[int] | Sequence[Sequence[int]]
"""A number for each stage: [p], or [v][p]."""


@dataclass(frozen=True)
class Stages:
    """The layers of each stage, in order; every stage has at least one."""

    bounds: tuple[int, ...]
    """The first layer of each stage, and at the end the number of layers."""
    ranks: int

    @property
    def count(self) -> int:
        """The number of stages, virtual ones counted."""
        return len(self.bounds) - 1

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of layers of each stage."""
        return tuple(b - a for a, b in pairwise(self.bounds))

    def layers(self, stage: int) -> range:
        """Return the layers of a stage."""
        return range(self.bounds[stage], self.bounds[stage + 1])

    def of_layer(self, layer: int) -> int:
        """Return the stage that has a layer."""
        return bisect_left(self.bounds, layer + 1) - 1

    def rank_of(self, stage: int) -> int:
        """Return the index along the pipeline of the rank that has a stage."""
        return stage % self.ranks

    @classmethod
    def of_sizes(cls, sizes: Sequence[int], ranks: int) -> Stages:
        """Return stages with these numbers of layers."""
        return cls((0, *accumulate(sizes)), ranks)


def stages_of(recipe: Recipe) -> Stages | None:
    """Return the stages of a resolved recipe without strategies; None: it has no pipeline."""
    parallel = recipe.parallel_config
    if parallel.pipeline_stage == 1:
        return None
    sizes = _flat(
        parallel.layers_per_stage or (),
        parallel.pipeline_stage,
        parallel.pp_interleave_num,
        alike=False,
    )
    assert sizes  # the recipe is resolved
    return Stages.of_sizes(sizes, parallel.pipeline_stage)


def schedule_of(parallel: ParallelBlock) -> Schedule:
    """Return the schedule of a recipe's pipeline, with the layers of its stages if it gives
    them."""
    order, given = parallel.pipeline_scheduler, parallel.layers_per_stage or ()
    sizes = tuple(n for row in given for n in (row if isinstance(row, tuple) else (row,)))
    chunks = parallel.seq_split_num
    plain: Scheduler = "seqpipe" if chunks > 1 else PLAIN.scheduler
    scheduler = order if order == "gpipe" or order == "seqpipe" else plain
    return Schedule(scheduler, parallel.pp_interleave_num, sizes, chunks)


def first_layers(asked: bool | int | Each, stages: Stages) -> frozenset[int]:
    """Return the layers of `memory.gradient_checkpointing`: all, none, or the first of each stage.

    asked: true, false, or a number of layers: for every rank's stages, for each rank's [p], or for
    each virtual stage [v][p]. In the first two forms the layers of a rank's virtual stages are
    counted together, in order.
    """
    virtual = [range(stage, stages.count, stages.ranks) for stage in range(stages.ranks)]
    each = [[n for stage in mine for n in stages.layers(stage)] for mine in virtual]
    if isinstance(asked, int):
        many = [(len(mine) if asked else 0) if isinstance(asked, bool) else asked for mine in each]
    else:
        nested = [one for one in asked if not isinstance(one, int)]
        if nested:
            each = [list(stages.layers(stage)) for stage in range(stages.count)]
        flat = [one for one in asked if isinstance(one, int)]
        many = flat + [n for row in nested for n in row]
    return frozenset(n for mine, first in zip(each, many, strict=True) for n in mine[:first])


def dealt_out(
    costs: Sequence[float], ranks: int, virtual: int, *, first: float = 0, last: float = 0
) -> Stages:
    """Return the stages with the smallest maximal cost and, among those, the smallest variance.

    costs: of each layer. first, last: additional costs of the first stage, for the embedding, and
    of the last one, for the head, in the same unit. Among equals later stages have more layers,
    since they store fewer micro-batches. Raises ValueError if there are more stages than layers.
    """
    layers, stages = len(costs), ranks * virtual
    if stages > layers:
        raise ValueError(f"{stages} stages, and {layers} layers")
    if not first and len({*costs}) == 1:
        return Stages.of_sizes(_alike(layers, stages, last / costs[0]), ranks)
    before = list(accumulate(costs, initial=0.0))

    def cost(stage: int, start: int, stop: int) -> float:
        more = first * (stage == 0) + last * (stage == stages - 1)
        return before[stop] - before[start] + more

    dearest, _ = _best(layers, stages, cost, max)

    def square(*of: int) -> float:
        found = cost(*of)
        return found * found if found <= dearest else inf

    _, bounds = _best(layers, stages, square, add)
    return Stages(bounds, ranks)


def _alike(layers: int, stages: int, last: float) -> list[int]:
    """Return the number of layers of each stage if every layer costs 1, and the last stage `last`
    more."""
    if stages == 1:
        return [layers]
    found = list[tuple[float, float, int, list[int]]]()
    for of_last in range(1, layers - stages + 2):
        each, more = divmod(layers - of_last, stages - 1)
        sizes = [each] * (stages - 1 - more) + [each + 1] * more + [of_last]
        costs = [*sizes[:-1], of_last + last]
        squares = round(sum(cost * cost for cost in costs), 9)
        found.append((max(costs), squares, -of_last, sizes))
    return min(found)[-1]


def _best(
    layers: int,
    stages: int,
    cost: Callable[[int, int, int], float],
    joined: Callable[[float, float], float],
) -> tuple[float, tuple[int, ...]]:
    """Return the least total cost of stages, and their bounds, by dynamic programming.

    cost: of a stage from one layer to another. joined: combines the costs so far with one more.
    """
    # The least cost of the stages so far, and their bounds, by the number of layers in them.
    found: dict[int, tuple[float, tuple[int, ...]]] = {0: (0, (0,))}
    for stage in range(stages):
        after = {}
        for stop in range(stage + 1, layers - (stages - 1 - stage) + 1):
            starts = [start for start in found if start < stop]
            costs = [joined(found[start][0], cost(stage, start, stop)) for start in starts]
            least = min(costs)
            before = found[starts[costs.index(least)]][1]
            after[stop] = (least, (*before, stop))
        found = after
    return found[layers]


def stated(key: str, given: Each, layers: int, ranks: int, virtual: int) -> Stages | Finding:
    """Return the stages of a recipe's `layers_per_stage`, or what is wrong with it.

    key: its path. given: [p] with one virtual stage per rank, or [v][p].
    """
    sizes = _flat(given, ranks, virtual, alike=False)
    if sizes is None:
        return key, _not_of(given, ranks, virtual), _wanted(ranks, virtual)
    return _checked(key, sizes, layers, ranks)


def offset(key: str, given: int | Each, layers: int, ranks: int, virtual: int) -> Stages | Finding:
    """Return the stages of a recipe's `offset`, with MindSpore Transformers' meaning, or what is
    wrong with it.

    Each stage has ⌊layers ÷ (p·v)⌋ layers plus its offset. given: [v][p], or [p] for all v alike,
    or one number for every stage; they must add up to layers mod p·v. key: its path.
    """
    stages = ranks * virtual
    if isinstance(given, int):
        more: list[int] | None = [given] * stages
    else:
        more = _flat(given, ranks, virtual, alike=True)
    if more is None:
        return key, _not_of(given, ranks, virtual), f"{_wanted(ranks, virtual)}, or one number"
    each, left = divmod(layers, stages)
    if sum(more) != left:
        what = (
            f"is {as_written(given)}, {sum(more)} in all, and {layers} layers over {stages} stages "
            f"of {each} leave {left}"
        )
        return key, what, f"write offsets that add up to {left}, or leave it out"
    return _checked(key, [each + one for one in more], layers, ranks)


def _flat(given: object, ranks: int, virtual: int, *, alike: bool) -> list[int] | None:
    """Return the numbers of all stages in order; None if there are more or fewer.

    alike: whether a list of p numbers is repeated for every virtual stage.
    """
    rows = list(given) if isinstance(given, list | tuple) else []
    if rows and not isinstance(rows[0], list | tuple):
        rows = [rows] * (virtual if alike else 1)
    fits = len(rows) == virtual and all(
        isinstance(row, list | tuple) and len(row) == ranks for row in rows
    )
    return [one for row in rows for one in row] if fits else None


def _checked(key: str, sizes: list[int], layers: int, ranks: int) -> Stages | Finding:
    """Return stages of these sizes, which must add up to all layers and be at least 1 each."""
    if sum(sizes) != layers:
        what = f"gives stages of {sizes}, {sum(sizes)} layers in all, and the model has {layers}"
        return key, what, f"write numbers that add up to {layers}, or leave it out"
    if min(sizes) < 1:
        stage = min(range(len(sizes)), key=lambda one: sizes[one])
        what = f"gives stages of {sizes}, of which stage {stage} has no layer"
        return key, what, "give each stage a layer, or have fewer stages"
    return Stages.of_sizes(sizes, ranks)


def _not_of(given: object, ranks: int, virtual: int) -> str:
    ways = f"{ranks} stages × {virtual} virtual ones"
    return f"is {as_written(given)}, which is not a number for each of {ways}"


def _wanted(ranks: int, virtual: int) -> str:
    if virtual == 1:
        return f"write a list of {ranks} numbers"
    return f"write {virtual} lists of {ranks} numbers"


def fits(layers: int, ranks: int, virtual: int) -> list[Finding]:
    """Return a finding if there are more stages than layers."""
    stages = ranks * virtual
    if stages <= layers:
        return []
    what = f"is {ranks}"
    what += f", with {virtual} virtual stages each {stages}" if virtual > 1 else ""
    what += f", and the model has {layers} layers"
    remedy = f"write at most {layers // virtual}" if layers >= virtual else "write 1"
    return [("parallel_config.pipeline_stage", what, remedy)]

"""The loader of a run with strategies: it assigns a step's rows to groups of ranks, each in the
layout for the row's length, with groups of different sizes running at the same time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist

from uspft.comm import Books
from uspft.config.algorithms import ON_A_MESH, row_of
from uspft.config.strategies import ranks_in_lockstep, row_lengths
from uspft.data.rows.loader import EMPTY, Orders, RowLoader, Size, StepLoader
from uspft.data.rows.stream import Row, RowStream, empty_row, training_rows
from uspft.mesh import make_mesh
from uspft.sequence import make_algorithm
from uspft.switching.deal.micro_steps import (
    BucketRow,
    Limits,
    MicroStep,
    RankGroup,
    RowWork,
    rows_of_samples,
)
from uspft.switching.deal.schedule import schedule
from uspft.world import World

if TYPE_CHECKING:
    from uspft.batch import Batch
    from uspft.config import Recipe
    from uspft.job import Job, Prices
    from uspft.layout import Layout
    from uspft.mesh import Groups

PLANS = 4
"""How many steps' plans are cached: those of the current and of the next."""
IDLE_TOKENS = 2
"""The tokens of each rank that shares the padding row which it computes while only other ranks have
rows: two equal parts, as of every row."""
ROUNDED = 1 + 1e-6
"""A factor on the memory limit, so that rounding never refuses rows that fit."""


class Phase(NamedTuple):
    """The part of a step during which the parameters stay sharded in one way; a step has several
    only under `switching: move`."""

    idle: World
    """The layout in which a rank without a row computes an empty one: its ranks share no rows,
    except along mesh rows."""
    groups: tuple[MicroStep, ...]
    """The groups of ranks of each micro-step, whose `rows` are keys of `StepPlan.rows`."""
    lockstep: bool
    """Whether all ranks run the same number of micro-batches. ZeRO-2, ZeRO-3 and expert parallelism
    need that since every micro-batch contains a collective of all ranks; a pipeline needs it since
    ranks that share a row must reach it at the same point of their schedules."""


class StepPlan(NamedTuple):
    """The rows of one step, and the groups of ranks that run them."""

    rows: dict[int, BucketRow]
    """The row's bucket and samples, by the index of its first sample in the stream."""
    phases: tuple[Phase, ...]


class SwitchingLoader(RowLoader):
    """A loader that packs each step's samples into rows by length, and assigns the rows to groups
    of ranks.

    Step i (from 1) takes samples [(i − 1)·B, i·B) of the stream, with B the global batch size.
    Every rank computes the same plan from the same lengths, before the step begins.
    """

    counts = "samples"

    def __init__(
        self,
        stream: RowStream,
        recipe: Recipe,
        worlds: Sequence[World],
        holders: Sequence[World],
        groups: Groups,
        prices: Prices,
        *,
        last_sample: int,
        orders: Orders | None = None,
    ) -> None:
        """stream: of rows of one document each. worlds: the layouts between which the run switches,
        shortest rows first. holders, groups: as of `training_loader`."""
        by_storage = {one.layout.stored_as: one for one in holders}
        self._idle = {stored: _idle_world(one, groups) for stored, one in by_storage.items()}
        """The layout of ranks without a row, by how the parameters are sharded at that time, the
        least sharded first; it has one entry under `switching: in_place`, and under `move` one for
        each way in which the strategies shard them."""
        self._lengths, self._packing = row_lengths(recipe), recipe.data.packing
        samples = recipe.training.global_batch_size
        super().__init__(stream, self._lengths[-1], samples, last_sample, orders)
        self.passes = samples  # a row holds at least one
        self.worlds, self._prices = worlds, prices
        self._moves = recipe.parallel_config.switching == "move"
        most = recipe.training.micro_batch_size * max(prices.row_bytes) * ROUNDED
        self._limits = Limits(
            [int(most / each) for each in prices.row_bytes],
            prices.pass_seconds,
            prices.step_seconds,
            ranks_in_lockstep(recipe),
        )
        self.plan = lru_cache(PLANS)(self._planned)
        """Returns the plan of a step (cached)."""

    def on_host(self, step: int) -> list[Batch]:
        found = []
        for idle, micro_steps, lockstep in self.plan(step).phases:
            every = map(self._mine, micro_steps)
            mine = [one for one in every if one or lockstep] or [None]
            found += [self.of_group(one) if one else self._cut(idle, [EMPTY]) for one in mine]
        return found

    def _planned(self, step: int) -> StepPlan:
        with self._reading:
            lengths = {index: self.stream.tokens_of(index) for index in self.rows_of(step)}
        every, prices = rows_of_samples(lengths, self._lengths, self._packing), self._prices
        rows, works = {row.samples[0]: row for row in every}, {}
        for number, (bucket, samples) in rows.items():
            pairs = sum(lengths[one] * (lengths[one] + 1) // 2 for one in samples)
            seconds = prices.row_seconds[bucket] + prices.pair_seconds[bucket] * pairs
            works[number] = RowWork(bucket, seconds)
        return StepPlan(rows, tuple(self._phases(works)))

    def _phases(self, works: Mapping[int, RowWork]) -> Iterator[Phase]:
        """Yield the phases of a step: one, or under `switching: move` one for each way in which the
        layouts of its rows shard the parameters. works: each row's work, by the row's key."""
        layouts = [world.layout for world in self.worlds]
        sharing_ranks = list(map(_sharing, layouts))
        for stored, idle in self._idle.items():
            here = {
                number: work
                for number, work in works.items()
                if not self._moves or layouts[work.bucket].stored_as == stored
            }
            if here:
                numbers, stages = list(here), idle.layout.pipeline
                limits = replace(self._limits, lockstep=self._limits.lockstep or stages > 1)
                ranks = idle.layout.ranks // stages
                groups = schedule(list(here.values()), sharing_ranks, ranks, limits)
                named = (
                    tuple(replace(one, rows=tuple(numbers[n] for n in one.rows)) for one in step)
                    for step in groups
                )
                yield Phase(idle, tuple(named), limits.lockstep)

    def _mine(self, groups: MicroStep) -> RankGroup | None:
        """Return the group of a micro-step that this rank belongs to, if any. Groups are numbered
        by ranks of the first pipeline stage; a rank of a later stage belongs to the group of the
        first stage's rank at the same position."""
        rank = self.worlds[0].mesh.rank
        for group in groups:
            layout = self.worlds[group.bucket].layout
            place = rank % (layout.ranks // layout.pipeline)
            if group.first <= place < group.first + _sharing(layout):
                return group
        return None

    def of_group(self, group: RankGroup) -> Batch:
        """Return this rank's share of its group's rows, in the host's memory."""
        return self._cut(self.worlds[group.bucket], group.rows)

    def empty(self) -> Batch:
        return self.batch_of(next(iter(self._idle.values())), [EMPTY])

    def row(self, index: int) -> Row:
        if index == EMPTY:
            rows = max(world.layout.mesh_rows for world in self._idle.values())
            return empty_row(IDLE_TOKENS * rows)
        bucket, samples = self.plan(index // self._rows_per_step + 1).rows[index]
        with self._reading:
            return self.stream.row_of(samples, self._lengths[bucket])

    def sizes(self, step: int) -> list[Size]:
        """Return how many rows and tokens a step has under each strategy."""
        buckets = [bucket for bucket, _ in self.plan(step).rows.values()]
        return [
            Size(buckets.count(bucket), buckets.count(bucket) * length)
            for bucket, length in enumerate(self._lengths)
        ]


def _sharing(layout: Layout) -> int:
    """Return how many ranks of one stage share a row."""
    return layout.ranks // (layout.data * layout.pipeline)


def training_loader(
    job: Job,
    worlds: Sequence[World],
    holders: Sequence[World],
    groups: Groups,
    orders: Orders | None = None,
) -> RowLoader:
    """Return the loader of the training rows, which end with the last epoch or step; collective.

    worlds: one per strategy, or a single one. holders: the layouts in which ranks store the
    parameters, the least sharded first; several under `switching: move`. orders: worker processes
    that compute token orders; None: this process computes them.
    """
    recipe, data, training = job.recipe, job.recipe.data, job.recipe.training
    stream = training_rows(data, job.corpus, recipe.seed, one_document=job.prices is not None)
    each = training.global_batch_size
    last = stream.rows_in(training.epochs) if training.epochs else job.steps * each
    if job.prices:  # the recipe has strategies
        told = [job.prices]
        dist.broadcast_object_list(told, src=0)
        live = worlds, holders, groups
        return SwitchingLoader(stream, recipe, *live, told[0], last_sample=last, orders=orders)
    return StepLoader(
        stream,
        worlds[0],
        row_tokens=data.sequence_length,
        rows_per_step=each,
        rows_per_batch=training.micro_batch_size,
        last_row=last,
        orders=orders,
    )


def _idle_world(holder: World, groups: Groups) -> World:
    """Return the layout of a rank without a row: matrices are sharded as in `holder`, and only mesh
    rows share rows of tokens."""
    layout = holder.layout
    rows = layout.mesh_rows
    alone = replace(layout, ulysses=1, ring=rows, data=layout.data * layout.context // rows)
    row = row_of(ON_A_MESH, rows)
    mesh = make_mesh(alone, groups, Books())
    algorithm = make_algorithm(row, 1, rows)
    return World(mesh, row, algorithm, holder.tensor, holder.kernel, holder.device)

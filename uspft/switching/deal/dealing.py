"""A step's micro-batches where its rows run under several layouts, groups of ranks side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist

from uspft.config.algorithms import ON_A_MESH, row_of
from uspft.config.strategies import ranks_in_lockstep, row_lengths, strategies_of
from uspft.data.rows.loader import EMPTY, Orders, RowLoader, Size, StepLoader
from uspft.data.rows.stream import Row, RowStream, empty_row, training_rows
from uspft.sequence import make_algorithm
from uspft.switching.deal.micro_steps import Limits, MicroStep, RankGroup, RowWork, rows_of_samples
from uspft.switching.deal.schedule import schedule
from uspft.world import make_world

if TYPE_CHECKING:
    from uspft.batch import Batch
    from uspft.job import Job, Prices
    from uspft.layout import Layout, StoredAs
    from uspft.mesh import Groups
    from uspft.world import World

IDLE_TOKENS = 1
"""The tokens of the empty row that a rank computes while only other ranks have rows."""
ROUNDED = 1 + 1e-6
"""How far the memory of rows may exceed the bound, so that rounding never refuses rows that fit."""


@dataclass(frozen=True)
class Strategies:
    """The layouts between which a run switches, with their process groups, shortest rows first."""

    worlds: Sequence[World]
    row_lengths: Sequence[int]
    idle: Mapping[StoredAs, World]
    """The layout in which a rank without a row computes an empty one, by how ranks store the
    parameters, the least sharded first. In it no ranks share a row, except those of a mesh. Where
    weights stay in place there is one; where they move, one for each way in which strategies store
    them."""
    rows_at_once: int
    """How many rows of the kind that needs most memory a rank may compute at once."""
    lockstep: bool
    """Whether all ranks run the same number of micro-batches, since every micro-batch contains a
    collective of all of them (ZeRO-2 and 3, divided experts)."""
    moves: bool = False
    """Whether weights move between layouts; all ranks then hold those of one at a time."""


class Phase(NamedTuple):
    """The part of a step during which all ranks store the parameters in one way."""

    stored: StoredAs
    groups: tuple[MicroStep, ...]
    lockstep: bool
    """Whether all ranks run equally many micro-batches: where `Strategies.lockstep` says so, and in
    a pipeline, where ranks that share a row must take it at the same place of their schedules."""


@dataclass(frozen=True)
class StepPlan:
    """The rows of one step, by the number that names each, and the groups that run them."""

    rows: dict[int, tuple[int, tuple[int, ...]]]
    """By number: the row's bucket, and the stream's rows of one document that it is made of."""
    numbers: tuple[int, ...]
    """The numbers of the rows in the order in which groups name them."""
    phases: tuple[Phase, ...]


class SwitchingLoader(RowLoader):
    """A loader whose step takes samples, makes rows of them, and deals these out to groups.

    Step i (from 1) takes samples [(i − 1)·B, i·B) of the stream. A row is named by its first
    sample's number. Every rank works out the same plan from the same lengths, ahead of the step.
    """

    counts = "samples"

    def __init__(
        self,
        stream: RowStream,
        strategies: Strategies,
        prices: Prices,
        *,
        packing: str,
        samples_per_step: int,
        last_sample: int,
        orders: Orders | None = None,
    ) -> None:
        """stream: of rows of one document each."""
        longest = strategies.row_lengths[-1]
        super().__init__(stream, longest, samples_per_step, last_sample, orders)
        self._strategies, self._prices, self._packing = strategies, prices, packing
        self.worlds = strategies.worlds
        self._plans: dict[int, StepPlan] = {}

    def on_host(self, step: int) -> list[Batch]:
        plan, found = self.plan(step), []
        for stored, micro_steps, lockstep in plan.phases:
            here = []
            for mine in map(self._mine, micro_steps):
                if mine:
                    here.append(self.of_group(plan, mine))
                elif lockstep:
                    here.append(self._idle(stored))
            found += here or [self._idle(stored)]
        return found

    def plan(self, step: int) -> StepPlan:
        """Return the plan of a step, which is remembered until two steps later."""
        if step not in self._plans:
            self._plans[step] = self._planned(step)
            for old in [one for one in self._plans if one < step - 1]:
                self._plans.pop(old, None)
        return self._plans[step]

    def _planned(self, step: int) -> StepPlan:
        of_step, live = self.rows_of(step), self._strategies
        with self._reading:
            lengths = {index: self.stream.tokens_of(index) for index in of_step}
        rows, numbers, works = {}, [], []
        for bucket, samples in rows_of_samples(lengths, live.row_lengths, self._packing):
            rows[samples[0]] = bucket, samples
            numbers.append(samples[0])
            pairs = sum(lengths[one] * (lengths[one] + 1) // 2 for one in samples)
            works.append(
                RowWork(
                    bucket,
                    self._prices.row_seconds[bucket] + self._prices.pair_seconds[bucket] * pairs,
                    self._prices.row_bytes[bucket],
                )
            )
        most_memory = live.rows_at_once * max(self._prices.row_bytes) * ROUNDED
        limits = Limits(
            most_memory, self._prices.pass_seconds, self._prices.step_seconds, live.lockstep
        )
        return StepPlan(rows, tuple(numbers), tuple(self._phases(works, limits)))

    def _phases(self, works: Sequence[RowWork], limits: Limits) -> Iterator[Phase]:
        """Yield the groups of a step; where weights move, those of one way to store them after
        another."""
        layouts = [world.layout for world in self._strategies.worlds]
        sharing_ranks = list(map(_sharing, layouts))
        for stored, idle in self._strategies.idle.items():
            moves, stages = self._strategies.moves, idle.layout.pipeline
            chosen = [
                number
                for number, work in enumerate(works)
                if not moves or layouts[work.bucket].stored_as == stored
            ]
            if chosen:
                here = [works[number] for number in chosen]
                limits = replace(limits, lockstep=self._strategies.lockstep or stages > 1)
                groups = schedule(here, sharing_ranks, idle.layout.ranks // stages, limits)
                renumbered = tuple(_renumbered(one, chosen) for one in groups)
                yield Phase(stored, renumbered, limits.lockstep)

    def _mine(self, groups: MicroStep) -> RankGroup | None:
        """Return the group of a micro-step that this rank is in, if any; of stages each rank is in
        that of the first stage's rank at its place."""
        rank = self.worlds[0].mesh.rank
        for group in groups:
            layout = self._strategies.worlds[group.bucket].layout
            place = rank % (layout.ranks // layout.pipeline)
            if group.first <= place < group.first + _sharing(layout):
                return group
        return None

    def of_group(self, plan: StepPlan, group: RankGroup) -> Batch:
        """Return this rank's share of its group's rows, in the host's memory."""
        world = self._strategies.worlds[group.bucket]
        return self._cut(world, [plan.numbers[row] for row in group.rows])

    def empty(self) -> Batch:
        return self.batch_of(next(iter(self._strategies.idle.values())), [EMPTY])

    def _idle(self, stored: StoredAs) -> Batch:
        return self._cut(self._strategies.idle[stored], [EMPTY])

    def row(self, index: int) -> Row:
        if index == EMPTY:
            return empty_row(IDLE_TOKENS)
        found = next(plan.rows[index] for plan in list(self._plans.values()) if index in plan.rows)
        bucket, samples = found
        with self._reading:
            return self.stream.row_of(samples, self._strategies.row_lengths[bucket])

    def sizes(self, step: int) -> list[Size]:
        """Return how many rows and tokens a step has under each strategy."""
        buckets = [bucket for bucket, _ in self.plan(step).rows.values()]
        return [
            Size(buckets.count(bucket), buckets.count(bucket) * length)
            for bucket, length in enumerate(self._strategies.row_lengths)
        ]


def _sharing(layout: Layout) -> int:
    """Return how many ranks of one stage share a row."""
    return layout.ranks // (layout.data * layout.pipeline)


def _renumbered(groups: MicroStep, numbers: Sequence[int]) -> MicroStep:
    """Return the groups of some rows, whose numbers among them are given, in terms of all rows."""
    return tuple(replace(one, rows=tuple(numbers[row] for row in one.rows)) for one in groups)


def training_loader(
    job: Job,
    worlds: Sequence[World],
    holders: Sequence[World],
    groups: Groups,
    orders: Orders | None = None,
) -> RowLoader:
    """Return the loader of the training rows, which end with the last epoch or step; collective.

    worlds: of each strategy, or of the one layout. holders: those of them in which ranks store the
    parameters, the least sharded first; several where weights move. orders: the processes that work
    out token orders; None: this one does.
    """
    recipe, data, training = job.recipe, job.recipe.data, job.recipe.training
    switches = bool(strategies_of(recipe))
    stream = training_rows(data, job.corpus, recipe.seed, one_document=switches)
    each = training.global_batch_size
    last = stream.rows_in(training.epochs) if training.epochs else job.steps * each
    if not switches:
        return StepLoader(
            stream,
            worlds[0],
            row_tokens=data.sequence_length,
            rows_per_step=each,
            rows_per_batch=training.micro_batch_size,
            last_row=last,
            orders=orders,
        )
    by_storage = {one.layout.stored_as: one for one in holders}
    strategies = Strategies(
        worlds,
        row_lengths(recipe),
        {stored: _idle_world(one, groups) for stored, one in by_storage.items()},
        rows_at_once=training.micro_batch_size,
        lockstep=ranks_in_lockstep(recipe),
        moves=recipe.parallel_config.switching == "move",
    )
    return SwitchingLoader(
        stream,
        strategies,
        _same_prices(job),
        packing=data.packing,
        samples_per_step=each,
        last_sample=last,
        orders=orders,
    )


def _idle_world(holder: World, groups: Groups) -> World:
    """Return the layout in which rows are shared by mesh rows alone, and matrices are as `holder`
    has them."""
    layout = holder.layout
    rows = layout.mesh_rows
    alone = replace(layout, ulysses=1, ring=rows, data=layout.data * layout.context // rows)
    row = row_of(ON_A_MESH, rows)
    named = row, make_algorithm(row, 1, rows), holder.tensor
    return make_world(alone, named, holder.kernel, holder.device, groups)


def _same_prices(job: Job) -> Prices:
    """Return the prices that the first rank has, on every rank; collective."""
    told: list[Prices | None] = [job.prices]
    dist.broadcast_object_list(told, src=0)
    assert told[0]  # the preparation of a recipe with strategies leaves them
    return told[0]

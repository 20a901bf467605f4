"""A step's micro-batches where its rows run under several layouts, groups of ranks side by side."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from uspft.data.loader import EMPTY, RowLoader, Size, StepRows
from uspft.data.stream import Row, RowStream, empty_row
from uspft.switching.buckets import rows_of_samples
from uspft.switching.micro_steps import Limits, MicroStep, RankGroup, RowWork
from uspft.switching.schedule import schedule

if TYPE_CHECKING:
    from uspft.batch import Batch
    from uspft.job import Prices
    from uspft.world import World

IDLE_TOKENS = 1
"""The row of a rank that has none while others have."""


@dataclass(frozen=True)
class Strategies:
    """The layouts of a run made live, those of shorter rows first."""

    worlds: Sequence[World]
    row_lengths: Sequence[int]
    idle: World
    """The layout of a rank without a row: it shares none, and its matrices are as they are held."""
    most_tokens: float
    """What a rank may hold of the rows of one micro-batch, if they are more than one."""
    together: bool
    """Whether all ranks run as many micro-batches, since each is a collective of all of them."""


@dataclass(frozen=True)
class StepPlan:
    """The rows of one step, by the number that names each, and the groups that run them."""

    rows: dict[int, tuple[int, tuple[int, ...]]]
    """By number: the row's bucket, and the stream's rows of one document that it is made of."""
    numbers: tuple[int, ...]
    """The numbers of the rows in the order in which groups name them."""
    groups: tuple[MicroStep, ...]


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
        of_step: StepRows,
        *,
        row_tokens: int,
        packing: str,
    ) -> None:
        """stream: of rows of one document each. row_tokens: of the longest row."""
        super().__init__(stream, row_tokens, of_step)
        self._strategies, self._prices, self._packing = strategies, prices, packing
        self.worlds = strategies.worlds
        self._plans: dict[int, StepPlan] = {}
        self._pool = ThreadPoolExecutor(1, "plans ahead")
        self._ahead: Future[None] | None = None

    def batches(self, step: int) -> list[Batch]:
        """Return this rank's micro-batches of a step.

        While the step runs, a thread plans the next one.
        """
        if self._ahead:
            self._ahead.result()
        plan, found = self.plan(step), []
        for groups in plan.groups:
            mine = self._mine(groups)
            if mine:
                found.append(self.of_group(plan, mine))
            elif self._strategies.together:
                found.append(self.empty())
        self._ahead = self._pool.submit(self._look_ahead, step + 1)
        return found or [self.empty()]

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
            sharing = live.worlds[bucket].layout.context
            works.append(
                RowWork(
                    bucket,
                    self._prices.row_seconds[bucket] + self._prices.pair_seconds[bucket] * pairs,
                    live.row_lengths[bucket] / sharing,
                )
            )
        limits = Limits(
            live.most_tokens, self._prices.pass_seconds, self._prices.step_seconds, live.together
        )
        sharing_ranks = [world.layout.ranks // world.layout.data for world in live.worlds]
        groups = schedule(works, sharing_ranks, live.idle.layout.ranks, limits)
        return StepPlan(rows, tuple(numbers), groups)

    def _mine(self, groups: MicroStep) -> RankGroup | None:
        """Return the group of a micro-step that this rank is in, if any."""
        rank = self._strategies.idle.mesh.rank
        for group in groups:
            layout = self._strategies.worlds[group.bucket].layout
            if group.first <= rank < group.first + layout.ranks // layout.data:
                return group
        return None

    def of_group(self, plan: StepPlan, group: RankGroup) -> Batch:
        """Return this rank's share of the rows of its group."""
        world = self._strategies.worlds[group.bucket]
        return self.batch_of(world, [plan.numbers[row] for row in group.rows])

    def _look_ahead(self, step: int) -> None:
        """Plan a step, and search for the token orders of this rank's rows in it."""
        plan = self.plan(step)
        for group in filter(None, map(self._mine, plan.groups)):
            algorithm = self._strategies.worlds[group.bucket].algorithm
            for row in group.rows:
                algorithm.token_order(self.row(plan.numbers[row]).segments)

    def empty(self) -> Batch:
        return self.batch_of(self._strategies.idle, [EMPTY])

    def row(self, index: int) -> Row:
        if index == EMPTY:
            return empty_row(IDLE_TOKENS)
        found = next(plan.rows[index] for plan in list(self._plans.values()) if index in plan.rows)
        bucket, samples = found
        with self._reading:
            return self.stream.together(samples, self._strategies.row_lengths[bucket])

    def sizes(self, step: int) -> list[Size]:
        """Return how many rows and tokens a step has under each strategy."""
        buckets = [bucket for bucket, _ in self.plan(step).rows.values()]
        return [
            Size(buckets.count(bucket), buckets.count(bucket) * length)
            for bucket, length in enumerate(self._strategies.row_lengths)
        ]

"""A set of layouts, one for each bucket of row lengths, with the predicted seconds of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean

from uspft.layout import COPIES, Layout, StoredAs
from uspft.planner.memory.formula import USABLE_SHARE, memory_of, row_memory
from uspft.planner.memory.zero import moving_state_bytes
from uspft.planner.options import GRADIENT_BYTES
from uspft.planner.stages import stage_layers
from uspft.planner.step import dealt_stages, micro_step_seconds, zero_once
from uspft.planner.step_shape import Memo, StepShape, seconds_of
from uspft.planner.trained import ParameterCounts, StageLayers, counts_of
from uspft.switching.choose.drawn_steps import DrawnSteps, PackedRow, pairs_of
from uspft.switching.choose.priced import PricedLayout, Setting
from uspft.switching.deal.micro_steps import Limits, MicroStep, RankGroup, RowWork, makespan
from uspft.switching.deal.schedule import schedule

SUMMED_BYTES, OWNED_BYTES = 4 + 10, 4 + 4 + 8 + 28 + 6
"""Bytes read and written for each element in a step under `switching: move`. Each layout zeroes a
float32 sum and adds a 16-bit gradient to it. The element's owner zeroes its sum, reads it for the
norm, clips it, updates AdamW's states, and rounds the weight."""


@dataclass(frozen=True)
class LayoutSet:
    """A layout for each bucket of row lengths, shortest rows first, and whether weights move
    between them."""

    setting: Setting
    buckets: tuple[PricedLayout, ...]
    tensor: int
    """The least tensor degree that may be used. Where weights stay in place, ranks store the shards
    of this degree, and layouts of higher degrees use parts of them."""
    moves: bool = False
    """Whether weights move between layouts (`switching: move`), which then run one after
    another."""

    @property
    def stored(self) -> Layout:
        """The layout in which ranks store weights under `switching: in_place`."""
        stages = self.buckets[0].layout.pipeline
        data = self.setting.ranks // (self.tensor * stages)
        return Layout(self.tensor, data=data, pipeline=stages)

    @property
    def bounds(self) -> tuple[int, ...]:
        return tuple(one.length for one in self.buckets)

    def memory(self, bucket: PricedLayout) -> float:
        """Return the bytes that a rank has free for the activations of a bucket's rows."""
        setting, tensor = self.setting, bucket.layout.mesh_columns
        model, options = setting.step.model, setting.step.options
        if self.moves:
            whole, *parts = (
                _counts(setting.step, t, stage)
                for t, stage in ((1, None), *((tensor, one) for one in self._stages(bucket)))
            )
            part = max(parts, key=lambda one: one.every)
            state = moving_state_bytes(options.element, whole, part, setting.ranks)
        else:
            # Some of a micro-batch's gradients are still in memory when the next one runs.
            rows = 2 * options.micro_batch * self.stored.data
            more = replace(options, step_rows=rows, switches=len(self.buckets) > 1)
            state = memory_of(model, self.stored, bucket.length, options=more).state_bytes
        _, once = row_memory(options, model, bucket.row, bucket.layout, bucket.length)
        return USABLE_SHARE * setting.memory_bytes - state - once

    def _stages(self, bucket: PricedLayout) -> list[StageLayers | None]:
        """Return the layers of each rank along a bucket's pipeline; [None], which means all layers,
        without a pipeline."""
        if bucket.layout.pipeline == 1:
            return [None]
        step = self.setting.step.under(schedule=bucket.way.schedule)
        every = dealt_stages(step, bucket.layout, Memo())
        return [stage_layers(every, rank) for rank in range(every.ranks)]

    @cached_property
    def shares(self) -> list[float]:
        """The share of a rank's free memory that one row of each bucket takes; a row with a share
        above 1 does not fit. Under `switching: move` the free memory depends on the bucket."""
        return [
            one.row_bytes / free if (free := self.memory(one)) > 0 else float("inf")
            for one in self.buckets
        ]

    @cached_property
    def portions(self) -> list[float]:
        """The share of a micro-batch's memory limit that one row of each bucket takes. The limit is
        a rank's free memory or, if the micro-batch size is given, what that many rows of the bucket
        with the largest rows take."""
        if self.setting.rows_at_once is None:
            return self.shares
        largest = max(one.row_bytes for one in self.buckets)
        most = (self.setting.rows_at_once + 1e-4) * largest  # shares are rounded later
        return [one.row_bytes / most for one in self.buckets]

    @property
    def fits(self) -> bool:
        """Whether a micro-batch of every bucket fits in memory beside the model's state: of one row
        or, if the micro-batch size is given, of as many rows as its limit allows."""
        pairs = zip(self.shares, self.portions, strict=True)
        if self.setting.rows_at_once is None:
            return max(self.shares) <= 1
        return all(share * int(1 / portion) <= 1 for share, portion in pairs)

    @property
    def holds(self) -> bool:
        """Whether each rank stores all the weights that it uses in every layout; always true where
        weights move."""
        return self.moves or all(
            one.layout.tensor % self.tensor == 0 and one.layout.pipeline == 1
            for one in self.buckets
        )

    @property
    def switches(self) -> bool:
        """Whether the layouts differ; where weights move, whether they shard them differently."""
        layouts = {(one.layout.tensor, one.layout.context) for one in self.buckets}
        return len(self.stored_in_turn if self.moves else layouts) > 1

    @cached_property
    def stored_in_turn(self) -> list[Layout]:
        """The layouts in which ranks store weights one after another under `switching: move`, the
        least sharded first, with context degree 1."""
        ranks, found = self.setting.ranks, dict[StoredAs, Layout]()
        for one in self.buckets:
            tensor, stages = one.layout.tensor, one.layout.pipeline
            alone = Layout(tensor, data=ranks // (tensor * stages), pipeline=stages)
            found[alone.stored_as] = alone
        return [found[stored] for stored in sorted(found)]

    def least_seconds(self, drawn: DrawnSteps) -> float:
        """Return a lower bound on the seconds of the first step, whose rows' work is spread evenly
        over all ranks."""
        works = self._works(drawn.rows(0, self.bounds), min(one.beside for one in self.buckets))
        even = sum(work.seconds * self.buckets[work.bucket].group_ranks for work in works)
        longest = max((work.seconds for work in works), default=0.0)
        return self.once_seconds + max(even / self.setting.ranks, longest)

    def seconds(self, drawn: DrawnSteps) -> float:
        """Return the seconds of a step, on average over the drawn ones."""
        every = range(len(drawn.steps))
        return fmean(self._step_seconds(drawn.rows(step, self.bounds)) for step in every)

    @cached_property
    def once_seconds(self) -> float:
        """The seconds of what happens once a step: the gradients' reduction and the update or,
        where weights move, the switches and the owners' update."""
        step, hardware = self.setting.step, self.setting.hardware
        if not self.moves:
            return seconds_of(zero_once(self.setting.placed(self.stored)))
        summed = sum(
            _counts(step, one.tensor).trained / one.pipeline for one in self.stored_in_turn
        )
        owned = _counts(step, 1).trained / self.setting.ranks
        moved = SUMMED_BYTES * summed + OWNED_BYTES * owned
        return sum(seconds for _, seconds in self.transfers) + hardware.memory_seconds(moved)

    @cached_property
    def transfers(self) -> list[tuple[float, float]]:
        """For each layout in turn, the bytes that a rank receives when it switches to the layout
        and back, and the seconds that this takes; empty under `switching: in_place`.

        The first and least sharded layout gathers the weights; the later ones use parts of them.
        Each layout sends its float32 gradients to the elements' owners.
        """
        found, setting = [], self.setting
        for number, layout in enumerate(self.stored_in_turn if self.moves else ()):
            placed, step = setting.placed(layout), setting.step
            mine = _counts(step, layout.tensor)
            away = 1 - layout.tensor * layout.pipeline / setting.ranks
            gradients = GRADIENT_BYTES * mine.trained / layout.pipeline
            sent = [placed.sent("gradients", "reduce_scatter", gradients, COPIES)]
            if number == 0:
                weights = step.options.element * mine.every / layout.pipeline
                sent.append(placed.sent("weights", "all_gather", weights, COPIES))
            found.append((away * sum(part.bytes for part in sent), seconds_of(sent)))
        return found

    @property
    def padding_bytes(self) -> float:
        """The bytes of zeros that a rank adds to its gradients because the most sharded layout uses
        only a part of the weights that the rank stores."""
        most = max(one.layout.tensor for one in self.buckets)
        stored, least = (
            _counts(self.setting.step, tensor).trained for tensor in (self.tensor, most)
        )
        return GRADIENT_BYTES * (stored - least)

    def _works(self, rows: Sequence[PackedRow], pass_seconds: float) -> list[RowWork]:
        """Return the work of each row. pass_seconds: what the schedule counts for each pass; if a
        bucket's pass takes longer, the difference counts as the row's own work."""
        found = []
        for row in rows:
            one = self.buckets[row.bucket]
            more = max(0.0, one.beside - pass_seconds)
            seconds = one.row_seconds(row.pairs) + more
            found.append(RowWork(row.bucket, seconds))
        return found

    def _step_seconds(self, rows: Sequence[PackedRow]) -> float:
        at_once = [max(1, int(1 / portion)) for portion in self.portions]
        limits = Limits(at_once, min(one.beside for one in self.buckets))
        works = self._works(rows, limits.pass_seconds)
        sizes = [one.sharing_ranks for one in self.buckets]
        if self.moves:
            return self.once_seconds + sum(
                self._planned([work for work in works if work.bucket == bucket], sizes, limits)
                for bucket in range(len(sizes))
            )
        if self.setting.lockstep:
            limits = replace(limits, lockstep=True, step_seconds=self._zero_seconds(works, sizes))
        return self.once_seconds + self._planned(works, sizes, limits)

    def _planned(self, works: Sequence[RowWork], sizes: Sequence[int], limits: Limits) -> float:
        if not works:
            return 0.0
        first = self.buckets[works[0].bucket]  # all have the same number of stages
        ranks = self.setting.ranks // first.layout.pipeline
        plan = schedule(works, sizes, ranks, limits)
        return makespan(plan, works, sizes, ranks, limits) * first.filling(len(plan))

    def _zero_seconds(self, works: Sequence[RowWork], sizes: Sequence[int]) -> float:
        """Return the seconds that ZeRO adds to a micro-step of average length, if a step has as few
        micro-steps as memory allows."""
        taken = [self.portions[work.bucket] * sizes[work.bucket] for work in works]
        count = max(1.0, sum(taken) / self.setting.ranks)
        even = sum(work.seconds * sizes[work.bucket] for work in works) / self.setting.ranks
        return micro_step_seconds(self.setting.placed(self.stored), even / count)


@dataclass(frozen=True)
class Static:
    """One layout for all rows, which are packed to the longest row's length."""

    setting: Setting
    layout: PricedLayout

    @cached_property
    def alone(self) -> LayoutSet:
        """The set of this layout alone."""
        return LayoutSet(self.setting, (self.layout,), self.layout.layout.tensor)

    def seconds(self, drawn: DrawnSteps) -> float:
        """Return the seconds of a step of as many samples, on average over the drawn ones.

        Rows are packed across steps, so that no row is half empty at a step's end. If the
        micro-batch size is given, a step has as many passes as a run makes with it; otherwise the
        fastest micro-batch size that fits is taken.
        """
        one, alone = self.layout, self.alone
        rows = [one.row_seconds(pairs_of(row)) for row in drawn.pooled]
        most = min(int(alone.memory(one) / one.row_bytes), -(-len(rows) // one.layout.data))
        steps, given = len(drawn.steps), self.setting.rows_at_once
        if given is not None:
            passes = -(-drawn.packed_rows // (given * one.layout.data))
            whole, count = self._passes(rows, given)
            return whole / count * passes * one.filling(passes) + alone.once_seconds
        found = (self._passes(rows, at_once) for at_once in range(1, max(1, most) + 1))
        # With fewer passes than steps, replicas are idle in each.
        least = min(
            whole / steps * max(1.0, steps / count) * one.filling(count / steps)
            for whole, count in found
        )
        return least + alone.once_seconds

    def _passes(self, rows: Sequence[float], at_once: int) -> tuple[float, int]:
        """Return the seconds of all passes at a micro-batch size, and their number. rows: the
        seconds of each, in the order in which they run; at_once: rows of a replica in a pass."""
        one, setting = self.layout, self.setting
        replicas, works = one.layout.data, [RowWork(0, seconds) for seconds in rows]
        plan: list[MicroStep] = []
        for begin in range(0, len(rows), replicas * at_once):
            end = min(begin + replicas * at_once, len(rows))
            groups = []
            for replica, first in enumerate(range(begin, end, at_once)):
                mine = tuple(range(first, min(first + at_once, end)))
                groups.append(RankGroup(replica * one.sharing_ranks, 0, mine))
            plan.append(tuple(groups))
        each = fmean(rows) * at_once
        limits = Limits([at_once], one.beside, 0.0, setting.lockstep)
        if setting.lockstep:
            zero = micro_step_seconds(setting.placed(self.alone.stored), each)
            limits = replace(limits, step_seconds=zero)
        ranks = setting.ranks // one.layout.pipeline
        return makespan(plan, works, [one.sharing_ranks], ranks, limits), len(plan)


def _counts(step: StepShape, tensor: int, stage: StageLayers | None = None) -> ParameterCounts:
    """Return the parameters of a tensor rank. stage: the layers of a rank in a pipeline; None:
    all."""
    return counts_of(step.model, tensor, step.options.trains, stage)

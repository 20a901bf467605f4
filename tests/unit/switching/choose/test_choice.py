"""When several layouts are predicted to beat one, when not, and what memory forbids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import pytest

from tests.support.hardware import H100
from tests.support.shapes import hub
from tests.support.steps import step_of
from uspft.layout import Layout
from uspft.pipeline.schedules import Schedule
from uspft.planner.machine import Hardware
from uspft.planner.step import micro_step_seconds
from uspft.segments import Segments
from uspft.switching.choose.choice import AS_FAST, SwitchingChoice, beside_static, choose
from uspft.switching.choose.drawn_steps import DrawnSteps, lower_bounds, pairs_of
from uspft.switching.choose.layout_set import LayoutSet, Static
from uspft.switching.choose.priced import PricedLayout, Setting, priced_layouts

LLAMA = hub("meta-llama/Llama-3.1-8B")
ROW = 1 << 15
STEP = step_of(LLAMA, ROW, step_rows=8)


def apart(gigabytes: float) -> Hardware:
    """H100s of which each is a host of its own."""
    links = H100.between.model_copy(
        update={
            "bytes_per_second": gigabytes * 1e9,
            "host_bytes_per_second": None,
            "all_to_all": None,
            "point_to_point": None,
        }
    )
    return H100.model_copy(update={"ranks_per_host": 1, "between": links})


@cache
def tail(count: int = 4_000) -> tuple[int, ...]:
    """Lengths of which half are below 700 tokens, and a few fill a row."""
    random, found = Random(0), []
    while len(found) < count:
        length = int(random.lognormvariate(6.5, 1.4))
        if 32 <= length <= ROW:
            found.append(length)
    return tuple(found)


def setting(memory: float = 105e9, speed: float = 5.0, **changes: Any) -> Setting:
    return Setting(STEP.under(**changes), apart(speed), 4, memory)


@cache
def chosen(memory: float = 105e9, speed: float = 5.0, stage: int = 1) -> SwitchingChoice:
    return choose(setting(memory, speed, zero_stage=stage), DrawnSteps(tail(), 512, ROW))


def test_a_long_tail_whose_weights_do_not_fit_whole_is_switched_by_moving() -> None:
    """No rank holds weights, gradients and optimizer of stage 1 whole: one layout splits matrices
    for every row, over slow links; weights that move do so for long rows alone."""
    found = chosen()
    assert found.layouts and found.switches and found.layouts.moves and found.best_static
    assert found.best_static.priced.layout.tensor > 1
    assert found.layouts.buckets[0].layout.tensor == 1 < found.layouts.buckets[-1].layout.tensor
    assert found.best_static.seconds and found.best_static.seconds > 1.2 * found.switching_seconds
    assert found.why.startswith("switching takes") and "s a step, and tensor" in found.why
    assert len(found.layouts.transfers) == len({b.layout.tensor for b in found.layouts.buckets})


def test_memory_forbids_whole_weights_and_with_them_short_rows_on_one_rank() -> None:
    found = chosen(memory=80e9)
    assert all(one.seconds is None for one in found.static if one.priced.layout.tensor == 1)
    assert found.layouts is None or all(b.layout.tensor > 1 for b in found.layouts.buckets)
    none = chosen(memory=20e9)
    assert (
        none.layouts is None and not none.switches and none.why == "no layout's rows fit in memory"
    )


def test_without_a_tail_one_layout_stays() -> None:
    """Samples that fill their rows gain nothing from shorter ones; where all weights fit, rows that
    are packed and split by their documents do as well."""
    found = choose(setting(), DrawnSteps([ROW] * 100, 64, ROW))
    assert not found.switches and found.best_static
    assert f"{found.best_static.priced.name} alone takes" in found.why
    roomy = chosen(memory=400e9)
    assert not roomy.switches and roomy.best_static
    assert (
        roomy.best_static.seconds and roomy.best_static.seconds < AS_FAST * roomy.switching_seconds
    )


def test_where_no_mix_fits_it_is_the_mix_that_is_said_to_lack() -> None:
    found = choose(setting(400e9), DrawnSteps([64] * 8, 2, 64))
    assert found.layouts is None and sum(one.seconds is not None for one in found.static) > 1
    assert found.why.endswith(", and no set of several layouts fits these lengths and the memory")


def test_rows_of_one_sample_are_switched_since_short_rows_have_less_padding() -> None:
    found = choose(setting(400e9), DrawnSteps(tail(), 128, ROW, packing="none"))
    assert found.layouts and found.switches and found.best_static and found.best_static.seconds
    assert found.best_static.seconds > 3 * found.switching_seconds
    drawn = DrawnSteps(tail(), 128, ROW, packing="none")
    again = beside_static(found.layouts, drawn)
    assert (again.switching_seconds, again.best_static) == (
        found.switching_seconds,
        found.best_static,
    )


def test_more_memory_and_faster_links_are_never_slower() -> None:
    def step(found: SwitchingChoice) -> float:
        static = found.best_static
        return min(found.switching_seconds, (static and static.seconds) or float("inf"))

    memory = [step(chosen(memory=size)) for size in (80e9, 105e9, 400e9)]
    assert memory == sorted(memory, reverse=True) and memory[0] > memory[-1]
    assert step(chosen(speed=20.0)) < step(chosen(speed=5.0))


@pytest.mark.parametrize("stage", [1, 3])
def test_one_bucket_takes_what_its_static_layout_takes(stage: int) -> None:
    """All rows alike, as many as replicas take in whole passes."""
    given, drawn = setting(400e9, zero_stage=stage), DrawnSteps([ROW] * 8, 8, ROW)
    for one in priced_layouts(given, ROW, Segments.single(ROW), most=1)[:3]:
        mix = LayoutSet(given, (one,), one.layout.tensor)
        assert mix.seconds(drawn) == pytest.approx(Static(given, one).seconds(drawn), rel=0.02)


def test_a_step_of_a_mix_by_hand() -> None:
    """One long row on four ranks while nothing else is there; ZeRO-3's part once for each pass."""
    given = setting(400e9, zero_stage=3)
    four = next(one for one in layouts(given, ROW) if one.layout.context == 4)
    one = next(one for one in layouts(given, 1024) if one.layout.ranks == one.layout.data)
    mix = LayoutSet(given, (one, four), 1)
    drawn = DrawnSteps([ROW], 1, ROW)
    zero = micro_step_seconds(given.placed(Layout(data=4)))
    row = four.row_seconds(pairs_of([ROW])) + four.beside
    assert mix.seconds(drawn) == pytest.approx(mix.once_seconds + row + zero, rel=1e-3)
    assert mix.transfers == []


def test_stages_wait_for_one_another_and_hold_less() -> None:
    """HotSPa's own example: the longest rows under tensor 2 and two stages, others without."""
    given = replace(setting(400e9), stages=None)
    kinds = Layout(data=4), Layout(2, data=2), Layout(2, pipeline=2)
    whole, split, staged = (
        next(one for one in layouts(given, ROW) if one.layout == kind) for kind in kinds
    )
    assert (staged.sharing_ranks, staged.group_ranks) == (2, 4)
    assert [staged.filling(passes) for passes in (1, 2, 4)] == [2, 1.5, 1.25]
    assert split.filling(1) == 1
    mix = LayoutSet(given, (whole, split, staged), 1, moves=True)
    assert mix.stored_in_turn == [*kinds] and mix.switches
    assert [moved > 0 for moved, _ in mix.transfers] == [True, True, False], "each has its own"
    free = [mix.memory(one) for one in (whole, split, staged)]
    assert free == sorted(free) and free[0] < free[-1]
    uneven = replace(staged.way, schedule=Schedule(sizes=(STEP.model.layers - 1, 1)))
    assert mix.memory(replace(staged, way=uneven)) < free[-1], "the fullest rank has most layers"
    assert not replace(mix, moves=False).holds, "in place ranks keep their layers"
    assert not any(one.layout.pipeline > 1 for one in layouts(setting(400e9), ROW))
    # Eight rows one after another, in a pipeline that fills once.
    drawn, row = DrawnSteps([ROW] * 8, 8, ROW), staged.row_seconds(pairs_of([ROW]))
    given = replace(given, rows_at_once=1)
    alone = LayoutSet(given, (staged,), 2, moves=True)
    taken = 8 * (row + staged.beside) * staged.filling(8)
    assert alone.seconds(drawn) == pytest.approx(alone.once_seconds + taken)
    static = Static(given, staged)
    assert static.alone.fits and static.seconds(drawn) > taken


def layouts(given: Setting, length: int) -> Sequence[PricedLayout]:
    return priced_layouts(given, length, Segments.single(length), most=1)


def test_rows_at_once_are_those_of_a_run_where_it_says_how_many() -> None:
    """Of the longest bucket as many as are said, of shorter ones as many tokens; memory then says
    whether these fit. A bucket's portion by tokens does not depend on memory."""
    given = replace(setting(400e9), rows_at_once=2)
    one = next(each for each in layouts(given, 1024) if each.layout.ranks == each.layout.data)
    four = next(each for each in layouts(given, ROW) if each.layout.context == 4)
    mix = LayoutSet(given, (one, four), 1)
    assert one.row_bytes < four.row_bytes
    assert mix.portions == pytest.approx([one.row_bytes / four.row_bytes / 2, 1 / 2], rel=1e-3)
    assert mix.fits and not replace(mix, setting=replace(given, rows_at_once=2_000)).fits
    assert mix.portions == replace(mix, setting=replace(given, memory_bytes=1e9)).portions
    alone = Static(given, four)
    drawn = DrawnSteps([ROW] * 8, 8, ROW)
    free = Static(setting(400e9), four).seconds(drawn)
    assert alone.seconds(drawn) >= free
    assert alone.seconds(drawn) == pytest.approx(
        4 * (2 * four.row_seconds(pairs_of([ROW])) + four.beside) + mix.once_seconds, rel=1e-3
    )


def test_a_layout_may_stay_the_same_where_rows_are_not_packed() -> None:
    """Rows of a bucket's length have less padding, also under the layout of all others."""
    drawn = DrawnSteps(tail(), 192, ROW, packing="none")
    given = replace(setting(400e9), among=whole)
    found = choose(given, drawn)
    assert found.layouts and found.switches and {b.name for b in found.layouts.buckets} == {"data4"}
    assert choose(given, replace(drawn, packing="best_fit")).layouts is None


def whole(layout: Layout) -> bool:
    return layout.data == layout.ranks


def test_a_checkpoint_keeps_its_kind_of_steps() -> None:
    drawn = DrawnSteps([ROW] * 8, 8, ROW)
    one = choose(setting(400e9), drawn, keeps=True)
    assert one.switches and one.layouts and len(one.layouts.buckets) == 1
    assert not choose(setting(400e9), DrawnSteps(tail(), 128, ROW, "none"), keeps=False).switches


def test_rows_of_packed_samples_are_counted() -> None:
    assert DrawnSteps([ROW // 4] * 10, 8, ROW).packed_rows == 2
    assert DrawnSteps([ROW // 4] * 10, 8, ROW, packing="none").packed_rows == 8
    assert DrawnSteps([64], 2, ROW).packed_rows == 2


def test_lower_bounds_are_halves_down_to_the_median() -> None:
    assert lower_bounds(DrawnSteps([100, 700, 900, 8192], 4, 8192)) == [4096, 2048, 1024]
    assert lower_bounds(DrawnSteps([8192], 4, 8192)) == []
    assert lower_bounds(DrawnSteps([8, 8, 512], 4, 512)) == [256, 128, 64]


def test_a_corpus_packs_each_bucket_by_itself_and_nothing_is_left_out() -> None:
    drawn = DrawnSteps(tail(), 256, ROW)
    assert drawn.steps == DrawnSteps(tail(), 256, ROW).steps and len(drawn.steps) >= 3
    rows = drawn.rows(0, (1024, ROW))
    assert sum(row.pairs for row in rows) == pairs_of(drawn.steps[0])
    short = [length for length in drawn.steps[0] if length <= 1024]
    assert sum(row.pairs for row in rows if row.bucket == 0) == pairs_of(short)
    assert sum(map(pairs_of, drawn.pooled)) == sum(map(pairs_of, drawn.steps))

"""The price of a pipeline by part: its stages, what they wait for, what they send, ZeRO in them."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import accumulate, pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.algorithms import named
from tests.support.hardware import H100, made
from tests.support.shapes import hub, windowed
from tests.support.steps import changed, step_of
from uspft.config.algorithms import WHOLE, row_of
from uspft.layout import Layout
from uspft.pipeline.schedules import PLAIN, Schedule
from uspft.pipeline.stages import Stages, dealt_out
from uspft.planner.attention_step import attention_one_way
from uspft.planner.machine import Hardware
from uspft.planner.options import Options
from uspft.planner.products import met_parameters, step_flops
from uspft.planner.row_time import chunk_prices, forward_and_backward, row_time
from uspft.planner.stages import (
    PipelineCosts,
    cut_by_flops,
    estimated,
    layer_flops,
    links_of,
    message_bytes,
    simulated,
    stage_layers,
    stages_of,
    timeline,
)
from uspft.planner.step import (
    dealt_stages,
    pipeline_costs,
    step_time,
    stored_parts,
)
from uspft.planner.step_shape import DrawnRows, Memo, PlacedStep, StepShape, StepTime
from uspft.planner.trained import EVERYTHING, Trains, counts_of
from uspft.segments import Segments
from uspft.sequence import make_algorithm
from uspft.sequence.chunked import Cut
from uspft.sequence.rows.spans import pairs

LLAMA = hub("meta-llama/Llama-3.1-8B")
TABLE = LLAMA.vocab_size * LLAMA.hidden_size
LAYER = (8_030_261_248 - 2 * TABLE - LLAMA.hidden_size) // 32
ALONE = named("whole", 1, 1)


def step(**changes: Any) -> StepShape:
    return changed(step_of(LLAMA, 1 << 13, step_rows=16), **changes)


def timed(layout: Layout, hardware: Hardware = H100, **changes: Any) -> StepTime:
    shared = named("ulysses_cp", layout.ulysses, 1) if layout.context > 1 else ALONE
    return step_time(PlacedStep(step(**changes), layout, hardware, shared))


def test_layers_are_dealt_out_with_the_head_unless_a_schedule_says_how() -> None:
    def of(schedule: Schedule, *, again: bool = True, tokens: int = 1 << 13) -> tuple[int, ...]:
        options = Options(schedule=schedule, checkpointing=again)
        return stages_of(LLAMA, DrawnRows.whole(tokens), 4, options).sizes

    assert of(PLAIN) == (8, 8, 9, 7) and of(PLAIN, tokens=1 << 20) == (8, 8, 8, 8)
    assert of(PLAIN, again=False) == (8, 9, 9, 6)
    assert of(Schedule(sizes=(10, 10, 10, 2))) == (10, 10, 10, 2)
    assert sum(of(Schedule(virtual=2))) == 32 and len(of(Schedule(virtual=2))) == 8


def test_layers_are_dealt_out_by_the_documents_of_rows() -> None:
    """Of rows of as many tokens, those of short documents have less attention beside the head."""

    def of(*documents: int) -> tuple[int, ...]:
        bounds = (0, *accumulate(documents))
        rows = DrawnRows((Segments(bounds, bounds[-1]),) * 3)
        return stages_of(LLAMA, rows, 4, Options()).sizes

    assert of(1 << 20) == (8, 8, 8, 8) and of(*[1 << 13] * 128) == (8, 8, 9, 7)


DEALT = [
    ("meta-llama/Llama-3.1-8B", 1 << 13, Layout(pipeline=4)),
    ("meta-llama/Llama-3.1-8B", 1 << 17, Layout(ulysses=8, pipeline=4)),
    ("meta-llama/Llama-3.1-70B", 1 << 13, Layout(8, pipeline=8)),
    ("Qwen/Qwen3-8B", 1 << 15, Layout(pipeline=4)),
    ("google/gemma-3-12b-it", 1 << 15, Layout(pipeline=4)),
    ("meta-llama/Llama-3.2-1B", 1 << 13, Layout(pipeline=4)),
]
"""In four of them the last stage has fewer layers, since the head weighs as much."""


@pytest.mark.parametrize(("name", "tokens", "layout"), DEALT)
def test_by_the_price_no_layer_more_or_less_makes_the_dearest_stage_cheaper(
    name: str, tokens: int, layout: Layout
) -> None:
    model = hub(name)
    rows = DrawnRows.whole(tokens)
    dealt = stages_of(model, rows, layout.pipeline, Options()).sizes

    def dearest(sizes: tuple[int, ...]) -> float:
        how = {"schedule": Schedule(sizes=sizes), "use_seq_parallel": layout.tensor > 1}
        shape = step(model=model, row=rows.rows[0], **how)
        shared = named("ulysses_cp", layout.ulysses, 1) if layout.context > 1 else ALONE
        return pipeline_costs(PlacedStep(shape, layout, H100, shared))[0].most

    last = len(dealt) - 1
    moved = [
        tuple(size - (n == one) + (n == other) for n, size in enumerate(dealt))
        for one, other in product(range(last + 1), repeat=2)
        if one != other
    ]
    assert min(map(dearest, moved)) >= dearest(dealt) * (1 - 1e-9)
    alike = dealt_out([1.0] * model.layers, layout.pipeline, 1).sizes  # as if there were no head
    if sorted(alike) != sorted(dealt):
        assert dearest(alike) > 1.01 * dearest(dealt)


def test_stages_take_together_what_the_whole_model_takes() -> None:
    model = windowed(LLAMA, 4096, (False, True) * 16)
    for layout in (Layout(pipeline=4), Layout(2, ulysses=2, pipeline=2)):
        for schedule in (PLAIN, Schedule(virtual=2)):
            shape = step(model=model, schedule=schedule)
            shared = named("ulysses_cp", 2, 1) if layout.context > 1 else ALONE
            costs, most, _ = pipeline_costs(PlacedStep(shape, layout, H100, shared))
            whole = forward_and_backward(PlacedStep(shape, layout, H100, shared))
            seconds = sum(part.seconds - part.hidden for part in whole)
            assert sum(costs.stages) == pytest.approx(seconds)
            assert len(costs.stages) == layout.pipeline * schedule.virtual
            assert sum(p.seconds - p.hidden for p in most) == pytest.approx(costs.most)


@pytest.mark.parametrize("experts", [1, 2])
def test_layers_without_experts_weigh_what_they_are(experts: int) -> None:
    """Of GLM-4.5-Air with an MLP in 20 of 46 layers, beside what is held and the whole's price."""
    model = hub("zai-org/GLM-4.5-Air")
    model = replace(model, raw={**model.raw, "first_k_dense_replace": 20})
    layout = Layout(data=2, pipeline=2, experts=experts)
    shape = step(model=model, schedule=Schedule(sizes=(20, 26)))
    stages = dealt_stages(shape, layout, Memo())
    for place in range(2):
        held, *apart = stored_parts(shape, layout, stages, place)
        mine = counts_of(model, 1, EVERYTHING, stage_layers(stages, place), experts)
        divided = sum(one.every for one in apart)
        assert held.every + divided == mine.every and divided == mine.experts
        assert bool(divided) == (place == 1 < experts)
    costs, *_ = pipeline_costs(PlacedStep(shape, layout, H100, ALONE))
    whole = forward_and_backward(PlacedStep(shape, layout, H100, ALONE))
    assert sum(costs.stages) == pytest.approx(sum(part.seconds - part.hidden for part in whole))
    routed = replace(shape, model=replace(model, raw={**model.raw, "first_k_dense_replace": 0}))
    alike = forward_and_backward(PlacedStep(routed, layout, H100, ALONE))
    some, every = ([p.bytes for p in one if p.name == "experts"] for one in (whole, alike))
    assert some == pytest.approx([26 / 46 * size for size in every]) and bool(some) == (experts > 1)
    flops, head = layer_flops(model, DrawnRows.whole(1 << 13))
    attention = step_flops(0, 1 << 13, (1 << 12) * ((1 << 13) + 1), (46, 96, 128))
    products = 6 * met_parameters(model) * (1 << 13)
    assert sum(flops) + head == pytest.approx(products + attention, rel=1e-6)
    assert flops[19] < 0.95 * flops[20]


def test_parts_name_the_bubble_and_what_stages_send() -> None:
    found, one = timed(Layout(pipeline=4)), timed(Layout())
    work = ("products", "attention", "elementwise")
    assert found.of(*work) == pytest.approx(one.of(*work) / 4, rel=0.1), "by whole layers"
    assert found.of("bubble") == pytest.approx((one.of(*work) - found.of(*work)) / 16)
    assert found.bytes_of("stage_messages") == 2 * 16 * (1 << 13) * 4096 * 2
    named_seconds = found.of(*work, "bubble", "stage_messages", "update")
    assert found.seconds == pytest.approx(named_seconds - found.hidden)
    first, later = (34 + 20 + 34), 26  # DeepSpeed's bytes of a step's passes at stage 1
    held = 9 * LAYER + TABLE
    assert found.of("update") == pytest.approx((first + 15 * later) * held / 3.35e12, rel=0.1)


def test_interleaving_makes_the_bubble_smaller_and_sends_more() -> None:
    plain, twice = (
        timed(Layout(pipeline=4), schedule=schedule) for schedule in (PLAIN, Schedule(virtual=2))
    )
    assert twice.of("bubble") < 0.7 * plain.of("bubble")
    assert twice.bytes_of("stage_messages") == 2 * plain.bytes_of("stage_messages")
    gpipe = timed(Layout(pipeline=4), schedule=Schedule("gpipe"))
    assert gpipe.of("bubble") == plain.of("bubble")


def test_a_schedule_says_nothing_where_all_layers_are_one_stage() -> None:
    for layout in (Layout(), Layout(2, ulysses=2, data=2)):
        assert timed(layout).parts == timed(layout, schedule=Schedule("gpipe", 4)).parts


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_divides_a_stage_over_its_own_ranks(stage: int) -> None:
    """Of eight ranks two have each stage: the group is a quarter, and so is what it moves."""
    held = {"gradients": 4.0, "weights": 2.0}
    passes = {1: (1, 1), 2: (8, 1), 3: (8, 16)}[stage]
    found = timed(
        Layout(data=2, pipeline=4), zero_stage=stage, schedule=Schedule(sizes=(8, 8, 8, 8))
    )
    most = 8 * LAYER + TABLE + LLAMA.hidden_size
    for (name, size), often in zip(held.items(), passes, strict=True):
        # In each pass it is what the rank with most to do moves, once a step the largest.
        assert found.bytes_of(name) == pytest.approx(often * size * most, rel=1e-3), name


def test_of_ranks_with_like_layers_each_stores_what_of_its_own_trains() -> None:
    """The second and third rank have as many layers, of which only the third's train."""
    frozen = r"embed|lm_head|layers\.(\d|1[0-5])\."
    shape = step(trains=Trains(freeze=(frozen,)), schedule=Schedule(sizes=(6, 10, 10, 6)))
    layout = Layout(data=2, pipeline=4)
    placed = PlacedStep(shape, layout, H100, ALONE)
    stages = dealt_stages(shape, layout, Memo())
    every = [stored_parts(shape, layout, stages, place) for place in range(4)]
    assert [parts[0].trained // LAYER for parts in every] == [0, 0, 10, 6]
    assert pipeline_costs(placed)[-1] == every[2]
    assert step_time(placed).bytes_of("gradients") == 4 * every[2][0].trained


def test_zero_3_fetches_nothing_ahead_among_stages() -> None:
    whole = timed(Layout(data=4), zero_stage=3, overlaps=True)
    staged = timed(Layout(data=4, pipeline=2), zero_stage=3, overlaps=True)

    def hidden(time: StepTime, name: str) -> float:
        return sum(part.hidden for part in time.parts if part.name == name)

    assert hidden(whole, "weights") > 0 == hidden(staged, "weights")
    assert hidden(staged, "gradients") > 0


def test_the_copy_of_a_tied_table_has_no_gradient_of_its_own() -> None:
    tied = replace(LLAMA, tied=True)
    sizes = Schedule(sizes=(1, 31))  # the last stage has most to do
    moved = [
        timed(Layout(data=2, pipeline=2), zero_stage=2, schedule=sizes, model=model).bytes_of(
            "gradients"
        )
        for model in (LLAMA, tied)
    ]
    assert moved[0] - moved[1] == pytest.approx(8 * 4 * TABLE)


def test_messages_are_the_tensor_ranks_share_where_they_split_tokens() -> None:
    whole = (1 << 13) * 4096 * 2
    assert message_bytes(PlacedStep(step(), Layout(4, pipeline=2), H100)) == whole
    assert (
        message_bytes(PlacedStep(step(use_seq_parallel=True), Layout(4, pipeline=2), H100))
        == whole / 4
    )
    mesh = Layout(2, ring=2, mesh_rows=2, pipeline=2)
    assert message_bytes(PlacedStep(step(), mesh, H100)) == whole / 4
    assert (
        message_bytes(PlacedStep(step(micro_batch=2), Layout(ulysses=2, pipeline=2), H100)) == whole
    )


def test_links_are_those_inside_a_host_and_between_hosts(tmp_path: Path) -> None:
    """Of 4 ranks a host, stages of one, of two and of eight ranks: a card carries as much for each
    rank of a stage that lies on its host, all at once."""
    hardware, size = made(tmp_path), (1 << 13) * 4096 * 2
    near = 1e-3 + 1e-4 + size / 1e9
    shared = made(
        tmp_path, between={"bytes_per_second": 1e8, "host_bytes_per_second": 1e8}
    ).between.host_bytes_per_second
    assert shared == 1e8

    def links(layout: Layout, cluster: Hardware = hardware) -> list[float]:
        stages = Stages.of_sizes((32 // layout.pipeline,) * layout.pipeline, layout.pipeline)
        return list(links_of(PlacedStep(step(), layout, cluster), stages))

    far = 2e-3 + 2e-4 + size / 1e8
    assert links(Layout(pipeline=8)) == pytest.approx([near] * 3 + [far] + [near] * 3)
    assert links(Layout(data=2, pipeline=4)) == pytest.approx([near, far, near])
    assert links(Layout(data=8, pipeline=2)) == pytest.approx([far])
    cards = made(tmp_path, between={"bytes_per_second": 1e8, "host_bytes_per_second": 1e8})
    one, two, four = (
        max(links(Layout(data=data, pipeline=8 // data), cards)) for data in (1, 2, 4)
    )
    latency = one - size / 1e8
    assert two == pytest.approx(latency + 2 * size / 1e8)
    assert four == pytest.approx(latency + 4 * size / 1e8)
    # Back from the last rank to the first one's next stage.
    stages = Stages.of_sizes((4,) * 8, 4)
    assert links_of(PlacedStep(step(), Layout(data=2, pipeline=4), hardware), stages)[
        3
    ] == pytest.approx(far)


def test_a_schedule_run_action_by_action_is_near_its_closed_form() -> None:
    for layout in (Layout(pipeline=4), Layout(data=2, pipeline=8), Layout(2, pipeline=2)):
        for schedule in (PLAIN, Schedule(virtual=2), Schedule("gpipe")):
            shape = step(schedule=schedule, step_rows=64)
            quick, close = (
                step_time(PlacedStep(shape, layout, H100, ALONE), *how).seconds
                for how in ((), (simulated,))
            )
            assert quick == pytest.approx(close, rel=0.05), (layout, schedule)


SCHEDULES = [Schedule("gpipe"), Schedule(), Schedule(virtual=2), Schedule(virtual=4)]


def alike(ranks: int, virtual: int, link: float = 0.0, forward: float = 0.25) -> PipelineCosts:
    """Ranks that each take a second for a micro-batch."""
    stages = ranks * virtual
    links = (link / virtual,) * (stages - 1)
    return PipelineCosts((1 / virtual,) * stages, links, forward, ranks)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_equal_stages_wait_as_the_papers_say(schedule: Schedule) -> None:
    for ranks, rounds in product((2, 3, 4, 8, 16), (1, 2, 5, 40)):
        costs, many = alike(ranks, schedule.virtual), ranks * rounds
        want = (ranks - 1) / schedule.virtual
        for how in (estimated, simulated):
            assert how(costs, schedule, many).bubble == pytest.approx(want)
            assert how(costs, schedule, many).messages == pytest.approx(0)


def test_of_chunks_one_goes_through_all_ranks_but_the_slowest() -> None:
    for ranks, virtual, chunks, rounds in product((2, 4, 8), (1, 2), (2, 4), (1, 2, 6)):
        costs, schedule = alike(ranks, virtual), Schedule("seqpipe", virtual, chunks=chunks)
        for how in (estimated, simulated):
            found = how(costs, schedule, ranks * rounds)
            assert found.bubble == pytest.approx((ranks - 1) / (virtual * chunks))


def test_few_micro_batches_go_through_every_stage() -> None:
    for ranks, virtual in product((2, 4, 8), (2, 4)):
        for many in range(1, ranks):
            costs, schedule = alike(ranks, virtual), Schedule(virtual=virtual)
            want = ranks + (many - 1) / virtual - many
            assert estimated(costs, schedule, many).bubble == pytest.approx(want)
            assert simulated(costs, schedule, many).bubble == pytest.approx(want)


def test_a_group_that_is_not_full_waits_about_as_long_as_it_does() -> None:
    apart, plain = [0.0], [0.0]
    for ranks, virtual, rounds in product((2, 4, 8), (2, 4), (1, 3)):
        costs, schedule = alike(ranks, virtual), Schedule(virtual=virtual)
        for many in range(ranks * rounds + 1, ranks * (rounds + 1)):
            exact = many + simulated(costs, schedule, many).bubble
            apart.append(abs(many + estimated(costs, schedule, many).bubble - exact) / exact)
            plain.append((many + (ranks - 1) / virtual) / exact)
    assert max(apart) < 0.09
    assert min(one for one in plain if one) < 0.8, "what the formula for full groups would say"


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_1f1b_waits_for_messages_in_every_round_and_others_at_the_ends(schedule: Schedule) -> None:
    link, virtual = 0.02, schedule.virtual
    for ranks, rounds in product((2, 4, 8), (1, 2, 6)):
        costs, many = alike(ranks, virtual, link), ranks * rounds
        hops = 2 * (ranks * virtual - 1) * link / virtual
        if schedule == Schedule():
            hops += 2 * (ranks - 2) * link + (rounds - 1) * 2 * (ranks - 1) * link
        for how in (estimated, simulated):
            assert how(costs, schedule, many).messages == pytest.approx(hops)


def test_a_slow_link_sets_the_pace_wherever_it_is() -> None:
    """Two ranks have two micro-batches among them, which wait for it there and back."""
    for slow in range(3):
        links = tuple(0.1 * (stage == slow) for stage in range(3))
        costs = PipelineCosts((1.0,) * 4, links, 0.25, 4)
        for how in (estimated, simulated):
            few, many = (how(costs, Schedule(), count).messages for count in (16, 56))
            assert many - few == pytest.approx(40 * 0.1, rel=0.02)


def test_a_line_carries_one_message_at_a_time() -> None:
    """A message that takes longer than a stage sets the pace, whatever the schedule."""
    for schedule in SCHEDULES[:2]:
        costs = alike(2, 1, link=3.0)
        found = simulated(costs, schedule, 20)
        assert found.messages + 20 > 60
        assert 20 + sum(estimated(costs, schedule, 20)) == pytest.approx(20 + sum(found), rel=0.15)


def test_no_rank_waits_for_more_than_others_work() -> None:
    for slow in range(4):
        stages = tuple(3.0 if stage == slow else 1.0 for stage in range(4))
        costs = PipelineCosts(stages, (0.0,) * 3, 0.25, 4)
        most = estimated(costs, Schedule(), 12).bubble
        assert most == 3.0 == costs.most
        assert simulated(costs, Schedule(), 12).bubble <= most
    assert simulated(costs, Schedule(), 12).bubble == pytest.approx(most), "of the last rank"


def test_many_micro_batches_are_drawn_out_from_few() -> None:
    stages = (1.0, 1.3, 0.8, 1.1, 0.9, 1.2, 1.0, 1.4)
    for schedule in (Schedule(), Schedule(virtual=2)):
        ranks = 8 // schedule.virtual
        costs = PipelineCosts(stages, (0.05,) * 7, 0.25, ranks)
        for many in (6 * ranks, 9 * ranks + 1, 8 * ranks - 1):
            whole = timeline(costs, schedule, many).end
            drawn = many * costs.most + sum(simulated(costs, schedule, many))
            assert drawn == pytest.approx(whole, rel=0.005), (schedule, many)


def test_nothing_is_waited_for_in_less_than_no_time() -> None:
    """Of stages and links that differ, and chunks in groups that do not fill the ranks."""
    draw, apart = random.Random(3), [0.0]
    for _ in range(200):
        ranks, virtual, chunks = draw.choice((2, 3, 4)), draw.choice((1, 2, 4)), draw.choice((1, 2))
        schedule = Schedule("seqpipe" if chunks > 1 else "1f1b", virtual, chunks=chunks)
        stages = tuple(draw.uniform(0.5, 1.5) for _ in range(ranks * virtual))
        links = tuple(draw.choice((0.0, 0.2)) for _ in stages[1:])
        costs, many = PipelineCosts(stages, links, 0.25, ranks), draw.randint(1, 10 * ranks)
        found = simulated(costs, schedule, many)
        assert min(*found, *estimated(costs, schedule, many)) > -1e-9, (schedule, many)
        exact = timeline(costs, schedule, many).end
        apart.append(abs(many * costs.most + sum(found) - exact) / exact)
    assert max(apart) < 0.02


ROW = 32768
ROWS = {
    "one document": Segments.single(ROW),
    "packed": Segments((0, 5000, 9000, 30000), ROW),
    "long at the end": Segments((0, 100, 200, 6000, ROW), ROW),
    "padding alone": Segments((0,), ROW),
}


def written_out(cut: Cut, row: Segments) -> list[float]:
    """What chunks cost, token by token."""
    first = np.zeros(row.length, int)
    for a, b in row:
        first[a:b] = a
    places = np.arange(row.length)
    cost = np.full(row.length, cut.token)
    inside = places < row.bounds[-1]
    for window, price in cut.pairs:
        seen = places - first + 1
        cost += price * inside * (seen if window is None else np.minimum(seen, window))
    bounds = cut.bounds(row)
    return [float(cost[a:b].sum()) for a, b in pairwise(bounds)]


@pytest.mark.parametrize("name", ROWS)
def test_no_chunk_takes_a_tenth_more_than_the_mean(name: str) -> None:
    row, prices = ROWS[name], ((None, 1e-3), (512, 2e-3))
    for chunks in (1, 2, 3, 4, 8, 16):
        cut = Cut(chunks, 8, 1.0, prices)
        costs, bounds = cut.costs(row), cut.bounds(row)
        assert costs.max() <= 1.01 * costs.mean(), (name, chunks)
        assert costs.tolist() == pytest.approx(written_out(cut, row))
        assert len(bounds) == chunks + 1 and all(b % 8 == 0 for b in bounds)
        tokens = np.diff(Cut(chunks, 8).bounds(row))
        assert tokens.min() >= ROW // chunks // 8 * 8 and tokens.max() <= ROW // chunks + 8


def test_equal_tokens_take_unequal_time() -> None:
    row, prices = ROWS["one document"], ((None, 1e-3), (512, 2e-3))
    before = [n + 1e-3 * pairs(n, None) + 2e-3 * pairs(n, 512) for n in range(0, ROW + 1, ROW // 4)]
    most, mean = np.diff(before).max(), np.diff(before).mean()
    assert most > 1.4 * mean == pytest.approx(1.4 * Cut(4, 8, 1.0, prices).costs(row).mean())


def test_each_chunk_has_a_multiple_at_least() -> None:
    row = Segments.single(64)
    steep = Cut(8, 8, 0.0, ((None, 1.0),))
    assert steep.bounds(row) == tuple(range(0, 65, 8))
    assert Cut(4, 16, 1.0).bounds(row) == (0, 16, 32, 48, 64)


def test_keys_of_earlier_chunks_are_priced_as_often_as_they_come() -> None:
    row, layout = Segments.single(ROW), Layout(ring=4, pipeline=2)
    whole = step_of(LLAMA, ROW, step_rows=8)
    chunks = whole.under(schedule=Schedule("seqpipe", 1, (), 4))
    ring = row_of("ring_cp", 4)
    once, more = (
        {
            part.name: part.bytes
            for part in attention_one_way(PlacedStep(one, layout, H100, make_algorithm(ring, 1, 4)))
        }
        for one in (whole, chunks)
    )
    equal, cut = Cut(4, 8), cut_by_flops(LLAMA, 4, 1)
    assert equal.brought(row, None) == 2.5 < cut.brought(row, None)
    assert more["ring"] / once["ring"] == pytest.approx(cut.brought(row, None))
    # Windows and documents bound what is asked for again.
    assert equal.brought(row, 1025) == 1 + 3 * 1024 / ROW
    assert equal.brought(Segments((0, ROW // 4, ROW), ROW), None) == 1 + 3 / 4


@pytest.mark.parametrize("freeze", [(), ("norm",)])
def test_prices_are_those_of_the_cost_model(freeze: tuple[str, ...]) -> None:
    model = windowed(LLAMA, 1024, (False, True) * 16)
    given = step_of(model, ROW, step_rows=8, trains=Trains(freeze=freeze))
    placed = PlacedStep(given, Layout(pipeline=2), H100, make_algorithm(WHOLE, 1, 1))
    found = chunk_prices(placed)
    whole = row_time(placed, given.row).row
    of_pairs = {w: price * int(pairs(ROW, w)) for w, price in found.pair_seconds}
    assert found.token_seconds * ROW + sum(of_pairs.values()) == pytest.approx(whole, rel=0.02)
    assert of_pairs.keys() == {None, 1024} and of_pairs[None] > 5 * of_pairs[1024] > 0
    cut = Cut(4, 1, *found)
    assert np.diff(cut.bounds(given.row))[0] > 1.3 * np.diff(cut.bounds(given.row))[-1]
    by_flops = cut_by_flops(model, 4, 1)
    assert by_flops.bounds(given.row) == pytest.approx(cut.bounds(given.row), rel=0.1)

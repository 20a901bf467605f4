"""The order of layouts, its ties, and why one loses to the first."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.hardware import H100, made
from tests.support.shapes import hub, windowed
from tests.support.steps import changed, step_of
from uspft.config.algorithms import CONTEXT, WHOLE
from uspft.families import ModelShape
from uspft.layout import Layout
from uspft.pipeline.schedules import Schedule
from uspft.planner import attention_step, rank
from uspft.planner.machine import FIGURES, Hardware, Link, Measurement
from uspft.planner.memory import formula
from uspft.planner.memory.formula import memory_of, memory_of_ranks
from uspft.planner.options import RECOMPUTES, Options
from uspft.planner.rank import Choice, as_long, difference, ranked, ranking, recommend
from uspft.planner.step_shape import DrawnRows, Memo, StepShape
from uspft.planner.trained import Trains
from uspft.planner.ways import Space, Way, every_way, legal_for, ways
from uspft.prepare.examine import examine
from uspft.prepare.left_open import BY_RECIPE, BY_ROWS
from uspft.segments import Segments

LLAMA = hub("meta-llama/Llama-3.1-8B")
STEP = step_of(LLAMA, 1 << 15, step_rows=8)


def test_those_that_fit_stand_first_then_the_fastest() -> None:
    found = ranking(replace(STEP, row=Segments.single(1 << 17)), 8, Space(), H100)
    rooms = [one.room for one in found.layouts]
    assert rooms == sorted(rooms, reverse=True) and {True, False} == set(rooms)
    for room in (True, False):
        seconds = [one.seconds for one in found.layouts if one.room is room]
        assert seconds == sorted(seconds) and len(seconds) > 3
    fastest = min(found.layouts, key=lambda one: one.seconds)
    assert fastest.room is False, "what does not fit may be the fastest"


def test_the_recipes_own_is_marked_and_never_left_out() -> None:
    own = next(way for way in every_way(8, Space()) if way.layout.ulysses == 8)
    space = Space(tensor={8})
    found = ranking(STEP, 8, space, H100, own=own)
    assert [one.way for one in found.layouts if one.own] == [own]
    assert len(found.layouts) == len(ranking(STEP, 8, space, H100).layouts) + 1


def test_a_layout_loses_by_the_parts_that_differ() -> None:
    found = ranking(STEP, 8, Space(), H100)
    first, *others = found.layouts
    for one in others:
        assert sum(one.time.by_part.values()) == pytest.approx(one.seconds)
        if one.room is False:
            assert one.why(first).startswith("does not fit")
    tensor = next(one for one in others if one.name == "tensor8-tokens")
    assert "tensor +" in tensor.why(first)
    assert first.why(first) == ""


def test_ties_are_as_far_apart_as_the_machine_may_err() -> None:
    told = Measurement(date="2026-11-25", versions="torch 2.13", figures=FIGURES)
    measured = H100.model_copy(update={"measured": told})
    orders = [ranking(STEP, 8, Space(), machine) for machine in (H100, measured)]
    wide, close = ({one.name for one in order.layouts if order.is_tie(one)} for order in orders)
    shipped = orders[0]
    seconds = shipped.layouts[0].seconds
    assert close < wide
    for one in shipped.layouts:
        if one.room == shipped.layouts[0].room:
            assert (one.name in wide) == (one.seconds <= 1.12 * seconds)
            assert (one.name in close) == (one.seconds <= 1.05 * seconds)


MODELS = (
    "meta-llama/Llama-3.1-8B",
    "google/gemma-3-12b-it",
    "Qwen/Qwen3-30B-A3B",
    "Qwen/Qwen3.5-9B",
)


def test_no_part_of_any_price_is_negative() -> None:
    draw, parts = random.Random(1), Counter[str]()
    for number in range(16):
        model = hub(MODELS[number % len(MODELS)])
        row = Segments.single(draw.choice((1 << 13, 3 << 13, 1 << 16)))
        ranks, chunks = draw.choice((6, 8, 12, 16)), draw.choice((1, 1, 2, 3))
        space = Space(
            meshes=draw.choice((False, True)),
            stages={draw.choice((1, 2, 3))},
            pipelines=None,
            schedulers={"seqpipe" if chunks > 1 else draw.choice(("1f1b", "gpipe"))},
            chunks=chunks,
            experts=None,
        )
        options = Options(step_rows=draw.choice((5, 24, 70)))
        step = StepShape(model, row, options)
        legal = legal_for(step, H100.ranks_per_host)
        every = ways(ranks, space, legal).legal
        for way in draw.sample(every, min(24, len(every))):
            for closely in (False, True):
                for part in ranked(step, way, H100, closely=closely).time.parts:
                    parts[part.name] += 1
                    assert min(part.seconds, part.bytes) >= -1e-9, (model.model_type, way)
                    assert -1e-9 <= part.hidden <= part.seconds + 1e-9, (model.model_type, way)
    assert len(parts) >= 12 and parts["bubble"] > 100


def test_a_cpu_has_no_card_and_no_peak(tmp_path: Path) -> None:
    (one,) = ranking(STEP, 1, Space(), made(tmp_path)).layouts
    assert one.room is None and one.mfu is None
    assert one.tokens_per_second_per_rank == pytest.approx((8 << 15) / one.seconds)
    (card,) = ranking(STEP, 1, Space(), H100).layouts
    assert card.mfu and 0.2 < card.mfu < 0.8


def test_memory_is_that_of_the_way() -> None:
    ways = list(every_way(8, Space(tensor={1}, stages=(1, 3), rows=(1, 2), context={8})))
    needs = {way: ranked(STEP, way, H100).memory.peak_bytes for way in ways}
    for way in ways:
        if way.stage == 1:
            assert needs[replace(way, stage=3)] < needs[way]
        if way.rows == 1:
            assert needs[way] < needs[replace(way, rows=2)]


def test_a_layout_is_the_fastest_of_its_ways_that_fit_or_what_needs_least() -> None:
    space = Space(tensor={1}, recomputes=RECOMPUTES)
    for tokens in (1 << 12, 1 << 17, 1 << 20):
        step = replace(STEP, row=Segments.single(tokens))
        for one in ranking(step, 8, space, H100).layouts:
            ways = [replace(one.way, recompute=choice) for choice in RECOMPUTES]
            tried = {way.recompute: ranked(step, way, H100) for way in ways}
            if one.layout.ulysses == 1:
                del tried["exchange"]
            able = [other for other in tried.values() if other.room]
            if able:
                assert one.seconds == min(other.seconds for other in able)
            else:
                least = min(other.memory.peak_bytes for other in tried.values())
                assert one.memory.peak_bytes == least


def test_memory_on_a_long_ring_is_drawn_out() -> None:
    for name in ("ring_cp", "allgather_cp", "planned_cp"):
        for ring in (12, 16):
            way = Way(Layout(ring=ring), CONTEXT[name], stage=3)
            found = ranked(STEP, way, H100).memory.parts
            options = way.step(STEP).options
            exact = memory_of(LLAMA, way.layout, STEP.row.length, options=options).parts
            assert found == pytest.approx(exact, rel=0.02), (name, ring)


@dataclass
class Counted:
    """How often something is worked out while layouts are put in order."""

    listed: int = 0
    priced: int = 0
    memory: int = 0
    rings: list[int] = field(default_factory=list)
    """The lengths of the rings that rows are dealt out to."""


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    found = Counted()

    def counting(module: Any, name: str, count: Callable[..., None]) -> None:
        real = getattr(module, name)

        def called(*given: Any, **more: Any) -> Any:
            count(*given)
            return real(*given, **more)

        monkeypatch.setattr(module, name, called)

    counting(rank, "ranked", lambda *_: setattr(found, "listed", found.listed + 1))
    counting(rank.price, "step_time", lambda *_: setattr(found, "priced", found.priced + 1))
    counting(formula, "activations_in", lambda *_: setattr(found, "memory", found.memory + 1))
    counting(attention_step, "_dealt", lambda algorithm, *_: found.rings.append(algorithm.ring))
    for remembers in ("attention_of", "_on_few"):
        getattr(attention_step, remembers).cache_clear()
    return found


def test_where_none_fits_another_value_is_told_by_the_memory_that_it_needs() -> None:
    """Some of them are faster."""
    step = replace(STEP, row=Segments.single(1 << 21))
    space = Space(tensor={1}, context={1}, stages=(1, 2, 3), recomputes=RECOMPUTES)
    found = recommend(step, 8, space, H100, [step.row], asked=[rank.STAGE, rank.RECOMPUTE])
    assert found and "none fits" in found.why and found.way.stage == 3
    first, faster = ranked(step, found.way, H100), set[bool]()
    for key, name in ((rank.STAGE, "stage"), (rank.RECOMPUTE, "recompute")):
        for value, more in re.findall(r"with (\S+) it needs (\S+) ×", found.reasons[key]):
            changed = {name: int(value) if name == "stage" else value}
            other = ranked(step, replace(found.way, **changed), H100)
            assert float(more) > 1
            assert float(more) == pytest.approx(
                other.memory.peak_bytes / first.memory.peak_bytes, rel=1e-3
            )
            faster.add(other.seconds < first.seconds)
    assert faster >= {True}


def test_memory_that_is_written_as_equal_is_not_called_more() -> None:
    """It is told by the time instead."""

    def way(peak_bytes: int, seconds: float) -> Any:
        memory = SimpleNamespace(peak_bytes=peak_bytes)
        return SimpleNamespace(name="one", fits=False, memory=memory, seconds=seconds)

    first = way(100_000, 1.0)
    assert difference(first, 2, way(100_001, 1.5)) == "with 2 a step takes 1.5 × as long"
    assert difference(first, 2, way(101_000, 1.5)) == "with 2 it needs 1.01 × as much memory"


def test_thousands_of_ranks_take_seconds(counted: Counted) -> None:
    """Counted, not timed: no way is priced twice, a row is dealt out to few ranks alone and once an
    algorithm, and memory is worked out of what comes first."""
    wide = changed(STEP, row=Segments.single(1 << 20), step_rows=64)
    found = ranking(wide, 4096, Space(tokens=(True,), recomputes=RECOMPUTES), H100)
    first = found.layouts[:24]
    assert counted.listed > 2 * len(found.layouts) > 400
    assert counted.priced <= counted.listed
    assert len(counted.rings) < 16 and max(counted.rings) <= attention_step.FEW
    assert 24 <= counted.memory < 150
    assert all(one.room for one in first)


STAGED = Space(tensor={1, 8}, tokens=(True,), pipelines=None, recomputes=RECOMPUTES, stages=(1, 3))


def test_pipelines_are_priced_where_they_may_come_first(counted: Counted) -> None:
    wide = changed(STEP, row=Segments.single(1 << 13), step_rows=1024)
    found = ranking(wide, 1024, STAGED, H100)
    assert all(one.room for one in found.layouts[:24])
    assert any(one.layout.pipeline > 1 for one in found.layouts[:24])
    assert 0 < counted.priced < counted.listed / 4


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_least_is_no_more_than_what_a_step_takes(stage: int) -> None:
    space = replace(STAGED, stages=(stage,), virtual=(1, 2), recomputes=("nothing",))
    shares = []
    for schedulers in (("1f1b",), ("gpipe",)):
        for way in every_way(32, replace(space, schedulers=schedulers)):
            if way.layout.pipeline * way.schedule.virtual > LLAMA.layers:
                continue
            for rows in (4, 64):
                step = changed(STEP, step_rows=rows * way.layout.data, dealt=False)
                one = ranked(step, way, H100, closely=False)
                assert one.least_seconds <= one.seconds, way.name
                shares.append(one.least_seconds / one.seconds)
    assert len(shares) > 100 and sum(shares) / len(shares) > 0.6


@pytest.mark.parametrize("tokens", [1 << 13, 1 << 17, 1 << 20])
def test_what_is_not_priced_stands_where_its_price_would(tokens: int) -> None:
    step = changed(STEP, row=Segments.single(tokens), step_rows=32)
    space = replace(STAGED, recomputes=("nothing", "attention"))
    found = ranking(step, 32, space, H100).layouts
    search, best = replace(step, dealt=False), dict[str, list[rank.Ranked]]()
    legal = ways(32, space, legal_for(step, H100.ranks_per_host)).legal
    for way in legal:
        best.setdefault(way.name, []).append(ranked(search, way, H100, closely=False))

    def first(of_name: list[rank.Ranked]) -> rank.Ranked:
        able = [one for one in of_name if one.room]
        if able:
            return min(able, key=lambda one: one.seconds)
        return min(of_name, key=lambda one: one.memory.peak_bytes)

    order = sorted(map(first, best.values()), key=lambda one: (not one.room, one.seconds))
    dealt = rank.SHORTLIST
    assert {one.name for one in found[:dealt]} == {one.name for one in order[:dealt]}
    rest = [(one.room, one.seconds) for one in order[dealt:]]
    assert [(one.room, one.seconds) for one in found[dealt:]] == rest
    assert len(rest) > 40


@pytest.mark.parametrize(
    "given",
    [{}, {"offload_activations": True}, {"use_seq_parallel": True}, {"checkpointing": False}],
)
def test_the_least_is_no_more_than_what_a_rank_needs(given: dict[str, Any]) -> None:
    options = replace(Options(zero_stage=3), **given)
    staged = Layout(data=2, pipeline=4), Layout(2, ring=2, pipeline=2)
    for layout in (Layout(2, 2, 2), Layout(ring=16), Layout(data=8), *staged):
        for tokens in (1 << 12, 1 << 17):
            memo = Memo()
            least = formula.least_bytes(LLAMA, layout, tokens, options, memo)
            whole = memory_of(LLAMA, layout, tokens, options=options, memo=memo)
            assert 0 < least <= whole.peak_bytes + len(whole.parts)


def packed(*lengths: int) -> Segments:
    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    return Segments(tuple(bounds), 1 << 15)


def test_packed_rows_are_dealt_out_for_a_shortlist(counted: Counted) -> None:
    rows = [packed(*(1 << n for n in range(8, 14)), 1 << 13) for _ in range(60)]
    rows += [packed(1 << 14, *[1 << 11] * 8), *[packed(*[1 << 10] * 32)] * 3]
    step = replace(STEP, sample=DrawnRows(tuple(rows)))
    whole, few = ranking(STEP, 8, Space(), H100), ranking(step, 8, Space(), H100)
    every = list(few.layouts)
    assert [one.step.dealt for one in every].count(True) == rank.SHORTLIST
    first = every[: rank.SHORTLIST]
    assert all(one.step.dealt for one in first)
    assert [one.seconds for one in first] == sorted(one.seconds for one in first)
    assert first[0].seconds < whole.layouts[0].seconds, "documents see less than a row"
    assert first[0].seconds == ranked(step, first[0].way, H100).seconds
    assert len(counted.rings) < 64


def test_stages_are_dealt_out_once_by_the_documents_for_time_and_memory() -> None:
    few = Segments(tuple(range(0, (1 << 17) + 1, 1 << 13)), 1 << 17)
    step, way = replace(STEP, row=Segments.single(1 << 17)), Way(Layout(pipeline=4), WHOLE)
    packed_step = replace(step, sample=DrawnRows((few,)))
    whole, short = ranked(step, way, H100), ranked(packed_step, way, H100)
    sizes = [one.step.options.schedule.sizes for one in (whole, short)]
    assert sizes == [(8, 8, 8, 8), (8, 8, 9, 7)]
    for one, each in zip((whole, short), sizes, strict=True):
        assert one.step.options.schedule.sizes == each and one.way.schedule.sizes == ()
        said = replace(way, schedule=Schedule(sizes=each))
        assert ranked(one.step, said, H100).time == one.time
        assert ranked(one.step, said, H100).memory == one.memory
    weights = [
        memory_of_ranks(LLAMA, way.layout, 1 << 17, options=one.step.options)[2].parts["weights"]
        for one in (whole, short)
    ]
    assert weights[1] / weights[0] == pytest.approx(9 / 8), "of the third rank"


def test_the_first_pipelines_are_run_action_by_action() -> None:
    space = Space(pipelines=None, tokens=(True,))
    found = ranking(STEP.under(step_rows=64), 16, space, H100)
    first = [one for one in found.layouts[: rank.SHORTLIST] if one.layout.pipeline > 1]
    others = [one for one in found.layouts if one.layout.pipeline > 1 and not one.closely]
    assert first and all(one.closely for one in first) and others
    for one in first:
        assert one.time == ranked(one.step, one.way, H100, closely=True).time
    keys = [(one.room is False, round(one.seconds, 9)) for one in found.layouts]
    assert keys == sorted(keys)
    one = next(one for one in first if one.room)
    assert {"bubble", "stage_messages"} <= {part.name for part in one.time.parts}
    assert one.time.by_part["bubble"] > 0


def test_memory_of_a_pipeline_is_that_of_the_rank_that_needs_most() -> None:
    for ring in (1, 16):
        for virtual in (1, 2):
            layout = Layout(ring=ring, data=2, pipeline=4)
            way = Way(layout, CONTEXT["ring_cp"], stage=1, schedule=Schedule(virtual=virtual))
            found = ranked(STEP, way, H100).memory
            options = way.step(STEP).options
            every = memory_of_ranks(LLAMA, layout, STEP.row.length, options=options)
            assert len(every) == 4
            most = max(one.peak_bytes for one in every)
            assert found.peak_bytes == pytest.approx(most, rel=1e-9)
            inputs = [one.stage_inputs for one in every]
            assert inputs == sorted(inputs, reverse=True)
            # min(m·v, w + 1), of four micro-batches
            want = {1: [4, 3, 2, 1], 2: [8, 8, 7, 5]}[virtual]
            assert inputs == want


def test_memory_of_a_pipeline_knows_what_layers_its_ranks_have() -> None:
    """Of as many layers others train, have experts, or are checkpointed."""
    glm = hub("zai-org/GLM-4.5-Air")  # of whose layers the first has no experts
    frozen = {"trains": Trains(freeze=(r"embed|lm_head|layers\.(\d|1[0-5])\.",))}
    some = {"first_layers": (8, 8, 0, 8)}
    cases: list[tuple[ModelShape, tuple[int, ...], dict[str, Any]]] = [
        (LLAMA, (6, 10, 10, 6), frozen),
        (glm, (12, 12, 12, 10), {}),
        (LLAMA, (8, 8, 8, 8), some),
    ]
    for model, sizes, more in cases:
        layout, schedule = Layout(data=4, pipeline=4), Schedule("gpipe", sizes=sizes)
        step = step_of(model, 1 << 13, step_rows=16, zero_stage=2, schedule=schedule, **more)
        found = ranked(step, Way(layout, WHOLE, stage=2, schedule=schedule), H100).memory
        every = memory_of_ranks(model, layout, 1 << 13, options=step.options)
        assert found == max(every, key=lambda one: one.peak_bytes)
        assert found.peak_bytes > 1.02 * max(every[0].peak_bytes, every[-1].peak_bytes)


def test_memory_on_a_mesh_is_that_of_the_slices_that_the_step_has() -> None:
    ways = [way for way in every_way(8, Space(tensor={8}, meshes=True)) if way.layout.is_mesh]
    cut = 0
    for way in ways:
        one = ranked(STEP, way, H100)
        options, asked = one.step.options, way.step(STEP).options
        assert options.slices and len(options.slices) == 4
        exact = memory_of(LLAMA, way.layout, STEP.row.length, options=options)
        assert one.memory.peak_bytes == pytest.approx(exact.peak_bytes, rel=1e-6)
        whole = memory_of(LLAMA, way.layout, STEP.row.length, options=asked)
        cut += whole.peak_bytes != exact.peak_bytes
    assert cut > 0


@pytest.mark.parametrize("stage", [1, 3])
def test_memory_of_copies_that_take_turns_is_that_of_the_stage(stage: int) -> None:
    """Below stage 3 they put off the gradients of weights."""
    way = Way(Layout(4, pipeline=2), WHOLE, splits_tokens=True, stage=stage, rows=2)
    one = ranked(STEP.under(copies=2), way, H100)
    options, given = one.step.options, (LLAMA, way.layout, STEP.row.length)
    assert options.copies == 2 and one.memory == memory_of(*given, options=options)


QWEN = hub("Qwen/Qwen2.5-7B")
FULL = [Segments.single(1 << 15)]
SHORT = [Segments(tuple(range(0, 1 << 15, 512)), 1 << 15)]


def chosen(
    ranks: int,
    rows: Sequence[Segments],
    model: ModelShape = LLAMA,
    hardware: Hardware = H100,
) -> Choice:
    step = StepShape(model, rows[0], Options(step_rows=1))
    space = Space(tensor={1}, context={ranks})
    found = recommend(step, ranks, space, hardware, rows)
    assert found and "\n" not in found.why and found.why.startswith(found.way.name)
    return found


def test_no_other_number_of_ranks_divides_experts_that_a_model_lacks() -> None:
    """Of more layouts than are looked at, none of the first has another value of a key."""
    step = step_of(LLAMA, 1 << 15, step_rows=64)
    key, reasons = "parallel_config.expert_parallel", []
    for experts in ({1}, None):
        space = Space(experts=experts, pipelines=None)
        found = recommend(step, 64, space, H100, FULL, asked=[key, "parallel_config.data_parallel"])
        assert found and "× as long" in found.reasons["parallel_config.data_parallel"]
        reasons.append(found.reasons[key])
    assert reasons[0] == "nothing else is possible here" and reasons[1].startswith("none of the")


def test_what_is_as_fast_takes_as_long() -> None:
    assert as_long(2.0, 1.0) == "2 × as long" and as_long(1.00001, 1.0) == "as long"


def long_tailed(seed: int) -> Segments:
    """A row of 64k tokens, its documents as long as source files are: log-normal."""
    draw = random.Random(seed)
    starts, length = [0], 1 << 16
    while (start := starts[-1] + max(16, int(draw.lognormvariate(7.3, 1.4)))) < length:
        starts.append(start)
    return Segments(tuple(starts), length)


def test_short_documents_get_the_planned_exchange() -> None:
    """Their keys stay where they are, while heads would be exchanged whatever documents are."""
    for ranks, model in ((8, LLAMA), (8, QWEN), (16, LLAMA)):
        way = chosen(ranks, SHORT, model).way
        assert (way.row.name, way.layout.ulysses) == ("planned_cp", 1)
    rows = [long_tailed(seed) for seed in range(2)]
    way = chosen(8, rows).way
    assert (way.row.name, way.layout.ulysses) == ("planned_cp", 1)


def test_one_document_on_two_hosts_exchanges_heads_inside_a_host() -> None:
    way = chosen(16, FULL).way
    assert way.layout.ulysses in (2, 4, 8) and way.layout.ring == 16 // way.layout.ulysses


def test_slow_exchanges_of_heads_give_way_to_the_ring() -> None:
    link = Link(bytes_per_second=1e9, by_ranks={"2": 1.5e10, "4": 2.8e9, "8": 1.1e9})
    inside = H100.inside.model_copy(update={"all_to_all": link})
    slow = H100.model_copy(update={"inside": inside})
    assert chosen(8, FULL).way.layout.ulysses == 8
    assert chosen(8, FULL, hardware=slow).way.layout.ulysses < 8


def test_a_window_is_part_of_the_price() -> None:
    near = windowed(LLAMA, 4096, (True,) * 32)
    assert chosen(8, [Segments.single(1 << 17)], near).way.row.name == "planned_cp"


def test_what_fits_is_taken_before_what_is_faster() -> None:
    step = step_of(LLAMA, 1 << 17, step_rows=8)
    found = recommend(step, 8, Space(), H100, [step.row])
    order = ranking(step, 8, Space(), H100).layouts
    assert found and found.way == order[0].way and order[0].room
    assert min(order, key=lambda one: one.seconds).room is False
    small = H100.model_copy(update={"memory": H100.memory.model_copy(update={"bytes": 1e9})})
    none = recommend(step, 8, Space(), small, [step.row])
    assert none and "none fits" in none.why


def test_where_no_way_is_legal_there_is_none() -> None:
    step = step_of(LLAMA, 33, step_rows=1)
    assert recommend(step, 8, Space(tensor={1}, context={8}), H100, [step.row]) is None


def test_rows_count_by_their_mean() -> None:
    step = step_of(LLAMA, 1 << 15, step_rows=1)
    space = Space(tensor={1}, context={8})
    both = recommend(step, 8, space, H100, [*FULL, *SHORT])
    totals = dict.fromkeys((one.way for one in ranking(step, 8, space, H100).layouts), 0.0)
    for row in (*FULL, *SHORT):
        for one in ranking(replace(step, row=row), 8, space, H100).layouts:
            totals[one.way] += one.seconds
    assert both and both.way == min(totals, key=lambda way: totals[way])


def test_a_run_chooses_again_when_it_knows_its_documents(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("x")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model: {name_or_path: meta-llama/Llama-3.2-1B}\n"
        f"data: {{train: {tmp_path / 'x.txt'}, sequence_length: 32k}}\n"
        "parallel_config: {context_parallel: 8, context_parallel_algo: auto}\n"
        "training: {steps: 1, global_batch_size: 1}\n"
        "launch: {device: cpu, processes: 8, hardware: h100}\n"
    )
    before = examine(recipe, [], 1, None)
    assert before.decision and "lengths, not known yet" in before.decision.why
    after = before.knowing(rows=SHORT)
    parallel = after.recipe.parallel_config
    assert (parallel.context_parallel_algo, parallel.ulysses_degree_in_cp) == ("planned_cp", 1)
    assert (after.layout.ulysses, after.layout.ring) == (1, 8)
    assert after.decision and after.decision.why.startswith(f"{BY_ROWS}, planned8 is the fastest ")
    named = examine(recipe, ["parallel_config.context_parallel_algo=ring_cp"], 1, None)
    assert named.knowing(rows=FULL).recipe == named.recipe
    assert named.decision is None, "nothing was left open"


@pytest.mark.parametrize("ranks", [2, 8])
def test_without_the_model_keys_go_where_they_are_used(tmp_path: Path, ranks: int) -> None:
    (tmp_path / "x.txt").write_text("x")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model: {name_or_path: org/nobody}\n"
        f"data: {{train: {tmp_path / 'x.txt'}, sequence_length: 32k}}\n"
        f"parallel_config: {{context_parallel: {ranks}, context_parallel_algo: auto}}\n"
        "training: {steps: 1, global_batch_size: 1}\n"
        f"launch: {{device: cpu, processes: {ranks}}}\n"
    )
    found = examine(recipe, [], 1, None)
    assert found.recipe.parallel_config.context_parallel_algo == "planned_cp"
    assert found.decision and "the model's sizes, not known yet" in found.decision.why
    assert found.decision.why.startswith(BY_RECIPE)

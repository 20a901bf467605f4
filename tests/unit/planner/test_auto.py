"""What `auto` chooses is the first of the planner's order, everywhere, and it says why."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.hardware import H100
from tests.support.shapes import hub
from uspft.families import ModelShape
from uspft.planner.auto import Choice, recommend
from uspft.planner.links import Link
from uspft.planner.machine import Hardware
from uspft.planner.rank import ranking
from uspft.planner.step_shape import StepShape
from uspft.planner.ways import Space
from uspft.prepare.examine import examine
from uspft.prepare.left_open import BY_RECIPE, BY_ROWS
from uspft.segments import Segments

LLAMA, QWEN = hub("meta-llama/Llama-3.1-8B"), hub("Qwen/Qwen2.5-7B")
WHOLE = [Segments.single(1 << 15)]
SHORT = [Segments(tuple(range(0, 1 << 15, 512)), 1 << 15)]


def chosen(
    ranks: int,
    rows: Sequence[Segments],
    model: ModelShape = LLAMA,
    hardware: Hardware = H100,
    window: int | None = None,
) -> Choice:
    step = StepShape(model, rows[0], (window,) * model.layers, step_rows=1)
    space = Space(tensor={1}, context={ranks})
    found = recommend(step, ranks, space, hardware, rows)
    assert found and "\n" not in found.why and found.why.startswith(found.way.name)
    return found


def test_no_other_number_of_ranks_divides_experts_that_a_model_lacks() -> None:
    """Of more layouts than are looked at, none of the first has another value of a key."""
    step = StepShape(LLAMA, WHOLE[0], (None,) * 32, step_rows=64)
    key, reasons = "parallel_config.expert_parallel", []
    for experts in ({1}, None):
        space = Space(experts=experts, pipelines=None)
        found = recommend(
            step, 64, space, H100, WHOLE, asked=[key, "parallel_config.data_parallel"]
        )
        assert found and "with 4 a step takes" in found.reasons["parallel_config.data_parallel"]
        reasons.append(found.reasons[key])
    assert reasons[0] == "nothing else is possible here" and reasons[1].startswith("none of the")


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
    way = chosen(16, WHOLE).way
    assert way.layout.ulysses in (2, 4, 8) and way.layout.ring == 16 // way.layout.ulysses


def test_slow_exchanges_of_heads_give_way_to_the_ring() -> None:
    link = Link(bytes_per_second=1e9, by_ranks={"2": 1.5e10, "4": 2.8e9, "8": 1.1e9})
    inside = H100.inside.model_copy(update={"all_to_all": link})
    slow = H100.model_copy(update={"inside": inside})
    assert chosen(8, WHOLE).way.layout.ulysses == 8
    assert chosen(8, WHOLE, hardware=slow).way.layout.ulysses < 8


def test_a_window_is_part_of_the_price() -> None:
    assert chosen(8, [Segments.single(1 << 17)], window=4096).way.row.name == "planned_cp"


def test_what_fits_is_taken_before_what_is_faster() -> None:
    step = StepShape(LLAMA, Segments.single(1 << 17), (None,) * 32, step_rows=8)
    found = recommend(step, 8, Space(), H100, [step.row])
    order = ranking(step, 8, Space(), H100).layouts
    assert found and found.way == order[0].way and order[0].room
    assert min(order, key=lambda one: one.seconds).room is False
    small = H100.model_copy(update={"memory": H100.memory.model_copy(update={"bytes": 1e9})})
    none = recommend(step, 8, Space(), small, [step.row])
    assert none and "no way fits" in none.why


def test_where_no_way_is_legal_there_is_none() -> None:
    step = StepShape(LLAMA, Segments.single(33), (None,) * 32, step_rows=1)
    assert recommend(step, 8, Space(tensor={1}, context={8}), H100, [step.row]) is None


def test_rows_count_by_their_mean() -> None:
    step = StepShape(LLAMA, WHOLE[0], (None,) * 32, step_rows=1)
    space = Space(tensor={1}, context={8})
    both = recommend(step, 8, space, H100, [*WHOLE, *SHORT])
    totals = dict.fromkeys((one.way for one in ranking(step, 8, space, H100).layouts), 0.0)
    for row in (*WHOLE, *SHORT):
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
    assert after.decision and after.decision.why.startswith(f"{BY_ROWS}, planned8 takes ")
    named = examine(recipe, ["parallel_config.context_parallel_algo=ring_cp"], 1, None)
    assert named.knowing(rows=WHOLE).recipe == named.recipe
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

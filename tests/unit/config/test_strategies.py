"""Strategies of a recipe: what they mean, and every way to write them wrongly."""

from __future__ import annotations

from pathlib import Path

import pytest

from uspft.config import RecipeError, dump, load
from uspft.config.messages import as_written
from uspft.config.recipe import Degrees
from uspft.config.strategies import alike, each_alone, layouts_of, row_lengths, under

BASE = """
model: {name_or_path: x}
data: {train: x, sequence_length: 64}
training: {steps: 1, global_batch_size: 4}
deepspeed: {zero_optimization: {stage: %s}}
parallel_config: {%s}
"""
RING = "{max_length: 64, context_parallel: 4, context_parallel_algo: ring_cp}"
KEY = "parallel_config.strategies"
MESH = "model_parallel: 4, tensor_parallel_algo: meshslice"


def loaded(folder: Path, parallel: str, stage: int | str = 1):  # type: ignore[no-untyped-def]
    file = folder / "r.yaml"
    file.write_text(BASE % (stage, parallel))
    return load(file).recipe


def test_each_strategy_is_a_recipe_of_its_rows(tmp_path: Path) -> None:
    text = f"strategies: [{{max_length: 16}}, {RING.replace('64', '1k')}]"
    recipe = loaded(tmp_path, text)
    assert row_lengths(recipe) == (16, 64)  # no row is longer than sequence_length
    short, long = layouts_of(recipe)
    assert short.parallel_config.context_parallel == 1
    assert short.data.sequence_length == 16
    assert long.parallel_config.context_parallel_algo == "ring_cp"
    assert long == under(recipe, 1)
    assert long.parallel_config.strategies is None
    assert layouts_of(long) == [long]
    same = alike(recipe.parallel_config)
    assert each_alone(same) == [same.model_copy(update={"strategies": None})] * 2
    assert [one.max_length for one in same.strategies] == [16, 1024]  # type: ignore[union-attr]


WRONG = {
    "strategies: []": f"{KEY}: is an empty list; list",
    "strategies: [{context_parallel: 1}]": f"{KEY}[0].max_length: is missing",
    "strategies: [{max_length: 64, zzz: 3}]": f"{KEY}[0].zzz: unknown key",
    "strategies: [{max_length: 16}, {max_length: 8}, {max_length: 64}]": f"{KEY}[1].max_length: "
    "is 8, below 16 of parallel_config.strategies[0]; list the strategies from the shortest",
    "strategies: [{max_length: 16}, {max_length: 16}, {max_length: 64}]": f"{KEY}[1].max_length: "
    "is 16, as of parallel_config.strategies[0]",
    "strategies: [{max_length: 16}, {max_length: 32}]": f"{KEY}[1].max_length: "
    "is 32, and rows may have data.sequence_length: 64 tokens; write 64",
    "strategies: [{max_length: 64}, {max_length: 128}]": f"{KEY}[1].max_length: "
    "is 128, and no row has more than data.sequence_length: 64 tokens",
    f"context_parallel: 2, context_parallel_algo: ring_cp, strategies: [{RING}]": "parallel_config."
    "context_parallel: is 2, and parallel_config.strategies[0], whose rows are the longest, has 4",
    f"strategies: [{RING.replace('ring_cp', 'rring_cp')}]": f"{KEY}[0].context_parallel_algo: "
    "unknown value `rring_cp`; did you mean `ring_cp`?",
    "strategies: [{max_length: 64, context_parallel: 2}]": f"{KEY}[0].context_parallel_algo: "
    "is missing, and context_parallel is 2",
    "strategies: [{max_length: 16, model_parallel: 2}, {max_length: 64, model_parallel: 3}]": KEY
    + "[1].model_parallel: is 3: its parts are not contained in those of",
    f"strategies: [{{max_length: 16, {MESH}, tensor_mesh: [2, 2]}}, "
    "{max_length: 64, model_parallel: 8}]": KEY
    + f"[1].model_parallel: is 8: its parts are not contained in the blocks of {KEY}[0], 4 ways; "
    "write the same tensor_mesh in all, or let one",
    f"strategies: [{{max_length: 16, {MESH}, tensor_mesh: [2, 2]}}, "
    f"{{max_length: 64, {MESH}, tensor_mesh: [4, 1]}}]": KEY
    + f"[1].tensor_mesh: is [4, 1]: its blocks are not contained in those of {KEY}[0], 4 ways",
    f"strategies: [{{max_length: 16, {MESH}}}, {{max_length: 64, {MESH}}}]": KEY
    + "[1].tensor_mesh: is left to be chosen: its blocks are not contained in those of",
    "strategies: [{max_length: 16, model_parallel: 2, use_seq_parallel: true}, "
    f"{{max_length: 64, {MESH}, tensor_mesh: [4, 1]}}]": KEY
    + f"[1].tensor_mesh: is [4, 1]: its blocks are not contained in those of {KEY}[0], 2 ways",
    "strategies: [{max_length: 16, model_parallel: 2}, "
    f"{{max_length: 64, {MESH}, tensor_mesh: [2, 2]}}]": KEY
    + f"[0].use_seq_parallel: is false, and the mesh of {KEY}[1] splits tokens between blocks; "
    "write true, or let one",
    f"switching: move, strategies: [{{max_length: 8}}, {{max_length: 64, {MESH}}}]": KEY
    + "[1].tensor_parallel_algo: is meshslice, whose blocks owners do not gather; write megatron",
    "strategies: [{max_length: 16, model_parallel: 2}, "
    "{max_length: 64, model_parallel: 4, use_seq_parallel: true}]": KEY
    + "[1].use_seq_parallel: is true, and parallel_config.strategies[0] has the other",
    "data_parallel: 2, strategies: auto": "parallel_config.data_parallel: is 2, and "
    f"{KEY}: auto chooses the layouts; leave it out",
    "tensor_parallel_algo: meshslice, strategies: auto": "parallel_config.tensor_parallel_algo: "
    "is meshslice, and",
    "switching: move, strategies: [{max_length: 16, model_parallel: 2}, "
    "{max_length: 64, model_parallel: 2, use_seq_parallel: true}]": KEY
    + "[1].use_seq_parallel: is true, and another strategy with model_parallel 2 has the other",
    "strategies: [{max_length: 16}, {max_length: 64, context_parallel: auto}]": KEY
    + "[1].context_parallel: is auto, and a strategy says its degrees; write a number",
    "switching: in_place": "parallel_config.switching: is in_place, and there are no strategies",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_strategy_is_one_problem_that_names_it(tmp_path: Path, text: str) -> None:
    with pytest.raises(RecipeError) as raised:
        loaded(tmp_path, text)
    lines = [str(problem) for problem in raised.value.problems]
    assert any(f" {WRONG[text]}" in line for line in lines), lines
    assert len(lines) == 1, lines


NESTED = (
    f"{{max_length: 16}}, {{max_length: 64, {MESH}}}",
    f"{{max_length: 16, {MESH}}}, {{max_length: 64}}",
    f"{{max_length: 64, {MESH}}}",
    f"{{max_length: 16, {MESH}, tensor_mesh: [2, 2]}}, "
    f"{{max_length: 64, {MESH}, tensor_mesh: [2, 2], context_parallel: 2}}",
    "{max_length: 16, model_parallel: 2, use_seq_parallel: true}, "
    f"{{max_length: 64, {MESH}, tensor_mesh: [2, 2]}}",
)


@pytest.mark.parametrize("strategies", NESTED)
def test_meshes_whose_blocks_lie_inside_what_ranks_hold_switch(
    strategies: str, tmp_path: Path
) -> None:
    assert len(layouts_of(loaded(tmp_path, f"strategies: [{strategies}]"))) in (1, 2)


def test_one_optimizer_over_all_ranks_needs_zero(tmp_path: Path) -> None:
    with pytest.raises(
        RecipeError, match=r"zero_optimization\.stage: is 0, and layouts that switch"
    ):
        loaded(tmp_path, f"strategies: [{RING}]", 0)


def test_auto_stands_beside_what_it_leaves_open(tmp_path: Path) -> None:
    text = "strategies: auto, context_parallel: auto, context_parallel_algo: auto, "
    text += "ulysses_degree_in_cp: auto, data_parallel: auto, exchange_stages: "
    recipe = loaded(tmp_path, f"{text} null, tensor_parallel_algo: megatron, switching: move")
    assert recipe.parallel_config.strategies == "auto" and layouts_of(recipe) == [recipe]


OTHER = {
    "data_parallel": 2,
    "model_parallel": 2,
    "use_seq_parallel": "true",
    "context_parallel": 2,
    "context_parallel_algo": "ring_cp",
    "ulysses_degree_in_cp": 2,
    "exchange_stages": 2,
    "tensor_parallel_algo": "meshslice",
    "tensor_mesh": "[1, 2]",
    "tensor_slices": 2,
    "pipeline_stage": 2,
    "micro_batch_num": 2,
    "pp_interleave_num": 2,
    "layers_per_stage": "[1, 1]",
    "seq_split_num": 2,
    "fine_grain_interleave": 2,
}
"""Of each degree that is here, another value than its default."""
LISTED = "[{max_length: 16}, {max_length: 64, model_parallel: 4, use_seq_parallel: true, "
LISTED += "context_parallel: 4, context_parallel_algo: planned_cp, ulysses_degree_in_cp: 4}]"


@pytest.mark.parametrize("strategies", ["auto", LISTED])
@pytest.mark.parametrize("key", Degrees.model_fields)
def test_a_degree_written_with_its_default_says_what_leaving_it_out_says(
    tmp_path: Path, key: str, strategies: str
) -> None:
    default = as_written(Degrees.model_fields[key].default)
    alone = loaded(tmp_path, f"strategies: {strategies}")
    assert loaded(tmp_path, f"{key}: {default}, strategies: {strategies}") == alone
    with pytest.raises(RecipeError) as raised:
        loaded(tmp_path, f"{key}: {OTHER[key]}, strategies: {strategies}")
    named = {one.key for one in raised.value.problems}
    if key != "data_parallel" or strategies == "auto":  # which entries leave open, as listed here
        assert f"parallel_config.{key}" in named


def test_each_degree_is_asked() -> None:
    assert {*OTHER} == set(Degrees.model_fields)


def test_one_degree_beside_strategies_asks_for_all_of_the_longest_rows(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"parallel_config.model_parallel: is 1, and") as raised:
        loaded(tmp_path, f"context_parallel: 4, model_parallel: 1, strategies: {LISTED}")
    assert {one.key for one in raised.value.problems} == {
        f"parallel_config.{key}"
        for key in ("model_parallel", "use_seq_parallel", "context_parallel_algo")
    }


def test_a_recipe_that_is_written_keeps_its_strategies(tmp_path: Path) -> None:
    beside = "context_parallel: 4, context_parallel_algo: ring_cp, switching: in_place"
    recipe = loaded(tmp_path, f"{beside}, strategies: [{{max_length: 8}}, {RING}]")
    (tmp_path / "again.yaml").write_text(dump(recipe))
    again = load(tmp_path / "again.yaml").recipe
    assert again.parallel_config.switching == "in_place"
    assert layouts_of(again)[0] == layouts_of(recipe)[0]
    assert row_lengths(again) == (8, 64)


def test_weights_that_move_need_no_zero(tmp_path: Path) -> None:
    text = f"switching: move, strategies: [{{max_length: 8, model_parallel: 3}}, {RING}]"
    loaded(tmp_path, text)
    with pytest.raises(RecipeError, match=r"zero_optimization\.stage: is 3, and with switching"):
        loaded(tmp_path, text, 3)
    with pytest.raises(RecipeError, match=r"\.overlap_comm: is set, and with switching: move"):
        loaded(tmp_path, text, "1, overlap_comm: true")
    staged = text.replace("model_parallel: 3", "pipeline_stage: 2").replace("switching: move, ", "")
    with pytest.raises(RecipeError, match="; write 1, or no pipeline_stage"):
        loaded(tmp_path, staged, 3)  # in place, stages are refused


def test_the_longest_rows_layout_may_stand_beside(tmp_path: Path) -> None:
    beside = "context_parallel: 4, context_parallel_algo: ring_cp"
    recipe = loaded(tmp_path, f"{beside}, strategies: [{{max_length: 8}}, {RING}]")
    assert recipe.parallel_config.context_parallel == 4

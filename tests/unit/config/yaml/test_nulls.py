"""Null on the command line: a key's default, or null where that is a value of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.problems import BASE
from uspft.config import Recipe, RecipeError, load
from uspft.config.messages import choices
from uspft.config.schema import blocks, keys

SET = """\
seed: 7
optimizer: {learning_rate: 1}
data: {packing: none, shuffle: false}
checkpoint: {every_steps: 5}
parallel_config: {exchange_stages: null, use_seq_parallel: false, model_parallel: 4}
deepspeed: {zero_optimization: {stage: 3, reduce_bucket_size: 5, overlap_comm: true}}
model: {overrides: {a: 1}, adapter: {rank: 4, target_modules: [q_proj]}}
"""


def loaded(folder: Path, *words: str) -> Recipe:
    (folder / "base.yaml").write_text(BASE)
    (folder / "r.yaml").write_text(f"base: [base.yaml]\n{SET}")
    return load(folder / "r.yaml", words).recipe


def value_of(recipe: Any, path: str) -> Any:
    for name in path.split("."):
        recipe = recipe[name] if isinstance(recipe, dict) else getattr(recipe, name)
    return recipe


@pytest.mark.parametrize(
    ("path", "before", "after"),
    [
        ("seed", 7, 42),
        ("optimizer.learning_rate", 1.0, 1e-5),
        ("data.packing", "none", "best_fit"),
        ("data.shuffle", False, True),
        ("parallel_config.model_parallel", 4, 1),
        ("deepspeed.zero_optimization.stage", 3, 1),
        ("checkpoint.every_steps", 5, None),
        ("deepspeed.zero_optimization.overlap_comm", True, None),
        ("model.overrides.a", 1, None),
    ],
)
def test_null_is_the_default_or_null_where_that_is_allowed(
    tmp_path: Path, path: str, before: Any, after: Any
) -> None:
    assert value_of(loaded(tmp_path), path) == before
    assert value_of(loaded(tmp_path, f"{path}=null"), path) == after
    assert value_of(loaded(tmp_path, f"{path}=null", f"{path}={before}".lower()), path) == before


def test_a_key_of_deepspeed_and_a_block_are_taken_out(tmp_path: Path) -> None:
    key = "deepspeed.zero_optimization.reduce_bucket_size=null"
    zero = loaded(tmp_path, key).deepspeed.zero_optimization
    assert zero == {"stage": 3, "overlap_comm": True}
    assert loaded(tmp_path, "deepspeed=null").deepspeed.zero_optimization == {"stage": 1}
    assert loaded(tmp_path, "optimizer={learning_rate: null}").optimizer.learning_rate == 1e-5
    assert loaded(tmp_path, "model.adapter=null").model.adapter is None


def test_what_has_no_default_is_missing_and_unknown_keys_stay_unknown(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"r.yaml:4: data.sequence_length: is missing"):
        loaded(tmp_path, "data.sequence_length=null")
    with pytest.raises(RecipeError, match=r"command line: sed: unknown key `sed`"):
        loaded(tmp_path, "sed=null")


def test_null_in_a_file_is_a_value(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("base: [r.yaml]\nseed: null\n")
    loaded(tmp_path)
    with pytest.raises(RecipeError, match=r"own.yaml:2: seed: expected a whole number"):
        load(tmp_path / "own.yaml")


def test_every_key_takes_null_on_the_command_line(tmp_path: Path) -> None:
    taken_out = 0
    default = loaded(tmp_path)
    for at, kind in blocks().items():
        for key in keys(kind, at):
            if "[]" in key.path or key.required or key.path == "base" or at == "model.adapter":
                continue
            word = f"{key.path}=null"
            expected = None if None in choices(key.node) else key.default
            taken_out += None not in choices(key.node)
            if key.path in ("model.name_or_path", "training.steps", "lr_schedule.warmup_ratio"):
                continue  # null there asks for another key
            if key.path == "output_dir":
                expected = default.output_dir
            assert value_of(loaded(tmp_path, word), key.path) == expected, word
    assert taken_out >= 35

"""Configurations as they stand in files: anchors, bases, sections, what cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.support.mindspore import BASE, converted, line_of, with_blocks
from uspft.config.problems import InputError


def test_anchors_numbers_and_none_are_theirs(tmp_path: Path) -> None:
    text = """\
pretrained_model_dir: org/base
load_checkpoint: ''
seed: &seed 7
runner_config: {epochs: 2, batch_size: 1}
optimizer: {type: AdamW, eps: 1.e-8, learning_rate: 1.e-5, weight_decay: 1e-2}
lr_schedule: {type: ConstantWarmUpLR, learning_rate: 5.e-6}
train_dataset: &train_dataset
  seed: *seed
  data_loader: {type: HFDataLoader, path: a.jsonl}
train_dataset_task: {type: CausalLanguageModelDataset, dataset_config: *train_dataset}
model: {model_config: {seq_length: 4096, compute_dtype: bfloat16, extend_method: None}}
"""
    outcome = converted(tmp_path, text)
    assert not outcome.refused, outcome.lines()
    values = outcome.values
    assert values["seed"] == 7 and values["optimizer.eps"] == 1e-8
    assert values["optimizer.learning_rate"] == 5e-6 and values["optimizer.weight_decay"] == 1e-2
    assert "model.rope_scaling" not in values
    assert "not scaled" in line_of(outcome, "model.model_config.extend_method") or (
        "org/base rules" in line_of(outcome, "model.model_config.extend_method")
    )


def test_bases_lie_below_in_their_order(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "first.yaml").write_text(yaml.safe_dump(BASE))
    second = "base_config: deep/first.yaml\nrunner_config: {batch_size: 3}\nseed: 5\n"
    (tmp_path / "second.yaml").write_text(second)
    outcome = converted(tmp_path, "base_config: second.yaml\nseed: 6\n")
    values = outcome.values
    assert (values["seed"], values["training.micro_batch_size"]) == (6, 3)
    assert values["training.epochs"] == 2
    line = line_of(outcome, "runner_config.batch_size")
    assert line.startswith(f"{tmp_path / 'second.yaml'}:2: "), "each file names its own line"


BROKEN = {
    "a cycle of two": "base_config: other.yaml",
    "a base that is a list": "base_config: list.yaml",
    "a section twice": "parallel_config: {data_parallel: 2}\nparallel_config: {data_parallel: 4}",
    "a key twice": "parallel_config: {data_parallel: 2, data_parallel: 4}",
    "an alias that nothing names": "seed: *none",
    "ten thousand deep": "a: " + "{a: " * 10_000,
    "large": "# \n" * (25 << 20),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_configuration_is_a_line(name: str, tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text("base_config: theirs.yaml")
    (tmp_path / "list.yaml").write_text("- 1")
    with pytest.raises(InputError) as told:
        converted(tmp_path, BROKEN[name])
    lines = str(told.value).splitlines()
    assert 0 < len(lines) < 5 and all(line.startswith(str(tmp_path)) for line in lines)
    assert not (tmp_path / "recipe.yaml").exists()


def test_a_scalar_for_a_block_is_a_line(tmp_path: Path) -> None:
    outcome = converted(tmp_path, with_blocks(parallel_config=3))
    assert outcome.refused and line_of(outcome, "parallel_config")

"""The command `convert`: what it writes, prints and returns."""

from __future__ import annotations

from pathlib import Path

import pytest

from uspft.commands.convert import convert
from uspft.config import InputError, load

THEIRS = """\
pretrained_model_dir: org/base
runner_config: {batch_size: 2, epochs: 1}
parallel_config: {data_parallel: 2, context_parallel: 2, context_parallel_algo: ulysses_cp}
train_dataset: {data_loader: {type: MindDataset, dataset_dir: x}}
model: {model_config: {seq_length: 4096, compute_dtype: bfloat16}}
"""


def test_a_recipe_is_written_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs, to = tmp_path / "theirs.yaml", tmp_path / "recipe.yaml"
    theirs.write_text(THEIRS)
    assert convert(theirs, [], "uspft", to=to) == 2
    assert not to.exists()
    assert "add data.train=FILE" in capsys.readouterr().out
    given = ["data.train=rows.jsonl"]
    assert convert(theirs, given, "uspft", to=to) == 0
    said = capsys.readouterr().out
    assert f"next: uspft check {to}" in said
    recipe = load(to).recipe
    assert recipe.training.global_batch_size == 4
    assert recipe.parallel_config.context_parallel_algo == "ulysses_cp"
    assert "# parallel_config.context_parallel_algo: ulysses_cp" in to.read_text()
    with pytest.raises(InputError, match="--force"):
        convert(theirs, given, "uspft", to=to)
    assert convert(theirs, given, "uspft", to=to, ranks=8, force=True) == 0
    assert load(to).recipe.parallel_config.data_parallel == 4
    assert load(to).recipe.training.global_batch_size == 4


def test_what_comes_out_wrong_is_told_with_the_recipe_s_key(tmp_path: Path) -> None:
    theirs, to = tmp_path / "theirs.yaml", tmp_path / "recipe.yaml"
    theirs.write_text(THEIRS)
    with pytest.raises(InputError, match=r"data\.packing: unknown value `tight`") as told:
        words = ["data.train=a", "data.packing=tight"]
        convert(theirs, words, "uspft", to=to)
    assert str(told.value).startswith(f"{to}:")
    assert not to.exists()
    with pytest.raises(InputError, match="is given together with a configuration of MindSpore"):
        convert(theirs, ["data.train"], "uspft", to=to)
    with pytest.raises(InputError, match="write one of mindspore"):
        convert(theirs, [], "uspft", to=to, tool="mindformers")

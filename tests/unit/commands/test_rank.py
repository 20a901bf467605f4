"""The recipe that a run leaves names the kernel that `auto` became on its GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from uspft.commands.rank import leave_recipe
from uspft.config import dump, load
from uspft.config.schema import blocks, keys
from uspft.job import Job
from uspft.prepare.examine import examine

QUICKSTART = Path(__file__).parents[3] / "recipes" / "quickstart.yaml"


def test_only_the_kernel_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = examine(QUICKSTART, [f"output_dir={tmp_path}"], 1, 4).recipe
    update = {
        "model": recipe.model.model_copy(update={"attention": "auto"}),
        "launch": recipe.launch.model_copy(update={"device": "cuda"}),
    }
    recipe = recipe.model_copy(update=update)
    job = Job(recipe, tmp_path, 1, {}, places={"tokenizer": "/only/on/this/host"})
    leave_recipe(job, "flash_attn_3", ["flash_attn_4 refused: ImportError: too old"])
    assert capsys.readouterr().out.splitlines() == [
        "model.attention: flash_attn_4 refused: ImportError: too old; using flash_attn_3",
        "attention kernel: flash_attn_3",
    ]
    before = yaml.safe_load(dump(recipe))
    after = yaml.safe_load((tmp_path / "recipe.yaml").read_text())
    assert before["model"].pop("attention") == "auto"
    assert after["model"].pop("attention") == "flash_attn_3"
    assert after == before


def test_what_is_refused_when_set_is_not_left(tmp_path: Path) -> None:
    recipe = examine(QUICKSTART, [f"output_dir={tmp_path}"], 1, 4).recipe
    text = dump(recipe)
    left = yaml.safe_load(text)
    every = [key for at, kind in blocks().items() for key in keys(kind, at) if key.later]
    later = [key.path for key in every if "[]" not in key.path]
    assert len(later) >= 2
    for key in later:
        block, _, name = key.partition(".")
        assert name not in left[block], key
    (tmp_path / "again.yaml").write_text(text)
    assert load(tmp_path / "again.yaml").recipe == recipe

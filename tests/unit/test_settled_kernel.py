"""The recipe that a run leaves names the kernel that `auto` became on its GPU."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from uspft.commands.examine import examine
from uspft.commands.rank import _settle_attention
from uspft.config import dump

QUICKSTART = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"


def test_only_the_kernel_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = examine(QUICKSTART, [], 1, 4).recipe
    open_model = recipe.model.model_copy(update={"attention": "auto"})
    file = tmp_path / "recipe.yaml"
    file.write_text(dump(recipe.model_copy(update={"model": open_model})))
    before = yaml.safe_load(file.read_text())
    job: Any = SimpleNamespace(recipe=SimpleNamespace(output_dir=tmp_path))
    _settle_attention(job, "flash_attn_3", ["flash_attn_4 refused: ImportError: too old"])
    assert capsys.readouterr().out.splitlines() == [
        "model.attention: flash_attn_4 refused: ImportError: too old; using flash_attn_3",
        "attention kernel: flash_attn_3",
    ]
    after = yaml.safe_load(file.read_text())
    assert before["model"].pop("attention") == "auto"
    assert after["model"].pop("attention") == "flash_attn_3"
    assert after == before

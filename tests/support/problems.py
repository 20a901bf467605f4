"""What is said of a recipe that stands over a good one."""

from __future__ import annotations

from pathlib import Path

import pytest

from uspft.config import RecipeError, load
from uspft.config.recipe import Recipe

BASE = """\
model: {name_or_path: org/name}
data: {train: x.jsonl, sequence_length: 4k}
training: {steps: 3, global_batch_size: 2}
"""


def load_over(folder: Path, text: str, base: str = BASE) -> Recipe:
    """The recipe of `text` over `base`."""
    (folder / "base.yaml").write_text(base)
    (folder / "r.yaml").write_text(f"base: [base.yaml]\n{text}\n")
    return load(folder / "r.yaml").recipe


def lines(folder: Path, text: str, base: str = BASE) -> list[str]:
    """The problems of `text` over a good recipe; its first line is line 2."""
    with pytest.raises(RecipeError) as caught:
        load_over(folder, text, base)
    return [str(p).replace(f"{folder}/", "") for p in caught.value.problems]

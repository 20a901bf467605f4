"""A recipe with trackers, and records handed to them as a run does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from uspft.config import Recipe, load
from uspft.metrics.trackers import tracking


def recipe_of(folder: Path, **logging: Any) -> Recipe:
    """Return a recipe whose output folder, `my-run`, is there."""
    tree = {
        "output_dir": str(folder / "my-run"),
        "model": {"name_or_path": "org/name"},
        "data": {"train": "a.jsonl", "sequence_length": 8},
        "training": {"steps": 3, "global_batch_size": 1},
        "logging": logging,
    }
    (folder / "my-run").mkdir(exist_ok=True)
    (folder / "r.yaml").write_text(yaml.safe_dump(tree))
    return load(folder / "r.yaml").recipe


def track(
    recipe: Recipe, first_step: int, *records: dict[str, Any], error: Exception | None = None
) -> list[str]:
    """Hand records to the recipe's trackers, then raise the error; what is said meanwhile."""
    said: list[str] = []
    assert recipe.output_dir
    with tracking(recipe, recipe.output_dir, first_step, said.append) as log:
        for record in records:
            log(record)
        if error:
            raise error
    return said


def ids_of(recipe: Recipe) -> dict[str, str]:
    """Return the ids that the run has noted, by tracker."""
    assert recipe.output_dir
    return dict(json.loads((recipe.output_dir / "trackers.json").read_text()))

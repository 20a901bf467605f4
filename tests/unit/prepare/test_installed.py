"""A recipe that asks for a tracker that is not installed is told how to get it."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError

import pytest

from uspft.config.recipe import LoggingBlock, Recipe
from uspft.prepare import installed
from uspft.prepare.installed import tracker_findings


def findings(
    monkeypatch: pytest.MonkeyPatch, here: set[str], **logging: object
) -> list[tuple[str, str, str]]:
    def version(package: str) -> str:
        if package not in here:
            raise PackageNotFoundError(package)
        return "1.0"

    monkeypatch.setattr(installed, "version", version)
    recipe = Recipe.model_construct(logging=LoggingBlock.model_validate(logging))
    return [tuple(one) for one in tracker_findings(recipe)]  # type: ignore[misc]


def test_what_is_not_installed_is_told_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    every = {"tensorboard": True, "wandb": {}, "mlflow": {}}
    found = findings(monkeypatch, set(), **every)
    assert [(key, what) for key, what, _ in found] == [
        (f"logging.{name}", f"{name} is not installed") for name in every
    ]
    line = f"run `{sys.executable} -m pip install wandb`, or leave `wandb` out"
    assert found[1][2] == line
    assert findings(monkeypatch, {"tensorboard", "wandb", "mlflow-skinny"}, **every) == []
    assert findings(monkeypatch, set()) == []

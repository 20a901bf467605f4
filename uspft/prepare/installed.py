"""Optional packages: a recipe that asks for one that is not installed is told how to get it."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version

from uspft.config import Finding, Recipe

PACKAGES = {
    "logging.tensorboard": ("tensorboard",),
    "logging.wandb": ("wandb",),
    "logging.mlflow": ("mlflow", "mlflow-skinny"),
}
"""By key the packages of which one must be installed, the first of which is to be recommended."""


def tracker_findings(recipe: Recipe) -> list[Finding]:
    """Return a finding for each tracker that the recipe asks for and that is not installed."""
    asked = recipe.logging
    wanted = {
        "logging.tensorboard": asked.tensorboard,
        "logging.wandb": asked.wandb is not None,
        "logging.mlflow": asked.mlflow is not None,
    }
    return [
        (key, f"{PACKAGES[key][0]} is not installed", _remedy(key))
        for key, is_asked in wanted.items()
        if is_asked and not any(map(_is_installed, PACKAGES[key]))
    ]


def _remedy(key: str) -> str:
    line = f"{sys.executable} -m pip install {PACKAGES[key][0]}"
    return f"run `{line}`, or leave `{key.partition('.')[2]}` out"


def _is_installed(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False

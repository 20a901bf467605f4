"""The settings of experiment trackers that a recipe may write in `logging`."""

from __future__ import annotations

from collections.abc import Mapping

from uspft.config.checks import Check, choice, each, flag, free, text

WANDB: Mapping[str, Check] = {
    **{key: text() for key in ("project", "entity", "name", "group", "job_type", "notes", "id")},
    "tags": each(text(), "a list of strings"),
    "mode": choice("online", "offline", "shared"),
    "dir": text("a folder"),
    "save_code": flag(),
    "settings": free(),
}
"""What uspft hands to wandb.init; how it resumes, and what it notes of a run, uspft says itself."""

MLFLOW: Mapping[str, Check] = {
    **{key: text() for key in ("experiment_name", "run_name", "description", "tracking_uri")},
    "tags": free(),
}
"""What accelerate's tracker takes for a run of MLflow, and where the run is kept."""

"""A recipe that asks for a tracker that could not start is told what to do."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
from packaging.version import Version

from uspft.config.recipe import LoggingBlock, Recipe
from uspft.prepare import trackers
from uspft.prepare.trackers import tracker_findings

Findings = list[tuple[str, str, str]]


def findings(
    monkeypatch: pytest.MonkeyPatch,
    here: set[str],
    environment: dict[str, str] | None = None,
    **logging: object,
) -> Findings:
    def version(package: str) -> str:
        if package not in here:
            raise PackageNotFoundError(package)
        return "3.13.0"

    monkeypatch.setattr(trackers, "version", version)
    monkeypatch.setattr(trackers, "WANDB_SETTINGS", ())
    recipe = Recipe.model_construct(logging=LoggingBlock.model_validate(logging))
    return [tuple(one) for one in tracker_findings(recipe, environment)]  # type: ignore[misc]


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


def test_mlflow_that_refuses_folders_is_given_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(uri: str, **environment: str) -> Findings:
        asked = {"tracking_uri": uri} if uri else {}
        return findings(monkeypatch, {"mlflow"}, environment, mlflow=asked)

    for uri in ("file:///a/mlruns", "./mlruns"):
        ((key, what, remedy),) = told(uri)
        assert key == "logging.mlflow.tracking_uri"
        assert what == f"`{uri}` is a folder of files, which MLflow 3.13.0 refuses"
        assert "sqlite:///FILE" in remedy and "MLFLOW_ALLOW_FILE_STORE=true" in remedy
    for uri in ("", "sqlite:///a.db", "http://a:5000", "databricks", "databricks://profile"):
        assert told(uri) == []
    ((key, _, remedy),) = told("", MLFLOW_TRACKING_URI="file:///a")
    assert key == "logging.mlflow" and "leave MLFLOW_TRACKING_URI out" in remedy
    assert told("file:///a", MLFLOW_ALLOW_FILE_STORE="true") == []
    monkeypatch.setattr(trackers, "NO_FILE_STORE", Version("3.14"))
    assert told("file:///a") == []


def test_weights_and_biases_without_a_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))

    def told(environment: dict[str, str] | None = None, **wandb: object) -> Findings:
        return findings(monkeypatch, {"wandb"}, environment or {}, wandb=wandb)

    ((key, what, remedy),) = told(project="mine")
    assert (key, what) == ("logging.wandb", "Weights & Biases has no API key on this machine")
    assert "wandb login" in remedy and "mode: offline" in remedy
    assert told(mode="offline") == told(settings={"api_key": "0"}) == []
    (tmp_path / ".netrc").write_text("machine example.org login user password 0\n")
    assert len(told()) == 1, "a password for another host"
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password 0\n")
    assert told() == []
    assert len(told({"NETRC": str(tmp_path / "none")})) == 1
    assert told({"NETRC": str(tmp_path / "none"), "WANDB_API_KEY": "0"}) == []

"""What trackers are told: the numbers of metrics.jsonl, in one run however often it goes on."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.tracked import ids_of, recipe_of, track
from uspft.config.problems import RunFailed
from uspft.metrics import trackers
from uspft.metrics.trackers import numbers

RECORD = {
    "step": 3,
    "loss": 1.5,
    "mfu": None,
    "strategy": "ring2",
    "comm_bytes": {"ring": 7},
    "strategies": [{"name": "ring2"}],
    "eval_sets": {"/data/a b (x).jsonl": {"loss": 2.0}, "../up/./b//c.d": {"loss": 3.0}},
    "skipped": True,
}
FLAT = {
    "loss": 1.5,
    "comm_bytes/ring": 7,
    "eval_sets/data/a b _x_.jsonl/loss": 2.0,
    "eval_sets/up/b/c.d/loss": 3.0,
    "skipped": True,
}


def test_the_numbers_of_a_record() -> None:
    assert numbers(RECORD) == FLAT


def test_nothing_is_written_where_no_tracker_is_asked_for(tmp_path: Path) -> None:
    assert track(recipe_of(tmp_path), 0, RECORD) == []
    assert list((tmp_path / "my-run").iterdir()) == []


def test_tensorboard_hides_what_was_lost(tmp_path: Path) -> None:
    recipe = recipe_of(tmp_path, tensorboard=True)
    track(recipe, 0, *({"step": step, "loss": 1.0} for step in (1, 2, 3)), {"data": {"read": 1}})
    track(recipe, 1, {"resumed_from_step": 1}, {"step": 2, "loss": 2.0})
    shown = EventAccumulator(str(tmp_path / "my-run/events"))
    shown.Reload()
    assert shown.Tags()["scalars"] == ["loss"]
    assert [(e.step, e.value) for e in shown.Scalars("loss")] == [(1, 1.0), (2, 2.0)]


class Broken:
    """A tracker whose service goes away after one record."""

    def __init__(self) -> None:
        self.got: list[dict[str, float]] = []
        self.tracker = SimpleNamespace(id="id")

    def log(self, values: dict[str, float], step: int) -> None:
        if self.got:
            raise ConnectionError("gone")
        self.got.append(values)

    def finish(self) -> None:
        raise AssertionError("it was left alone")


def test_a_tracker_that_fails_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = Broken()
    monkeypatch.setattr(trackers, "start_wandb", lambda *given: broken)
    recipe = recipe_of(tmp_path, wandb={}, tensorboard=True)
    said = track(recipe, 0, *({"step": step, "loss": 1.0} for step in (1, 2, 3)))
    assert said == ["logging.wandb: gone; no more goes there, metrics.jsonl has it all"]
    assert broken.got == [{"loss": 1.0}]
    shown = EventAccumulator(str(tmp_path / "my-run/events"))
    shown.Reload()
    assert len(shown.Scalars("loss")) == 3, "the others go on"


def test_a_tracker_that_does_not_start_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: Any) -> None:
        raise ConnectionError("no such host")

    monkeypatch.setattr(trackers, "start_mlflow", refuse)
    with pytest.raises(
        RunFailed, match=r"logging\.mlflow: cannot be started: no such host; .* out"
    ):
        track(recipe_of(tmp_path, mlflow={"tracking_uri": "http://a"}), 0)


def test_what_was_started_before_one_that_does_not_start_is_noted_and_ends_as_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends: list[dict[str, int]] = []
    run = SimpleNamespace(id="id", finish=lambda **how: ends.append(how))

    def start(recipe: Any, output: Path, runs: dict[str, str]) -> SimpleNamespace:
        runs["wandb"] = run.id
        return SimpleNamespace(tracker=run)

    def refuse(*given: Any) -> None:
        raise ConnectionError("no such host")

    monkeypatch.setattr(trackers, "start_wandb", start)
    monkeypatch.setattr(trackers, "start_mlflow", refuse)
    recipe = recipe_of(tmp_path, wandb={}, mlflow={"tracking_uri": "http://a"})
    with pytest.raises(RunFailed, match=r"logging\.mlflow: cannot be started: no such host"):
        track(recipe, 0)
    assert ids_of(recipe) == {"wandb": "id"} and ends == [{"exit_code": 1}]
    monkeypatch.setattr(trackers, "start_wandb", refuse)
    with pytest.raises(
        RunFailed, match=r"no such host; run `wandb login` .* `mode: offline` there"
    ):
        track(recipe, 0)


def test_weights_and_biases_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="Weights & Biases is not installed")
    monkeypatch.setitem(os.environ, "WANDB_SILENT", "true")
    recipe = recipe_of(tmp_path, wandb={"mode": "offline", "project": "mine"})
    track(recipe, 0, RECORD)
    made = ids_of(recipe)["wandb"]
    track(recipe, 3, {"step": 4, "loss": 1.0})
    assert ids_of(recipe) == {"wandb": made}
    written = sorted((tmp_path / "my-run/wandb").glob(f"offline-run-*-{made}"))
    assert len(written) >= 1
    parts = [file.read_bytes() for folder in written for file in folder.glob("*.wandb")]
    for name in FLAT:
        assert any(name.encode() in part for part in parts), name


def test_mlflow_in_a_file(tmp_path: Path) -> None:
    pytest.importorskip("sqlalchemy", reason="MLflow is not installed, or without its database")
    mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed")
    uri = f"sqlite:///{tmp_path}/runs.db"
    recipe = recipe_of(tmp_path, mlflow={"tracking_uri": uri, "experiment_name": "mine"})
    track(recipe, 0, RECORD)
    track(recipe, 3, {"step": 4, "loss": 1.0})
    made = ids_of(recipe)["mlflow"]
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert run.info.run_id == made and run.info.run_name == "my-run"
    assert run.data.params["training.steps"] == "3"
    assert set(run.data.metrics) == set(FLAT)
    points = [(one.step, one.value) for one in client.get_metric_history(made, "loss")]
    assert points == [(3, 1.5), (4, 1.0)]
    mlflow.set_tracking_uri(None)

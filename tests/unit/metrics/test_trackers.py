"""What trackers are told: the numbers of metrics.jsonl, in one run however often it goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.mlflow_stand_in import stand_in
from uspft.config import Recipe, load
from uspft.config.problems import Interrupted, RunFailed
from uspft.metrics import trackers
from uspft.metrics.trackers import GOES_ON_FROM, hurried, kept_at, kept_in, numbers, shown, tracking


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


RETRIES = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"


@pytest.fixture(params=["stand-in", "itself"])
def mlflow(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "")
    if request.param == "stand-in":
        found: Any = stand_in(monkeypatch)
    else:
        pytest.importorskip("sqlalchemy", reason="MLflow is not installed, or has no database")
        found = pytest.importorskip("mlflow", reason="MLflow is not installed")
    yield found
    found.set_tracking_uri(None)


def steps(*numbers: int) -> list[dict[str, Any]]:
    return [{"step": number, "loss": float(number)} for number in numbers]


def client_of(mlflow: Any, recipe: Recipe) -> Any:
    assert recipe.output_dir
    return mlflow.MlflowClient(kept_in(recipe.output_dir))


def test_without_a_place_runs_are_kept_in_the_output_folder(
    tmp_path: Path, mlflow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a 50% b").mkdir()
    recipe = recipe_of(tmp_path / "a 50% b", mlflow={})
    monkeypatch.chdir(tmp_path)
    track(recipe, 0, *steps(1))
    assert [entry.name for entry in tmp_path.iterdir()] == ["a 50% b"]
    mlflow.set_tracking_uri(None)  # as in a new process
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert track(recipe, 1, *steps(2)) == [], "it goes on from any folder"
    run = client_of(mlflow, recipe).get_run(ids_of(recipe)["mlflow"])
    assert run.info.run_name == "my-run" and run.data.params["training.steps"] == "3"
    assert (tmp_path / "a 50% b/my-run/mlflow").is_dir()


def test_the_recipe_and_then_the_environment_name_the_place(
    tmp_path: Path, mlflow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = recipe_of(tmp_path, mlflow={"tracking_uri": "http://here"})
    none = recipe_of(tmp_path, mlflow={})
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://there")
    assert [kept_at(one, tmp_path) for one in (here, none)] == ["http://here", "http://there"]
    assert kept_in(Path("/a 5% b?/%20")) == "sqlite:////a 5% b%3F/%2520/mlflow/mlflow.db"
    assert shown("http://me:secret@there:5000/a") == "there:5000"
    assert shown("mssql:///?password=secret") == "mssql:///"


def test_a_run_that_is_gone_has_a_new_one_in_its_place(tmp_path: Path, mlflow: Any) -> None:
    recipe = recipe_of(tmp_path, mlflow={})
    (tmp_path / "my-run/trackers.json").write_text('{"mlflow": "0123456789abcdef"}')
    (line,) = track(recipe, 2, *steps(3))
    made = ids_of(recipe)["mlflow"]
    begins = "logging.mlflow: run 0123456789abcdef is not there; this goes on in a new run, "
    assert line == begins + made
    client = client_of(mlflow, recipe)
    assert client.get_run(made).data.params["training.steps"] == "3"
    client.delete_run(made)
    (line,) = track(recipe, 3)
    assert f"run {made} is deleted; " in line


def test_a_step_that_runs_again_has_one_point(tmp_path: Path, mlflow: Any) -> None:
    recipe = recipe_of(tmp_path, mlflow={})
    track(recipe, 0, *steps(1, 2, 3))
    killed, client = ids_of(recipe)["mlflow"], client_of(mlflow, recipe)
    client.set_terminated(killed, "RUNNING")
    (line,) = track(recipe, 1, *steps(2, 3))
    made = ids_of(recipe)["mlflow"]
    assert f"run {killed} has points up to step 3, and MLflow takes none back; " in line
    for run, expected in ((killed, [1, 2, 3]), (made, [2, 3])):
        assert [point.step for point in client.get_metric_history(run, "loss")] == expected
    assert client.get_run(killed).info.status == "KILLED"
    assert client.get_run(made).data.tags[GOES_ON_FROM] == killed
    assert track(recipe, 3, *steps(4)) == [], "nothing is repeated, and the run goes on"
    assert ids_of(recipe) == {"mlflow": made}


@pytest.mark.parametrize(
    ("error", "status"),
    [(None, "FINISHED"), (Interrupted("asked"), "KILLED"), (RunFailed("no"), "FAILED")],
)
def test_a_run_ends_as_what_it_was(
    tmp_path: Path, mlflow: Any, error: Exception | None, status: str
) -> None:
    recipe = recipe_of(tmp_path, mlflow={})
    try:
        track(recipe, 0, *steps(1), error=error)
    except (Interrupted, RunFailed) as raised:
        assert raised is error
    assert client_of(mlflow, recipe).get_run(ids_of(recipe)["mlflow"]).info.status == status


def test_a_server_is_waited_for_by_name_and_given_up_in_seconds(
    tmp_path: Path, mlflow: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(RETRIES, raising=False)
    seen: list[str | None] = []

    def refuse(*given: Any) -> None:
        with hurried():
            seen.append(os.environ.get(RETRIES))
        seen.append(os.environ.get(RETRIES))
        raise ConnectionError("refused")

    @contextmanager
    def waits(what: str) -> Iterator[None]:
        seen.append(what)
        yield

    monkeypatch.setattr(trackers, "start_mlflow", refuse)
    recipe = recipe_of(tmp_path, mlflow={"tracking_uri": "http://127.0.0.1:9"})
    with (
        pytest.raises(RunFailed, match="refused; see that it can be reached"),
        trackers.tracking(recipe, tmp_path, 0, seen.append, waits),
    ):
        pass
    assert seen == ["MLflow at 127.0.0.1:9", "2", None]
    monkeypatch.setenv(RETRIES, "9")
    with hurried():
        assert os.environ[RETRIES] == "9"
    assert os.environ[RETRIES] == "9"

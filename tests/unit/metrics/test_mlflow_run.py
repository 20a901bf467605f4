"""Where MLflow's runs are kept, in which run a training goes on, and what it ends as.

Each test runs with a stand-in for MLflow, and with MLflow itself where that is installed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.mlflow_stand_in import stand_in
from tests.support.tracked import ids_of, recipe_of, track
from uspft.config import Recipe
from uspft.config.problems import Interrupted, RunFailed
from uspft.metrics import trackers
from uspft.metrics.mlflow_run import GOES_ON_FROM, hurried, kept_at, kept_in, shown

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

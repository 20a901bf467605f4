"""A stand-in for MLflow, with what accelerate's tracker and uspft ask of it, kept in memory."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

VARIABLES = ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT")


class MlflowError(Exception):
    """Its `error_code` is one of MLflow's words."""

    def __init__(self, error_code: str) -> None:
        super().__init__(error_code)
        self.error_code = error_code


class Variable:
    """A variable of the environment, as MLflow has them."""

    def __init__(self, name: str) -> None:
        self.name = name

    def is_set(self) -> bool:
        return self.name in os.environ

    def set(self, value: str) -> None:
        os.environ[self.name] = value

    def unset(self) -> None:
        del os.environ[self.name]


class Store(ModuleType):
    """The module `mlflow`: runs by the URI at which they are kept, and by id."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.__spec__ = ModuleSpec("mlflow", None)  # accelerate looks at it
        self.kept: dict[str, dict[str, Any]] = defaultdict(dict)
        self.environment_variables = SimpleNamespace(**{name: Variable(name) for name in VARIABLES})
        self.uri, self.active = "", SimpleNamespace()
        self.utils = SimpleNamespace(
            validation=SimpleNamespace(MAX_PARAM_VAL_LENGTH=6000, MAX_PARAMS_TAGS_PER_BATCH=100)
        )

    def set_tracking_uri(self, uri: str | None) -> None:
        self.uri = uri or ""

    def get_tracking_uri(self) -> str:
        return self.uri or os.environ["MLFLOW_TRACKING_URI"]

    def is_tracking_uri_set(self) -> bool:
        return bool(self.uri or os.environ.get("MLFLOW_TRACKING_URI"))

    def MlflowClient(self, uri: str | None = None) -> Client:
        return Client(self.kept[self.uri if uri is None else uri])

    def search_experiments(self, filter_string: str) -> list[Any]:
        return [SimpleNamespace(experiment_id="1")]

    def start_run(self, run_id: str | None, run_name: str, **rest: Any) -> Any:
        runs = self.kept[self.uri]
        if run_id is None:
            run_id = f"{len(runs):032x}"
            info = SimpleNamespace(run_id=run_id, run_name=run_name, lifecycle_stage="active")
            data = SimpleNamespace(params={}, tags={}, metrics={})
            runs[run_id] = SimpleNamespace(info=info, data=data, points=defaultdict(list))
        self.active = runs[run_id]
        self.active.info.status = "RUNNING"
        return self.active

    def log_params(self, params: dict[str, Any]) -> None:
        self.active.data.params.update({name: str(value) for name, value in params.items()})

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.active.data.metrics.update(metrics)
        for name, value in metrics.items():
            self.active.points[name].append(SimpleNamespace(step=step, value=value))

    def set_tag(self, name: str, value: str) -> None:
        self.active.data.tags[name] = value

    def end_run(self, status: str = "FINISHED") -> None:
        self.active.info.status = status


class Client:
    """What asks a store about runs by their ids."""

    def __init__(self, runs: dict[str, Any]) -> None:
        self._runs = runs

    def get_run(self, run_id: str) -> Any:
        if run_id not in self._runs:
            raise MlflowError("RESOURCE_DOES_NOT_EXIST")
        return self._runs[run_id]

    def get_metric_history(self, run_id: str, name: str) -> list[Any]:
        return list(self._runs[run_id].points[name])

    def set_terminated(self, run_id: str, status: str) -> None:
        self._runs[run_id].info.status = status

    def delete_run(self, run_id: str) -> None:
        self._runs[run_id].info.lifecycle_stage = "deleted"


def stand_in(monkeypatch: pytest.MonkeyPatch) -> Store:
    """Let `import mlflow` give a stand-in until the test is over."""
    store = Store()
    errors = ModuleType("mlflow.exceptions")
    errors.MlflowException = MlflowError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", store)
    monkeypatch.setitem(sys.modules, "mlflow.exceptions", errors)
    return store

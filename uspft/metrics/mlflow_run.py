"""A run of MLflow: where it is kept, whether a training goes on in it, and how it ends."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

if TYPE_CHECKING:
    from uspft.config import Recipe

MLFLOW = "mlflow"
"""The folder of MLflow's database, where nothing says that runs are kept elsewhere."""
GOES_ON_FROM = "uspft.goes_on_from"
"""The tag of a run that was begun in the place of another, whose id it holds."""
_AT_START = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "30"}
_OF_RECORDS = ("loss", "eval_loss")  # of which every record of a step or an evaluation has one
# What would begin a query in a URI, or stand for another character.
_NOT_IN_URI = re.compile(r"\?|%(?=[0-9A-Fa-f]{2})")


def kept_at(recipe: Recipe, output: Path) -> str:
    """Return the URI of the place where a recipe's runs are kept."""
    if asked := (recipe.logging.mlflow or {}).get("tracking_uri"):
        return str(asked)
    import mlflow

    # What the environment names has been read by MLflow itself.
    return mlflow.get_tracking_uri() if mlflow.is_tracking_uri_set() else kept_in(output)


def kept_in(output: Path) -> str:
    """Return the URI of a database in the output folder."""
    file = str((output / MLFLOW / "mlflow.db").absolute())
    return "sqlite:///" + _NOT_IN_URI.sub(lambda found: quote(found[0]), file)


def shown(uri: str) -> str:
    """Return what a person is told of a URI: the host where it names one, and no password."""
    return urlsplit(uri).netloc.rpartition("@")[2] or uri.partition("?")[0]


@contextmanager
def hurried() -> Iterator[None]:
    """Let MLflow give a server up in seconds inside the `with` block, not in minutes.

    What the environment says of retries and waits stands.
    """
    from mlflow import environment_variables

    ours = {getattr(environment_variables, name): value for name, value in _AT_START.items()}
    ours = {variable: value for variable, value in ours.items() if not variable.is_set()}
    for variable, value in ours.items():
        variable.set(value)
    try:
        yield
    finally:
        for variable in ours:
            variable.unset()


def why_not(run_id: str, first_step: int) -> str | None:
    """Return why a training cannot go on after `first_step` in a run, or None where it can.

    MLflow takes no point back: a step that runs again would have two there.
    """
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    client = MlflowClient()
    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return f"run {run_id} is not there"
    if run.info.lifecycle_stage == "deleted":
        return f"run {run_id} is deleted"
    names = [name for name in _OF_RECORDS if name in run.data.metrics]
    points = (point for name in names for point in client.get_metric_history(run_id, name))
    last = max((point.step for point in points), default=first_step)
    if last <= first_step:
        return None
    if run.info.status == "RUNNING":  # it was killed
        client.set_terminated(run_id, "KILLED")
    return f"run {run_id} has points up to step {last}, and MLflow takes none back"

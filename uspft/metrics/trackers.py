"""The experiment trackers of a recipe, through accelerate; all get the same numbers.

Names are those of metrics.jsonl, with `/` for nested fields, such as `comm_bytes/ring`. One rank
alone creates and feeds them.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from uspft.config import as_tree, dump
from uspft.config.problems import Interrupted, RunFailed, said
from uspft.durable import write_text

if TYPE_CHECKING:
    from uspft.config import Recipe


EVENTS, RUNS = "events", "trackers.json"
"""The folder of TensorBoard's files, and the file with the ids of the other trackers' runs."""
WANDB = "wandb"
"""The folder in which Weights & Biases stores a run before it is uploaded."""
PROJECT = "uspft"
"""The default project, or experiment, of a run."""
_UNFIT = re.compile(r"[^\w. /-]+")
_NAMES = {"tensorboard": "TensorBoard", "wandb": "Weights & Biases", "mlflow": "MLflow"}
_REACHED = "see that it can be reached from here"
_REMEDIES = {
    "tensorboard": f"see that {EVENTS}/ in output_dir can be written",
    "wandb": f"run `wandb login` or set WANDB_API_KEY, {_REACHED}, or write `mode: offline` there",
    "mlflow": _REACHED,
}
"""The remedy when a tracker fails to start, by its key."""
FINISHED, KILLED, FAILED = "FINISHED", "KILLED", "FAILED"
"""MLflow's statuses of a run that ended by itself, was asked to stop, or failed."""
Say = Callable[[str], None]
Waits = Callable[[str], AbstractContextManager[None]]


@contextmanager
def tracking(
    recipe: Recipe,
    output: Path,
    first_step: int,
    say: Say,
    waits: Waits = lambda what: nullcontext(),
) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Yield a function that hands a record of metrics.jsonl to every tracker of the recipe.

    first_step: the step from which the run resumes, and the trackers' runs with it; 0: a new run.
    waits: returns a `with` block that shows that a tracker is being waited for. A tracker that
    fails later is reported once and then ignored, since metrics.jsonl has every number. Raises
    RunFailed if one cannot be started.
    """
    runs = _runs(output)
    makers: dict[str, Callable[[], Any]] = {
        "tensorboard": lambda: _tensorboard(recipe, output, first_step),
        "wandb": lambda: start_wandb(recipe, output, runs),
        "mlflow": lambda: start_mlflow(recipe, output, runs, first_step, say),
    }
    asked = [key for key in makers if getattr(recipe.logging, key) not in (None, False)]
    started, ending = dict[str, Any](), FAILED

    def log(record: Mapping[str, Any]) -> None:
        values = numbers(record)
        for key, tracker in list(started.items()):
            if not (values and "step" in record):
                continue
            try:
                tracker.log(values, step=record["step"])
            except Exception as error:  # each service raises its own kinds
                del started[key]
                say(f"logging.{key}: {said(error)}; no more goes there, metrics.jsonl has it all")

    if asked:
        _prepare_accelerate()
    try:
        for key in asked:
            try:
                at = f" at {shown(kept_at(recipe, output))}" if key == "mlflow" else ""
                with waits(_NAMES[key] + at):
                    started[key] = makers[key]()
            except Exception as error:
                told = f"cannot be started: {said(error)}; {_REMEDIES[key]}"
                raise RunFailed(f"logging.{key}: {told}; or leave logging.{key} out") from error
            finally:  # so that the next start continues in the same runs
                if runs:
                    write_text(output / RUNS, json.dumps(runs) + "\n")
        yield log
        ending = FINISHED
    except Interrupted:
        ending = KILLED
        raise
    finally:
        for key, tracker in started.items():
            try:
                _end(key, tracker, ending)
            except Exception as error:
                say(f"logging.{key}: {said(error)}; the end of the run may be missing there")


def _end(key: str, tracker: Any, ending: str) -> None:
    """End a tracker's run with its status; one that was asked to stop may be resumed."""
    if key == "mlflow" and ending != FINISHED:
        import mlflow

        mlflow.end_run(ending)
    elif key == "wandb" and ending == FAILED:
        tracker.tracker.finish(exit_code=1)
    else:
        tracker.finish()


def numbers(record: Mapping[str, Any], before: str = "") -> dict[str, float]:
    """Return the numbers of a record, flat; null, text, lists and the step are left out."""
    found: dict[str, float] = {}
    for key, value in record.items():
        # MLflow refuses names that are not normalised paths, such as a/../b or a//b.
        parts = (part.strip() for part in _UNFIT.sub("_", key).split("/"))
        name = before + ("/".join(part for part in parts if part.strip(".")) or "_")
        if isinstance(value, Mapping):
            found |= numbers(value, f"{name}/")
        elif isinstance(value, int | float) and name != "step":
            found[name] = value
    return found


def _runs(output: Path) -> dict[str, str]:
    """Return the ids of the runs that earlier starts of this run created, by tracker."""
    try:
        return dict(json.loads((output / RUNS).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def _prepare_accelerate() -> None:
    """Let accelerate detect the processes, as its trackers require; nothing changes."""
    import torch
    from accelerate import PartialState

    threads = torch.get_num_threads()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the number of threads, which stays the same
        PartialState(cpu=True)
    torch.set_num_threads(threads)


def _tensorboard(recipe: Recipe, output: Path, first_step: int) -> Any:
    from accelerate.tracking import TensorBoardTracker

    # Hides the later steps of a killed run that went further.
    tracker = TensorBoardTracker(EVENTS, output, purge_step=first_step + 1)
    tracker.start()
    tracker.log({"recipe": f"```\n{dump(recipe)}```"}, step=first_step)
    return tracker


def start_wandb(recipe: Recipe, output: Path, runs: dict[str, str]) -> Any:
    """Start Weights & Biases, in the run in `runs` if there is one; a new one is added there."""
    from accelerate.tracking import WandBTracker

    given = {"name": output.name, "dir": str(output), **(recipe.logging.wandb or {})}
    if "wandb" in runs:
        given["id"] = runs["wandb"]
    tracker = WandBTracker(given.pop("project", PROJECT), resume="allow", **given)
    tracker.start()
    runs["wandb"] = tracker.tracker.id
    tracker.store_init_configuration(dict(_settings(as_tree(recipe))))
    return tracker


def start_mlflow(
    recipe: Recipe, output: Path, runs: dict[str, str], first_step: int, say: Say
) -> Any:
    """Start MLflow, in the run in `runs` if that can continue after `first_step`; a new one is
    added there.

    say: called with a line if a new run replaces another.
    """
    import mlflow
    from accelerate.tracking import MLflowTracker

    given = {"run_name": output.name, "experiment_name": PROJECT, **(recipe.logging.mlflow or {})}
    given.pop("tracking_uri", None)
    uri = kept_at(recipe, output)
    if uri == kept_in(output):
        (output / MLFLOW).mkdir(exist_ok=True)
    mlflow.set_tracking_uri(uri)
    with hurried():
        earlier = runs.get("mlflow")
        why = why_not(earlier, first_step) if earlier else None
        new = earlier is None or why is not None
        tracker = MLflowTracker(run_id=None if new else earlier, **given)
        tracker.start()
        runs["mlflow"] = tracker.tracker.info.run_id
        if why:
            mlflow.set_tag(GOES_ON_FROM, earlier)
            say(f"logging.mlflow: {why}; this goes on in a new run, {runs['mlflow']}")
        if new:  # parameters of a run cannot be changed
            tracker.store_init_configuration(dict(_settings(as_tree(recipe))))
    return tracker


def _settings(tree: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each key of a recipe by its dotted path, with a value of a type that trackers
    accept."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _settings(value, f"{at}.{key}" if at else str(key))
    elif isinstance(tree, Sequence) and not isinstance(tree, str):
        yield at, json.dumps(tree, default=str)
    else:
        yield at, tree


MLFLOW = "mlflow"
"""The default folder of MLflow's database."""
GOES_ON_FROM = "uspft.goes_on_from"
"""The tag with the id of the run that a new one replaces."""
_AT_START = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "30"}
_OF_RECORDS = ("loss", "eval_loss")  # every record of a step or an evaluation has one of these
# Characters that would begin a query in a URI, or an escape.
_NOT_IN_URI = re.compile(r"\?|%(?=[0-9A-Fa-f]{2})")


def kept_at(recipe: Recipe, output: Path) -> str:
    """Return the URI of the store of a recipe's runs."""
    if asked := (recipe.logging.mlflow or {}).get("tracking_uri"):
        return str(asked)
    import mlflow

    # MLflow itself reads the environment.
    return mlflow.get_tracking_uri() if mlflow.is_tracking_uri_set() else kept_in(output)


def kept_in(output: Path) -> str:
    """Return the URI of a database in the output folder."""
    file = str((output / MLFLOW / "mlflow.db").absolute())
    return "sqlite:///" + _NOT_IN_URI.sub(lambda found: quote(found[0]), file)


def shown(uri: str) -> str:
    """Return a URI for messages: the host where it names one, and no password."""
    return urlsplit(uri).netloc.rpartition("@")[2] or uri.partition("?")[0]


@contextmanager
def hurried() -> Iterator[None]:
    """Let MLflow give up on a server within seconds inside the `with` block, instead of minutes.

    Retries and time-outs in the environment take precedence.
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
    """Return why a training cannot continue after `first_step` in a run, or None where it can.

    MLflow cannot delete points: a repeated step would have two.
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

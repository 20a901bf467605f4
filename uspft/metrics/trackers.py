"""The experiment trackers that a recipe names, through accelerate; each has the same numbers.

Names are those of metrics.jsonl, with `/` before what lies inside another field, such as
`comm_bytes/ring`. One rank alone makes and feeds them.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from uspft.config import as_tree, dump
from uspft.config.problems import RunFailed, said
from uspft.durable import write_text

if TYPE_CHECKING:
    from uspft.config import Recipe

EVENTS, RUNS = "events", "trackers.json"
"""The folder of TensorBoard's files, and the file with the ids of the other trackers' runs."""
WANDB = "wandb"
"""The folder in which Weights & Biases keeps a run before it is sent."""
PROJECT = "uspft"
"""The project, or experiment, that a run belongs to where the recipe names none."""
_UNFIT = re.compile(r"[^\w. /-]+")
Say = Callable[[str], None]


@contextmanager
def tracking(
    recipe: Recipe, output: Path, first_step: int, say: Say
) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Yield a function that hands a record of metrics.jsonl to every tracker of the recipe.

    first_step: the step that the run goes on from, 0 where it is new; a tracker's run goes on then
    too. A tracker that fails later is told once and left alone: metrics.jsonl has every number.
    Raises RunFailed where one cannot be started.
    """
    started = _started(recipe, output, first_step)

    def log(record: Mapping[str, Any]) -> None:
        values = numbers(record)
        for key, tracker in list(started.items()):
            if not (values and "step" in record):
                continue
            try:
                tracker.log(values, step=record["step"])
            except Exception as error:  # each service has its own kinds
                del started[key]
                say(f"logging.{key}: {said(error)}; no more goes there, metrics.jsonl has it all")

    try:
        yield log
    finally:
        for key, tracker in started.items():
            try:
                tracker.finish()
            except Exception as error:
                say(f"logging.{key}: {said(error)}; the end of the run may be missing there")


def numbers(record: Mapping[str, Any], before: str = "") -> dict[str, float]:
    """Return what of a record can be drawn, flat; null, text, lists and the step are left out."""
    found: dict[str, float] = {}
    for key, value in record.items():
        # MLflow takes no name that another path would mean too, such as a/../b or a//b.
        parts = (part.strip() for part in _UNFIT.sub("_", key).split("/"))
        name = before + ("/".join(part for part in parts if part.strip(".")) or "_")
        if isinstance(value, Mapping):
            found |= numbers(value, f"{name}/")
        elif isinstance(value, int | float) and name != "step":
            found[name] = value
    return found


def _started(recipe: Recipe, output: Path, first_step: int) -> dict[str, Any]:
    """Return each tracker by its key in `logging`. Raises RunFailed."""
    asked, runs = recipe.logging, _runs(output)
    makers: dict[str, Callable[[], Any]] = {}
    if asked.tensorboard:
        makers["tensorboard"] = lambda: _tensorboard(recipe, output, first_step)
    if asked.wandb is not None:
        makers["wandb"] = lambda: start_wandb(recipe, output, runs)
    if asked.mlflow is not None:
        makers["mlflow"] = lambda: start_mlflow(recipe, output, runs)
    if makers:
        _prepare_accelerate()
    found = {}
    for key, make in makers.items():
        try:
            found[key] = make()
        except Exception as error:
            for tracker in found.values():
                tracker.finish()
            remedy = f"see that it can be reached from here, or leave logging.{key} out"
            raise RunFailed(f"logging.{key}: cannot be started: {said(error)}; {remedy}") from error
    if runs:
        write_text(output / RUNS, json.dumps(runs) + "\n")
    return found


def _runs(output: Path) -> dict[str, str]:
    """Return the ids of the runs that earlier parts of this run have made, by tracker."""
    try:
        return dict(json.loads((output / RUNS).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def _prepare_accelerate() -> None:
    """Let accelerate look at the processes that there are, as its trackers ask; nothing changes."""
    from accelerate import PartialState

    threads = torch.get_num_threads()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on the number of threads, which stays
        PartialState(cpu=True)
    torch.set_num_threads(threads)


def _tensorboard(recipe: Recipe, output: Path, first_step: int) -> Any:
    from accelerate.tracking import TensorBoardTracker

    # Where a killed run had gone further, its later steps are hidden.
    tracker = TensorBoardTracker(EVENTS, output, purge_step=first_step + 1)
    tracker.start()
    tracker.log({"recipe": f"```\n{dump(recipe)}```"}, step=first_step)
    return tracker


def start_wandb(recipe: Recipe, output: Path, runs: dict[str, str]) -> Any:
    """Start Weights & Biases, in the run that `runs` has of it; a new one is noted there."""
    from accelerate.tracking import WandBTracker

    given = {"name": output.name, "dir": str(output), **(recipe.logging.wandb or {})}
    if "wandb" in runs:
        given["id"] = runs["wandb"]
    tracker = WandBTracker(given.pop("project", PROJECT), resume="allow", **given)
    tracker.start()
    runs["wandb"] = tracker.tracker.id
    tracker.store_init_configuration(dict(_settings(as_tree(recipe))))
    return tracker


def start_mlflow(recipe: Recipe, output: Path, runs: dict[str, str]) -> Any:
    """Start MLflow, in the run that `runs` has of it; a new one is noted there."""
    from accelerate.tracking import MLflowTracker

    given = {"run_name": output.name, "experiment_name": PROJECT, **(recipe.logging.mlflow or {})}
    if uri := given.pop("tracking_uri", None):
        import mlflow

        mlflow.set_tracking_uri(uri)
    tracker = MLflowTracker(run_id=runs.get("mlflow"), **given)
    tracker.start()
    new = "mlflow" not in runs
    runs["mlflow"] = tracker.tracker.info.run_id
    if new:  # what a run was started with cannot be changed there
        tracker.store_init_configuration(dict(_settings(as_tree(recipe))))
    return tracker


def _settings(tree: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each key of a recipe by its dotted path, with a value of a kind that trackers take."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _settings(value, f"{at}.{key}" if at else str(key))
    elif isinstance(tree, Sequence) and not isinstance(tree, str):
        yield at, json.dumps(tree, default=str)
    else:
        yield at, tree

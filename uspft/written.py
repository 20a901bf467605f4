"""The names of what a run writes in its output folder; everything else there is the user's."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import time
from collections.abc import Iterable
from pathlib import Path

from uspft.checkpoint.folder import CHECKPOINTS, LATEST, STEP_FOLDER, step_folders
from uspft.durable import partial_of, sync, sync_tree, write_text
from uspft.metrics.trackers import EVENTS, MLFLOW, RUNS, WANDB

RECIPE, METRICS, ENVIRONMENT = "recipe.yaml", "metrics.jsonl", "environment.json"
REPORT = "report.html"
INCIDENTS = "incidents.jsonl"
"""A line for each step that was bad, new start of a lost run, and damaged checkpoint."""
MODEL, ADAPTER = "hf", "adapter"
EXPORTS = (MODEL, ADAPTER)
"""The folders that a run writes at its end, beside checkpoints/."""
OUTDATED = ".exports-outdated"
"""The file that says that the exports here are of a step before those that a run goes on with."""
TRACKED = (EVENTS, RUNS, WANDB, MLFLOW)
"""What trackers keep here of a run that goes on in them."""
NAMED = (METRICS, INCIDENTS, *EXPORTS, OUTDATED, *TRACKED, REPORT, RECIPE, ENVIRONMENT)
"""All that has a name of its own here; environment.json, which marks a run, is the last."""
LOGS = "logs"
LOG = re.compile(r"rank-\d+\.log")


def is_written(place: Path) -> bool:
    """Tell whether a path, relative to the output folder, is or lies in what a run writes there."""
    first, *rest = place.parts or ("",)
    if first == CHECKPOINTS and rest:
        return rest[0] == LATEST or STEP_FOLDER.fullmatch(rest[0]) is not None
    if first == LOGS and rest:
        return LOG.fullmatch(rest[0]) is not None
    return first in NAMED


def written(output: Path) -> list[Path]:
    """List what runs have left in an output folder, environment.json, which marks a run, last."""
    names = [f"{CHECKPOINTS}/{LATEST}"]
    if os.path.isdir(output / LOGS):
        names += [f"{LOGS}/{log}" for log in os.listdir(output / LOGS) if LOG.fullmatch(log)]
    here = [output / name for name in (*names, *NAMED) if os.path.lexists(output / name)]
    return step_folders(output / CHECKPOINTS) + here


def is_of_a_run(output: Path) -> bool:
    """Tell whether a run of uspft has written in an output folder."""
    if step_folders(output / CHECKPOINTS) or os.path.lexists(output / METRICS):
        return True
    try:
        environment = json.loads((output / ENVIRONMENT).read_text())
        return "uspft" in environment["versions"]
    except (OSError, ValueError, LookupError, TypeError):
        return False


def set_aside(output: Path, entries: Iterable[Path]) -> Path | None:
    """Move entries of the output to the same places in a new folder earlier-<time>/ inside it.

    Returns the new folder, or None where there is nothing to move. Raises OSError.
    """
    found = [entry for entry in entries if os.path.lexists(entry)]
    if not found:
        return None
    name = time.strftime("earlier-%Y%m%d-%H%M%S")
    tails = itertools.chain([""], (f"-{n}" for n in itertools.count(2)))
    place = next(p for p in (output / (name + tail) for tail in tails) if not os.path.lexists(p))
    for entry in found:
        aside = place / entry.relative_to(output)
        aside.parent.mkdir(parents=True, exist_ok=True)
        entry.rename(aside)
    return place


def later_than(output: Path, step: int) -> list[Path]:
    """List the checkpoints that a run which goes on from a step makes again."""
    return [f for f in step_folders(output / CHECKPOINTS) if f.name > f"step-{step:08d}"]


def outdate_exports(output: Path) -> None:
    """Mark the exports that are here, which stay until those of the steps to come are whole."""
    if any((output / name).exists() for name in EXPORTS):
        write_text(output / OUTDATED, "")


def lacks_export(output: Path, name: str) -> bool:
    """Tell whether an export of the output is not here, or is of a step before the last ones."""
    return not (output / name).exists() or (output / OUTDATED).exists()


def new_exports(output: Path) -> Path:
    """Return the folder in which exports are written, under their names, until all are whole."""
    return partial_of(output / "exports")


def publish_exports(output: Path) -> Path | None:
    """Put the new exports, which are whole, in the place of those that are here.

    Returns the folder earlier-<time>/ to which these moved; None where there were none. Raises
    OSError.
    """
    new = new_exports(output)
    sync_tree(new)  # before, so that there is always one of the two to be had
    moved = set_aside(output, [output / name for name in EXPORTS])
    for name in (ADAPTER, MODEL):
        if (new / name).exists():
            os.replace(new / name, output / name)
            sync(output)
    (output / OUTDATED).unlink(missing_ok=True)
    if new.exists():
        new.rmdir()
    return moved


def clear_partial(output: Path) -> None:
    """Delete what a killed run has left half written in an output folder.

    No other run may be alive in the folder.
    """
    names = [f"{CHECKPOINTS}/{LATEST}", METRICS, INCIDENTS, RECIPE, REPORT, ENVIRONMENT]
    names += [RUNS, OUTDATED]
    left = [new_exports(output), *(partial_of(output / name) for name in names)]
    for hidden in (output / CHECKPOINTS).glob(".step-*.partial"):
        if STEP_FOLDER.fullmatch(hidden.name[1:].removesuffix(".partial")):
            left.append(hidden)
    for path in left:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)

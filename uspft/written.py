"""The names of what a run writes in its output folder; everything else there belongs to the
user."""

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
"""The file with a line for each bad step, restart of a lost run, and damaged checkpoint."""
MODEL, ADAPTER = "hf", "adapter"
EXPORTS = (MODEL, ADAPTER)
"""The folders that a run exports at its end."""
OUTDATED = ".exports-outdated"
"""The file that marks exports as older than the steps of a resumed run."""
TRACKED = (EVENTS, RUNS, WANDB, MLFLOW)
"""The trackers' files here, which a resumed run continues."""
NAMED = (METRICS, INCIDENTS, *EXPORTS, OUTDATED, *TRACKED, REPORT, RECIPE, ENVIRONMENT)
"""All names; environment.json, which marks an output folder, is last."""
LOGS = "logs"
LOG = re.compile(r"rank-\d+\.log")


def is_written(place: Path) -> bool:
    """Tell whether a run writes a path, relative to the output folder, or a parent of it."""
    first, *rest = place.parts or ("",)
    if first == CHECKPOINTS and rest:
        return rest[0] == LATEST or STEP_FOLDER.fullmatch(rest[0]) is not None
    if first == LOGS and rest:
        return LOG.fullmatch(rest[0]) is not None
    return first in NAMED


def written(output: Path) -> list[Path]:
    """List what runs have written in an output folder, with environment.json, which marks one,
    last."""
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
    """Move entries of the output folder to the same places in a new folder earlier-<time>/ inside
    it.

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
    """List the checkpoints that a run resumed from a step will write again."""
    return [f for f in step_folders(output / CHECKPOINTS) if f.name > f"step-{step:08d}"]


def outdate_exports(output: Path) -> None:
    """Mark the exports as out of date; they stay until new ones are complete."""
    if any((output / name).exists() for name in EXPORTS):
        write_text(output / OUTDATED, "")


def lacks_export(output: Path, name: str) -> bool:
    """Tell whether an export is missing or out of date."""
    return not (output / name).exists() or (output / OUTDATED).exists()


def new_exports(output: Path) -> Path:
    """Return the folder in which new exports are written until all are complete."""
    return partial_of(output / "exports")


def publish_exports(output: Path) -> Path | None:
    """Replace the exports by the new ones, which are complete.

    Returns the folder earlier-<time>/ to which the old ones were moved; None where there were none.
    Raises OSError.
    """
    new = new_exports(output)
    sync_tree(new)  # first, so that one of the two always exists
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
    """Delete incomplete files that a killed run has left in an output folder.

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

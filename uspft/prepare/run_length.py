"""What a run is going to do, told before its ranks start: its rows, steps, padding and rate."""

from __future__ import annotations

import json
import math
from pathlib import Path

from uspft.checkpoint.folder import Checkpoint
from uspft.config import Recipe
from uspft.config.strategies import strategies_of
from uspft.data import training_rows
from uspft.training.learning_rate import learning_rate
from uspft.written import METRICS


def length_of_run(recipe: Recipe, corpus: Path, steps: int) -> str:
    """Return the rows of an epoch with their padding, and the steps with the epochs they make."""
    switches = bool(strategies_of(recipe))
    stream = training_rows(recipe.data, corpus, recipe.seed, one_document=switches)
    rows, each = stream.rows_in_epoch(0), recipe.training.global_batch_size
    counts = "samples" if switches else "rows"
    epochs = recipe.training.epochs or steps * each / rows  # later ones may have other rows
    of_epoch = f"{rows:,} {counts} an epoch"
    if not switches:
        many = "rows" if rows > 1 else "row"
        of_epoch = f"{rows:,} {many} of {recipe.data.sequence_length:,} tokens an epoch"
        of_epoch += f", {stream.padding():.1%} of them padding"
    of_step = f"{each:,} {counts}" if each > 1 else counts.removesuffix("s")
    many = f"{epochs:.3g} epoch{'s' if epochs != 1 else ''}"
    of_run = f"{steps:,} step{'s' if steps > 1 else ''}"
    stop = recipe.training.stop_step
    ends = f"; it ends after step {stop:,}, as training.stop_step says" if stop else ""
    return f"{of_epoch}; {of_run} of {'a ' * (each == 1)}{of_step}, {many}{ends}"


def rate_after(recipe: Recipe, checkpoint: Checkpoint, steps: int) -> str | None:
    """Return a line on the learning rate where it does not go on as it was, or None where it does.

    The schedule runs over all steps of a run, so that other steps make another rate of each. What
    the rate was stands in the metrics of the run that wrote the checkpoint.
    """
    last = _recorded(checkpoint)
    if last is None:
        return None
    step, was = last
    rate = recipe.optimizer.learning_rate, recipe.lr_schedule
    would = learning_rate(step, steps, *rate)
    if math.isclose(was, would, rel_tol=1e-6, abs_tol=1e-15):
        return None
    after = checkpoint.step + 1
    return (
        f"learning rate: {was:.2e} at step {step}, {learning_rate(after, steps, *rate):.2e} from "
        f"step {after} on: lr_schedule now runs over {steps:,} steps from the first one"
    )


def _recorded(checkpoint: Checkpoint) -> tuple[int, float] | None:
    """Return the last step up to a checkpoint's whose learning rate is recorded, and that rate."""
    file, found = checkpoint.folder.parent.parent / METRICS, None
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue  # the torn last line of a killed run
        if "learning_rate" in record and record["step"] <= checkpoint.step:
            found = record["step"], record["learning_rate"]
    return found

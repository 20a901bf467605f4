"""The end of a run beyond its ranks: what is done of it, and the exports that are still to make."""

from __future__ import annotations

from uspft.checkpoint.folder import Checkpoint, folder_of
from uspft.checkpoint.whole_model import whole_model
from uspft.commands.export import export_beside
from uspft.config import Recipe
from uspft.metrics import Best, Journal
from uspft.prepare.output import output_of
from uspft.written import ADAPTER, EXPORTS, METRICS, MODEL, lacks_export


def reason_to_end(recipe: Recipe, steps: int, checkpoint: Checkpoint | None) -> str | None:
    """Return why no step follows the checkpoint that a run would go on from; None: some do.

    steps: of the whole run, `training.stop_step` left aside.
    """
    if checkpoint is None:
        return None
    if checkpoint.step >= steps:
        return f"all {steps} steps are done"
    if checkpoint.step >= (recipe.training.stop_step or steps):
        how = "to go on: a larger training.stop_step, or null"
        return f"the run ended after step {checkpoint.step}, as training.stop_step says ({how})"
    patience, best = recipe.training.patience, _best(recipe, checkpoint)
    if patience is None or best is None or best.since < patience:
        return None
    how = "to go on: a larger training.patience, or null"
    return f"the run ended after step {checkpoint.step}, as training.patience says ({how})"


def all_done(recipe: Recipe, why: str, checkpoint: Checkpoint) -> str:
    """Return a line that says why nothing is left to do, and where what was done is."""
    output = output_of(recipe)
    made = [f"{name} {output / name}" for name in EXPORTS if (output / name).exists()]
    where = ", ".join([f"checkpoint {checkpoint.folder}", *made])
    return f"{why}: {where}; to train anew: checkpoint.resume=never"


def export_missing(recipe: Recipe, checkpoint: Checkpoint | None) -> None:
    """Write the exports that the recipe asks for and that are not there, or of an earlier step.

    They are where the run ended between its last save and its export, and where the best
    checkpoint is not that of the last step. checkpoint: of the last step; None: of a run whose
    ranks have ended, which lacks nothing but the best one. Raises CheckpointError.
    """
    output, model, adapter = output_of(recipe), recipe.export.huggingface, recipe.model.adapter
    wanted = (model and MODEL) or (adapter and ADAPTER)
    if not wanted or not lacks_export(output, wanted):
        return
    best = _best(recipe, checkpoint) if recipe.checkpoint.keep_best else None
    if best and best.step is not None:
        checkpoint = Checkpoint.open(folder_of(output, best.step))
    if checkpoint is None:
        return
    export_beside(whole_model(checkpoint), checkpoint, output, model=model)


def _best(recipe: Recipe, checkpoint: Checkpoint | None) -> Best | None:
    """Return what is the best up to a checkpoint; None where that is of another output folder."""
    output = output_of(recipe)
    if checkpoint and checkpoint.folder.resolve() != folder_of(output, checkpoint.step).resolve():
        return None
    records = Journal(output / METRICS).evaluations()
    return Best.of(r for r in records if not checkpoint or r["step"] <= checkpoint.step)

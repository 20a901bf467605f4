"""The command `export`: it writes a checkpoint as a Hugging Face folder, without starting ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from uspft.checkpoint.folder import Checkpoint, CheckpointError, folder_of, named
from uspft.checkpoint.hf_folder import write_exports
from uspft.checkpoint.weights import WholeModel, whole_model
from uspft.config import Fault, InputError, load
from uspft.config.problems import UsageError, settings_of, writing
from uspft.metrics import Best, Journal
from uspft.prepare.files import held_output
from uspft.prepare.host import Invocation
from uspft.written import ADAPTER, METRICS, MODEL, RECIPE, new_exports, publish_exports


def export(target: Path, overrides: Sequence[str], place: Invocation) -> int:
    """Write hf/ next to checkpoints/, and adapter/ where an adapter was trained.

    target: an output folder (its newest checkpoint, or the best one with `checkpoint.keep_best`),
    or one of its checkpoints. overrides: `to=FOLDER` writes only the whole model, to that folder;
    `base=PLACE` says where the base model has moved, which the checkpoint of an adapter, of a
    partly frozen model or of a multimodal model needs. Raises InputError for other or repeated
    overrides, for a folder that is not empty, and for a target without a complete checkpoint.
    """
    asked = settings_of("export", overrides, {"to": "FOLDER", "base": "PLACE"})
    to = Path(asked["to"]).resolve() if "to" in asked else None
    if to and to.exists() and not (to.is_dir() and not any(to.iterdir())):
        raise UsageError("to", f"{to} is there already", "name a new folder")
    checkpoint = _open(target)
    if not (checkpoint.model / "config.json").is_file():
        what = f"{checkpoint.model} holds no config.json"
        raise UsageError(str(target), what, "name another checkpoint")
    whole = whole_model(checkpoint, asked.get("base"))
    if to:
        with writing(str(to), "write to=FOLDER"):
            write_exports(whole, checkpoint.model, hf=to)
        _tell(checkpoint, to)
        return 0
    output = checkpoint.folder.parent.parent
    try:
        with held_output(output, Console(highlight=False, soft_wrap=True)):
            export_beside(whole, checkpoint, output)
    except Fault as fault:
        _, what, remedy = fault.findings[0]
        raise UsageError(str(target), what, f"{remedy}, or to=FOLDER") from fault
    return 0


def export_beside(
    whole: WholeModel, checkpoint: Checkpoint, output: Path, *, model: bool = True
) -> None:
    """Write adapter/, if one was trained, and hf/ into an output folder whose lease the caller has.

    model: False skips hf/. An earlier export stays until the new one is complete, and is then moved
    aside. Raises InputError.
    """
    new = new_exports(output)
    hf = new / MODEL if model else None
    with writing(str(output), "write to=FOLDER"):
        write_exports(whole, checkpoint.model, hf=hf, adapter=new / ADAPTER)
        moved = publish_exports(output)
    if moved:
        print(f"what was exported before is now in {moved}")
    _tell(checkpoint, output / (MODEL if model else ADAPTER))


def _tell(checkpoint: Checkpoint, made: Path) -> None:
    print(f"step {checkpoint.step} of {checkpoint.folder.parent.parent} → {made}")


def _open(target: Path) -> Checkpoint:
    try:
        newest = named(target, contents=False)
        try:
            keeps_best = load(target / RECIPE).recipe.checkpoint.keep_best
        # the checkpoint was copied here without its recipe, or is of an older version
        except (InputError, OSError):
            keeps_best = False
        best = best_up_to(target, newest) if keeps_best else None
        if best is None or best.step is None or best.step == newest.step:
            return named(target)
        chosen = Checkpoint.open(folder_of(target, best.step))
    except CheckpointError as error:
        remedy = "name an output folder, or a checkpoint in it"
        what = str(error).removeprefix(f"{target} ")
        raise UsageError(str(target), what, remedy) from error
    why = f"the best, with an eval loss of {best.loss:.4g}, since checkpoint.keep_best is set"
    print(f"step {best.step} is {why}; step {newest.step}, the newest: export {newest.folder}")
    return chosen


def best_up_to(output: Path, checkpoint: Checkpoint | None) -> Best | None:
    """Return the best evaluation of the run in an output folder, if a checkpoint is given the best
    up to its step; None where the checkpoint is of another output folder."""
    if checkpoint and checkpoint.folder.resolve() != folder_of(output, checkpoint.step).resolve():
        return None
    records = Journal(output / METRICS).evaluations()
    return Best.of(r for r in records if not checkpoint or r["step"] <= checkpoint.step)

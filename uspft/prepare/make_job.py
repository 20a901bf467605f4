"""From an examined recipe to a job: model and data made ready, and where the run goes on from."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from uspft.checkpoint.folder import Checkpoint, CheckpointError, named, newest
from uspft.checkpoint.identity import BASE, CONTENTS, differences, identity_of
from uspft.config import Fault, Recipe
from uspft.data import Corpus, formats_of
from uspft.job import Job
from uspft.model.fetch import fetch_model
from uspft.model.hf_config import layer_windows
from uspft.parameters.digest import base_digest
from uspft.planner.auto import Work
from uspft.prepare.data import first_rows, prepare_data, require_here, steps_of, tokenizer_of
from uspft.prepare.examine import Examined
from uspft.prepare.files import not_whole
from uspft.prepare.invocation import Invocation
from uspft.prepare.model import examine_model
from uspft.prepare.output import output_of
from uspft.prepare.space import space_needed


def prepare_job(
    found: Examined, place: Invocation, screen: Console
) -> tuple[Examined, Job, Checkpoint | None, int]:
    """With the recipe resolved; what ranks are given, where they go on from, and the bytes that
    they will write."""
    require_here(found.recipe)
    found = found.knowing_model(fetch_model(found.recipe.model))
    recipe = found.recipe
    model = examine_model(found.here)
    if model.trains:
        screen.print(f"trains: {model.trains}", markup=False)
    needed = space_needed(recipe, model.trained, model.parameters, recipe.training.steps)
    identity = identity_of(recipe) | {BASE: base_digest(found.here.model)}
    checkpoint = _checkpoint(recipe, output_of(recipe), screen)
    _same(checkpoint, identity)
    corpus, evaluation = prepare_data(found.here, model.config.vocab_size, place, screen)
    identity[CONTENTS] = Corpus.open(corpus).contents
    _same(checkpoint, identity)
    work = Work(first_rows(found.here, corpus), layer_windows(model.config))
    found = found.knowing(work=work, formats=formats_of(recipe.data))
    job = Job(
        found.recipe,
        corpus,
        steps_of(recipe, corpus),
        identity,
        evaluation,
        resume_from=checkpoint.folder if checkpoint else None,
        tokenizer=_with_tokenizer(found.here),
        command=place.command,
        places=found.known.places,
    )
    return found, job, checkpoint, needed


def _with_tokenizer(recipe: Recipe) -> str | None:
    """The tokenizer's folder, where there is a tokenizer in it to export."""
    folder = tokenizer_of(recipe)
    has_one = folder and (Path(folder) / "tokenizer_config.json").exists()
    return str(Path(folder).resolve()) if folder and has_one else None


def _checkpoint(recipe: Recipe, output: Path, screen: Console) -> Checkpoint | None:
    """Where to go on from. Raises Fault where nothing whole is there."""
    wish = recipe.checkpoint.resume
    if wish == "never":
        return None
    try:
        if wish != "auto":
            return named(Path(wish))
        checkpoint, damaged = newest(output)
    except CheckpointError as error:
        raise not_whole(error) from error
    for line in damaged:
        screen.print(f"{line}; the one before it is taken", markup=False)
    return checkpoint


def _same(checkpoint: Checkpoint | None, identity: dict[str, object]) -> None:
    """Raises Fault where the recipe has changed since the checkpoint."""
    changed = differences(checkpoint.state["identity"], identity) if checkpoint else []
    if changed:
        raise Fault(changed)

"""`train`: check, prepare the data once, start the ranks, say where things are."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from uspft.checkpoint.folder import Checkpoint, CheckpointError, named, newest
from uspft.checkpoint.identity import BASE, CONTENTS, differences, identity_of
from uspft.checkpoint.peft_folder import export_adapter
from uspft.checkpoint.whole_model import whole_model
from uspft.commands.export import export_beside
from uspft.commands.starting import start_ranks
from uspft.commands.summary import summary
from uspft.config import Fault, Recipe
from uspft.data import Corpus, formats_of
from uspft.job import Job
from uspft.launcher import WRONG_INPUT, Hosts, hosts_from, say
from uspft.lease import Lease
from uspft.model.fetch import fetch_model
from uspft.model.hf_config import layer_windows
from uspft.parameters.digest import base_digest
from uspft.planner.auto import Work
from uspft.prepare.data import first_rows, prepare_data, require_here, steps_of, tokenizer_of
from uspft.prepare.examine import Examined, examine
from uspft.prepare.files import not_whole
from uspft.prepare.invocation import Invocation
from uspft.prepare.model import examine_model
from uspft.prepare.output import held_output, open_output, output_of
from uspft.prepare.space import require_space, space_needed
from uspft.written import ADAPTER, EXPORTS, LOGS, MODEL


def train(target: Path, overrides: Sequence[str], place: Invocation) -> int:
    """Run a recipe. Raises InputError before any rank starts."""
    hosts = hosts_from(place.environment)
    found = examine(target, overrides, hosts.count, place.ranks)
    screen = Console(highlight=False, soft_wrap=True, quiet=hosts.index > 0)
    with found.placed(), _held(found.recipe, hosts, screen) as lease:
        found, job, checkpoint, needed = _prepare_job(found, place, screen)
        recipe = found.recipe
        if checkpoint and checkpoint.step >= job.steps:
            if lease:
                _export_missing(recipe, checkpoint)
            screen.print(_all_done(output_of(recipe), job.steps, checkpoint), markup=False)
            return 0
        if lease:
            require_space(recipe, needed)
            moved = open_output(recipe, checkpoint, hosts, place)
            if moved:
                screen.print(f"what an earlier run left is now in {moved}", markup=False)
            job = replace(job, lease=lease)
        screen.print(f"layout: {found.sentence}", markup=False)
        if found.why:
            screen.print(f"algorithm: {found.why}", markup=False)
        if checkpoint:
            screen.print(f"going on from {checkpoint.folder}", markup=False)
        with tempfile.TemporaryDirectory(prefix="uspft-") as folder:
            job.write(Path(folder))
            logs = output_of(recipe) / LOGS
            code = start_ranks([folder], job.recipe, hosts, place, logs=logs)
    if lease and code == 0:
        screen.print(summary(recipe, target, overrides), markup=False)
    elif lease and code != WRONG_INPUT:
        say(how_to_go_on(recipe))
    return code


@contextmanager
def _held(recipe: Recipe, hosts: Hosts, screen: Console) -> Iterator[Lease | None]:
    """The output folder, held by host 0 alone, for all."""
    if hosts.index:
        yield None
        return
    with held_output(output_of(recipe), screen) as lease:
        yield lease


def _all_done(output: Path, steps: int, checkpoint: Checkpoint) -> str:
    made = [f"{name} {output / name}" for name in EXPORTS if (output / name).exists()]
    where = ", ".join([f"checkpoint {checkpoint.folder}", *made])
    return f"all {steps} steps are done: {where}; to train anew: checkpoint.resume=never"


def _export_missing(recipe: Recipe, checkpoint: Checkpoint) -> None:
    """What the recipe asks for and is not there: the run ended between its last save and that."""
    output, model, adapter = output_of(recipe), recipe.export.huggingface, recipe.model.adapter
    if model and not (output / MODEL).exists():
        export_beside(whole_model(checkpoint), checkpoint, output)
    elif adapter and not (output / ADAPTER).exists():
        whole = whole_model(checkpoint)
        export_adapter(whole.adapter(), whole.block, output / ADAPTER)


def _prepare_job(
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


def how_to_go_on(recipe: Recipe) -> str:
    """What is saved of a run that ended before its end, and how it goes on."""
    output = output_of(recipe)
    try:
        checkpoint, _ = newest(output)
    except CheckpointError as error:
        return str(error)
    if checkpoint is None:
        return f"nothing is saved in {output}: the same command starts anew"
    how = "the same command goes on"
    if recipe.checkpoint.resume != "auto":
        how = "with checkpoint.resume=auto the same command goes on"
    return f"saved step {checkpoint.step} in {checkpoint.folder}; {how}"

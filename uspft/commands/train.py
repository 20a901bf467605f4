"""`train`: check, prepare the data once, start the ranks, say where things are."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from uspft.checkpoint.adapter import export_adapter
from uspft.checkpoint.folder import Checkpoint, CheckpointError, named, newest
from uspft.checkpoint.identity import BASE, CONTENTS, differences, identity_of
from uspft.checkpoint.whole import whole_model
from uspft.commands.examine import Examined, examine, with_rows
from uspft.commands.examine_files import not_whole
from uspft.commands.examine_model import examine_model
from uspft.commands.export import export_beside
from uspft.commands.output import held_output, open_output, output_of
from uspft.commands.place import Place
from uspft.commands.prepare import first_rows, prepare_data, require_here, steps_of, tokenizer_of
from uspft.commands.sizes import with_fetched, with_tiles
from uspft.commands.space import require_space, space_needed
from uspft.commands.starting import start_ranks
from uspft.commands.summary import summary
from uspft.config import Fault, Recipe
from uspft.config.blocks import DataBlock
from uspft.data import Corpus, formats_of
from uspft.job import Job
from uspft.launcher import WRONG_INPUT, Hosts, hosts_from, say
from uspft.lease import Lease
from uspft.model.config import layer_windows
from uspft.model.digest import base_digest
from uspft.model.files import fetch
from uspft.output import ADAPTER, EXPORTS, LOGS, MODEL
from uspft.sequence.auto import Work


def train(target: Path, overrides: Sequence[str], place: Place) -> int:
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
    found: Examined, place: Place, screen: Console
) -> tuple[Examined, Job, Checkpoint | None, int]:
    """With the recipe as it is written down; what ranks are given, where they go on from, and the
    bytes that they will write.

    Ranks get folders of this machine in place of hub ids, which say nothing elsewhere.
    """
    recipe = found.recipe
    require_here(recipe)
    recipe, local = with_fetched(recipe, fetch(recipe))
    model = examine_model(local)
    config = model.config
    if model.trains:
        screen.print(f"trains: {model.trains}", markup=False)
    needed = space_needed(recipe, model.trained, model.parameters, recipe.training.steps)
    identity = identity_of(recipe) | {BASE: base_digest(local.model)}
    checkpoint = _checkpoint(recipe, output_of(recipe), screen)
    _same(checkpoint, identity)
    corpus, evaluation = prepare_data(local, config.vocab_size, place, screen)
    identity[CONTENTS] = Corpus.open(corpus).contents
    _same(checkpoint, identity)
    found = with_rows(found, local, Work(first_rows(local, corpus), layer_windows(config)))
    formats = formats_of(_every_source(local.data))
    settled = {"parallel_config": found.recipe.parallel_config}
    recipe, local = (
        with_tiles(_with_formats(r, formats), config.vocab_size).model_copy(update=settled)
        for r in (recipe, local)
    )
    job = Job(
        local,
        corpus,
        steps_of(recipe, corpus),
        identity,
        evaluation,
        resume_from=checkpoint.folder if checkpoint else None,
        tokenizer=_with_tokenizer(local),
        command=place.command,
    )
    return replace(found, recipe=recipe), job, checkpoint, needed


def _with_tokenizer(recipe: Recipe) -> str | None:
    """The tokenizer's folder, where there is a tokenizer in it to export."""
    folder = tokenizer_of(recipe)
    has_one = folder and (Path(folder) / "tokenizer_config.json").exists()
    return str(Path(folder).resolve()) if folder and has_one else None


def _every_source(data: DataBlock) -> DataBlock:
    """The block as if it trained on its evaluation sets too."""
    return data.model_copy(update={"train": data.train + (data.eval or ()), "eval": None})


def _with_formats(recipe: Recipe, found: list[str]) -> Recipe:
    """The recipe with the formats of `_every_source` in place of `auto`."""
    data = recipe.data
    if len(set(found)) == 1:
        data = data.model_copy(update={"format": found[0]})
    else:
        pairs = zip(_every_source(data).train, found, strict=True)
        named = tuple(s.model_copy(update={"format": s.format or f}) for s, f in pairs)
        train, rest = named[: len(data.train)], named[len(data.train) :]
        data = data.model_copy(update={"train": train, "eval": rest or None})
    return recipe.model_copy(update={"data": data})


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

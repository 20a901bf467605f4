"""`train`: check, prepare the data once, start the ranks, say where things are."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from uspft.checkpoint.folder import (
    EXPORTS,
    Checkpoint,
    CheckpointError,
    newest,
    set_aside,
    set_aside_after,
)
from uspft.checkpoint.identity import BASE, CONTENTS, differences, identity_of
from uspft.checkpoint.whole import whole_model
from uspft.commands.examine import Examined, examine, output_of, with_rows
from uspft.commands.examine_model import examine_model
from uspft.commands.export import export, export_adapter_of
from uspft.commands.place import Place
from uspft.commands.prepare import first_rows, prepare_data, require_here, steps_of, tokenizer_of
from uspft.commands.sizes import with_fetched, with_tiles
from uspft.commands.starting import start_ranks
from uspft.commands.summary import summary
from uspft.config import Fault, Recipe, dump
from uspft.config.blocks import DataBlock
from uspft.data import formats_of
from uspft.job import Job
from uspft.launcher import Hosts, hosts_from
from uspft.model.config import layer_windows
from uspft.model.digest import base_digest
from uspft.model.files import fetch
from uspft.sequence.auto import Work


def train(target: Path, overrides: Sequence[str], place: Place) -> int:
    """Run a recipe. Raises InputError before any rank starts."""
    hosts = hosts_from(place.environment)
    found = examine(target, overrides, hosts.count, place.ranks)
    speaks = hosts.index == 0
    screen = Console(highlight=False, soft_wrap=True, quiet=not speaks)
    with found.placed():
        found, job, checkpoint = _prepare_job(found, place, screen)
    recipe = found.recipe
    output = output_of(recipe)
    if checkpoint and checkpoint.step >= job.steps:
        if speaks:
            _export_missing(recipe, checkpoint, place)
        made = [f"{name} {output / name}" for name in EXPORTS if (output / name).exists()]
        screen.print(
            f"all {job.steps} steps are done: "
            f"{', '.join([f'checkpoint {checkpoint.folder}', *made])}; "
            "to train anew: checkpoint.resume=never",
            markup=False,
        )
        return 0
    if speaks:
        with found.placed():
            _open_output(recipe, checkpoint, hosts, screen)
    screen.print(f"layout: {found.sentence}", markup=False)
    if found.why:
        screen.print(f"algorithm: {found.why}", markup=False)
    if checkpoint:
        screen.print(f"going on from {checkpoint.folder}", markup=False)
    with tempfile.TemporaryDirectory(prefix="uspft-") as folder:
        job.write(Path(folder))
        code = start_ranks([folder], job.recipe, hosts, place, logs=output / "logs")
    if code == 0 and speaks:
        screen.print(summary(recipe, target, overrides), markup=False)
    return code


def _export_missing(recipe: Recipe, checkpoint: Checkpoint, place: Place) -> None:
    """What the recipe asks for and is not there: the run ended between its last save and that."""
    output = output_of(recipe)
    if recipe.export.huggingface and not (output / "hf").exists():
        export(checkpoint.folder, [], place)
    elif recipe.model.adapter and not (output / "adapter").exists():
        export_adapter_of(whole_model(checkpoint), output / "adapter")


def _prepare_job(
    found: Examined, place: Place, screen: Console
) -> tuple[Examined, Job, Checkpoint | None]:
    """With the recipe as it is written down; what ranks are given, and where they go on from.

    Ranks get folders of this machine in place of hub ids, which say nothing elsewhere.
    """
    recipe = found.recipe
    require_here(recipe)
    recipe, local = with_fetched(recipe, fetch(recipe))
    config, trains = examine_model(local)
    if trains:
        screen.print(f"trains: {trains}", markup=False)
    identity = identity_of(recipe)
    if trains:
        identity[BASE] = base_digest(local.model)
    checkpoint = _checkpoint(recipe, output_of(recipe))
    _same(checkpoint, identity)
    corpus, evaluation = prepare_data(local, config.vocab_size, place, screen)
    identity[CONTENTS] = corpus.name
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
    return replace(found, recipe=recipe), job, checkpoint


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


def _checkpoint(recipe: Recipe, output: Path) -> Checkpoint | None:
    """Where to go on from. Raises Fault where the place named is none."""
    wish = recipe.checkpoint.resume
    if wish == "never":
        return None
    try:
        return newest(output) if wish == "auto" else Checkpoint.open(Path(wish))
    except CheckpointError as error:
        remedy = "name a complete checkpoint, .../checkpoints/step-00000500, or write never"
        raise Fault([("checkpoint.resume", str(error), remedy)]) from error


def _same(checkpoint: Checkpoint | None, identity: dict[str, object]) -> None:
    """Raises Fault where the recipe has changed since the checkpoint."""
    changed = differences(checkpoint.state["identity"], identity) if checkpoint else []
    if changed:
        raise Fault(changed)


def _open_output(
    recipe: Recipe, checkpoint: Checkpoint | None, hosts: Hosts, screen: Console
) -> None:
    """Make the output folder with the resolved recipe; what another run left is moved aside."""
    output = output_of(recipe)
    here = (output / "checkpoints").resolve()
    try:
        if checkpoint and checkpoint.folder.resolve().parent == here:
            moved = set_aside_after(output, checkpoint.step)
        else:
            moved = set_aside(output, ["verify", *(["logs"] if hosts.count > 1 else [])])
        output.mkdir(parents=True, exist_ok=True)
        (output / "recipe.yaml").write_text(dump(recipe))
    except OSError as error:
        what = f"`{output}` cannot be written: {error.strerror}"
        raise Fault([("output_dir", what, "name another folder")]) from error
    if moved:
        screen.print(f"what an earlier run left is now in {moved}", markup=False)

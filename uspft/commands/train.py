"""`train`: check, prepare the data once, start the ranks, say where things are."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

from uspft.checkpoint.folder import Checkpoint, CheckpointError, newest, set_aside, set_aside_after
from uspft.checkpoint.identity import CONTENTS, differences, identity_of
from uspft.commands.examine import Examined, examine, examine_model, output_of, with_tiles
from uspft.commands.export import export
from uspft.commands.place import Place
from uspft.commands.summary import summary
from uspft.config import Fault, Recipe, dump
from uspft.config.blocks import DataBlock
from uspft.data import Corpus, RowStream, formats_of, prepare, prepare_sets, read_report
from uspft.job import Job
from uspft.kernels.choose import is_installed
from uspft.launcher import Hosts, LocalRanks, hosts_from, run_ranks
from uspft.model.files import fetch


def train(target: Path, overrides: Sequence[str], place: Place) -> int:
    """Run a recipe. Raises InputError before any rank starts."""
    hosts = hosts_from(place.environment)
    found = examine(target, overrides, hosts.count, place.ranks)
    speaks = hosts.index == 0
    screen = Console(highlight=False, soft_wrap=True, quiet=not speaks)
    with found.placed():
        recipe, job, checkpoint = _prepare_job(found, place, screen)
    output = output_of(recipe)
    if checkpoint and checkpoint.step >= job.steps:
        if speaks and recipe.export.huggingface and not (output / "hf").exists():
            export(checkpoint.folder, [], place)  # the run ended between its last save and this
        screen.print(
            f"all {job.steps} steps are done: checkpoint {checkpoint.folder}, "
            f"model {output / 'hf'}; to train anew: checkpoint.resume=never",
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
    code = _start(job, hosts, place)
    if code == 0 and speaks:
        screen.print(summary(recipe, target, overrides), markup=False)
    return code


def _prepare_job(
    found: Examined, place: Place, screen: Console
) -> tuple[Recipe, Job, Checkpoint | None]:
    """The recipe as it is written down, what ranks are given, and where they go on from.

    Ranks get folders of this machine in place of hub ids, which say nothing elsewhere.
    """
    recipe = found.recipe
    _require_devices(recipe)
    _require_kernel(recipe)
    local = fetch(recipe)
    config = examine_model(local)
    identity = identity_of(recipe)
    checkpoint = _checkpoint(recipe, output_of(recipe))
    _same(checkpoint, identity)
    corpus, evaluation = _prepare(local, config.vocab_size, place, screen)
    identity[CONTENTS] = corpus.name
    _same(checkpoint, identity)
    formats = formats_of(_every_source(local.data))
    recipe, local = (
        with_tiles(_with_formats(r, formats), config.vocab_size) for r in (recipe, local)
    )
    job = Job(
        local,
        corpus,
        _steps(recipe, corpus),
        identity,
        evaluation,
        resume_from=checkpoint.folder if checkpoint else None,
        tokenizer=_with_tokenizer(local),
        command=place.command,
    )
    return recipe, job, checkpoint


def _require_kernel(recipe: Recipe) -> None:
    """Raises Fault where the attention kernel that is asked for is not installed."""
    name = recipe.model.attention
    if name != "auto" and not is_installed(name):
        what = f"is {name}, and its package is not installed in {sys.prefix}"
        raise Fault([("model.attention", what, "install it there, or write auto")])


def _require_devices(recipe: Recipe) -> None:
    """Raises Fault where this host has fewer GPUs than processes; `check` may run elsewhere."""
    count, wanted = torch.cuda.device_count(), recipe.launch.processes
    if recipe.launch.device == "cuda" and isinstance(wanted, int) and wanted > count:
        what = f"{wanted} processes on this host, which has {count} GPUs"
        remedy = f"start at most {count}" if count else "write launch.device: cpu"
        raise Fault([("launch.processes", what, f"{remedy}, or start it on a host that has them")])


def _prepare(
    recipe: Recipe, vocabulary: int, place: Place, screen: Console
) -> tuple[Path, dict[str, Path]]:
    """Read and tokenise the data, or find that it has been: training's, and each evaluation set."""
    cache = recipe.data.cache_dir or place.cache / "data"
    with Progress(console=screen, transient=True, disable=not screen.is_terminal) as progress:
        task = progress.add_task("tokenising", total=None)

        def tick(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        tokenizer = tokenizer_of(recipe)
        corpus = prepare(recipe.data, tokenizer, vocabulary, Path(cache), tick)
        evaluation = prepare_sets(recipe.data, tokenizer, vocabulary, Path(cache), tick)
    _tell("data", corpus, screen)
    for title, folder in evaluation.items():
        _tell(f"evaluation data {title}", folder, screen)
    return corpus, evaluation


def _tell(what: str, folder: Path, screen: Console) -> None:
    """How much data was read, and what became of the rest."""
    report = read_report(folder)
    screen.print(
        f"{what}: {report['samples']:,} samples, {report['tokens']:,} tokens, "
        f"longest {report['longest']:,}",
        markup=False,
    )
    for fate in ("dropped", "truncated", "split", "without_targets"):
        if report.get(fate):
            screen.print(f"{what}: {report[fate]:,} samples {fate.replace('_', ' ')}", markup=False)


def tokenizer_of(recipe: Recipe) -> str | None:
    """The tokenizer's folder: named, or the model's own."""
    named = recipe.model.tokenizer or recipe.model.name_or_path
    return str(named) if named else None


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


def _steps(recipe: Recipe, corpus: Path) -> int:
    data, training = recipe.data, recipe.training
    if training.steps:
        return training.steps
    stream = RowStream(
        Corpus.open(corpus), data.sequence_length, data.packing, data.shuffle, recipe.seed
    )
    return stream.steps_in_epochs(training.epochs or 1, training.global_batch_size)


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
            moved = set_aside(output, ["logs"] if hosts.count > 1 else [])
        output.mkdir(parents=True, exist_ok=True)
        (output / "recipe.yaml").write_text(dump(recipe))
    except OSError as error:
        what = f"`{output}` cannot be written: {error.strerror}"
        raise Fault([("output_dir", what, "name another folder")]) from error
    if moved:
        screen.print(f"what an earlier run left is now in {moved}", markup=False)


def _start(job: Job, hosts: Hosts, place: Place) -> int:
    """Start this host's ranks and wait for them."""
    output = job.recipe.output_dir
    assert output is not None and isinstance(job.recipe.launch.processes, int)
    with tempfile.TemporaryDirectory(prefix="uspft-") as folder:
        job.write(Path(folder))
        return run_ranks(
            [sys.executable, "-m", "uspft", "rank", folder],
            LocalRanks(job.recipe.launch.processes, hosts),
            environment={
                "TORCH_CPP_LOG_LEVEL": "ERROR",  # a host without a name is no user's concern
                **place.environment,
                "DS_ACCELERATOR": job.recipe.launch.device,
            },
            log_dir=output / "logs",
        )

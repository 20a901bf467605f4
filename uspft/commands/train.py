"""`train`: check, prepare the data once, start the ranks, say where things are."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from uspft.checkpoint.folder import Checkpoint, CheckpointError, newest, set_aside
from uspft.checkpoint.identity import differences, identity_of
from uspft.commands.examine import Examined, examine
from uspft.commands.place import Place
from uspft.commands.summary import summary
from uspft.config import Recipe, RecipeError, dump
from uspft.data import Corpus, RowStream, prepare
from uspft.job import Job
from uspft.launcher import Hosts, LocalRanks, hosts_from, run_ranks
from uspft.model.config import model_config
from uspft.model.files import fetch


def train(target: Path, overrides: Sequence[str], place: Place) -> int:
    """Run a recipe. Raises RecipeError, DataError, ValueError before any rank starts."""
    hosts = hosts_from(place.environment)
    found = examine(target, overrides, hosts.count, place.ranks)
    speaks = hosts.index == 0
    screen = Console(highlight=False, soft_wrap=True, quiet=not speaks)
    recipe = fetch(found.recipe)
    output = recipe.output_dir
    assert output is not None
    config = model_config(recipe.model)
    corpus = _prepare(recipe, config.vocab_size, place, screen)
    steps = _steps(recipe, corpus)
    identity = identity_of(recipe, corpus.name)
    checkpoint = _checkpoint(found, identity)
    if checkpoint and checkpoint.step >= steps:
        screen.print(
            f"all {steps} steps are done: checkpoint {checkpoint.folder}, model {output / 'hf'}; "
            "to train anew: checkpoint.resume=never",
            markup=False,
        )
        return 0
    if speaks:
        _open_output(output, checkpoint, screen)
        (output / "recipe.yaml").write_text(dump(recipe))
    stage = recipe.deepspeed.zero_optimization.get("stage", 1)
    screen.print(f"layout: {found.layout}; ZeRO-{stage}, {recipe.model.dtype}", markup=False)
    if checkpoint:
        screen.print(f"going on from {checkpoint.folder}", markup=False)
    job = Job(
        recipe,
        corpus,
        steps,
        identity,
        resume_from=checkpoint and checkpoint.folder,
        tokenizer=_with_tokenizer(recipe),
        command=place.command,
    )
    code = _start(job, hosts, place)
    if code == 0 and speaks:
        screen.print(summary(recipe, target), markup=False)
    return code


def _prepare(recipe: Recipe, vocabulary: int, place: Place, screen: Console) -> Path:
    """Read and tokenise the data, or find that it has been."""
    cache = recipe.data.cache_dir or place.cache / "data"
    with Progress(console=screen, transient=True, disable=not screen.is_terminal) as progress:
        task = progress.add_task("tokenising", total=None)

        def tick(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        folder = prepare(recipe.data, tokenizer_of(recipe), vocabulary, Path(cache), tick)
    report = json.loads((folder / "report.json").read_text())
    screen.print(
        f"data: {report['samples']:,} samples, {report['tokens']:,} tokens, "
        f"longest {report['longest']:,}",
        markup=False,
    )
    for fate in ("dropped", "truncated", "split", "without_targets"):
        if report.get(fate):
            screen.print(f"data: {report[fate]:,} samples {fate.replace('_', ' ')}", markup=False)
    return folder


def tokenizer_of(recipe: Recipe) -> str | None:
    """The tokenizer's folder: named, or the model's own."""
    named = recipe.model.tokenizer or recipe.model.name_or_path
    return str(named) if named else None


def _with_tokenizer(recipe: Recipe) -> str | None:
    """The tokenizer's folder, where there is a tokenizer in it to export."""
    folder = tokenizer_of(recipe)
    has_one = folder and (Path(folder) / "tokenizer_config.json").exists()
    return str(Path(folder).resolve()) if folder and has_one else None


def _steps(recipe: Recipe, corpus: Path) -> int:
    data, training = recipe.data, recipe.training
    if training.steps:
        return training.steps
    stream = RowStream(
        Corpus.open(corpus), data.sequence_length, data.packing, data.shuffle, recipe.seed
    )
    return stream.steps_in_epochs(training.epochs or 1, training.global_batch_size)


def _checkpoint(found: Examined, identity: dict[str, object]) -> Checkpoint | None:
    """Where to go on from. Raises RecipeError where the recipe has changed, or the place is none."""
    recipe, wish = found.recipe, found.recipe.checkpoint.resume
    assert recipe.output_dir is not None
    if wish == "never":
        return None
    try:
        checkpoint = newest(recipe.output_dir) if wish == "auto" else Checkpoint.open(Path(wish))
    except CheckpointError as error:
        finding = ("checkpoint.resume", str(error), "name a complete checkpoint, or write never")
        raise RecipeError([found.problem(finding)]) from None
    if checkpoint is None:
        return None
    changed = differences(checkpoint.state["identity"], json.loads(json.dumps(identity)))
    if changed:
        raise RecipeError([found.problem(finding) for finding in changed])
    return checkpoint


def _open_output(output: Path, checkpoint: Checkpoint | None, screen: Console) -> None:
    """Make the output folder; what another run left there is moved aside, never deleted."""
    goes_on = checkpoint and output.resolve() in checkpoint.folder.resolve().parents
    moved = None if goes_on else set_aside(output)
    if moved:
        screen.print(f"what an earlier run left is now in {moved}", markup=False)
    output.mkdir(parents=True, exist_ok=True)


def _start(job: Job, hosts: Hosts, place: Place) -> int:
    """Start this host's ranks and wait for them."""
    output = job.recipe.output_dir
    assert output is not None and isinstance(job.recipe.launch.processes, int)
    with tempfile.TemporaryDirectory(prefix="uspft-") as folder:
        job.write(Path(folder))
        return run_ranks(
            [sys.executable, "-m", "uspft", "rank", folder],
            LocalRanks(job.recipe.launch.processes, hosts),
            environment={**place.environment, "DS_ACCELERATOR": job.recipe.launch.device},
            log_dir=output / "logs",
        )

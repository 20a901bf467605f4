"""The stages in which a recipe becomes a job before ranks start; each adds facts.

    examine       what is written, and what this machine shows (prepare/examine.py)
    with_model    the model's folder and sizes
    with_data     the tokenised data, its formats and first rows; the layouts that `auto` becomes
    job_of        the ranks' job
    prepare_job   all of it for a run, with the checkpoint to resume

Each of the first three returns the examination with more facts (`Known`), by which every `auto` is
resolved again.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn

from uspft.checkpoint.folder import Checkpoint, CheckpointError, Newest, folder_of, named, newest
from uspft.checkpoint.identity import (
    BASE,
    CONTENTS,
    EVALUATION,
    counts_samples,
    differences,
    identity_of,
)
from uspft.config import Fault, Recipe
from uspft.config.algorithms import AUTO
from uspft.config.problems import counted
from uspft.data.corpus.corpus import Corpus, read_report
from uspft.data.corpus.prepare import HELD_OUT, formats_of, hold_out, prepare, prepare_sets
from uspft.data.faults import SHOWN_LINES, DataError
from uspft.data.rows.stream import training_rows
from uspft.families import ModelShape
from uspft.job import Job
from uspft.launcher.meeting import Meeting
from uspft.launcher.terminal import TOLD_SECONDS, Waiting
from uspft.lease import Lease
from uspft.parameters.source import base_digest
from uspft.prepare.examine import Examined
from uspft.prepare.files import not_whole, output_of, space_needed
from uspft.prepare.host import Invocation, require_here
from uspft.prepare.layout_findings import exchange_findings
from uspft.prepare.make_plan import (
    chunk_prices_of,
    course_of,
    knowing_memory,
    lengths_of,
    prices_of,
    weighing,
)
from uspft.prepare.model import examine_model, exported_tokenizer, fetched, serving_of, tokenizer_of
from uspft.segments import Segments


def with_model(found: Examined, place: Invocation) -> Examined:
    """Return the examination with the model on this host; a hub model is downloaded.

    Raises Fault as `Examined.knowing_model` does.
    """
    return found.knowing_model(fetched(found.recipe.model, place.cache))


def with_data(
    found: Examined, place: Invocation, screen: Console, *, keeps: bool | None = None
) -> Examined:
    """Return the examination with the data tokenised, and with the algorithm and layouts that
    `auto` becomes by it.

    keeps: as in `weighing`. Raises DataError, and Fault where no layout fits.
    """
    assert found.shape  # the model's config is on this host
    corpus, evaluation = prepare_data(found.here, found.shape, place, screen)
    rows, formats = first_rows(found.here, corpus), formats_of(found.recipe.data)
    found = found.knowing(corpus=corpus, evaluation=evaluation, rows=rows, formats=formats)
    if not found.is_open:
        return found
    found = knowing_memory(found, place.meeting)
    return weighing(found, lengths_of(found.here, corpus), keeps=keeps)


def job_of(found: Examined, place: Invocation, identity: dict[str, Any], **more: Any) -> Job:
    """Return the ranks' job for a recipe whose model and data are ready.

    identity, more: other fields of the job.
    """
    return Job(
        found.recipe,
        found.corpus,
        identity=identity,
        command=place.command,
        places=found.known.places,
        prices=prices_of(found),
        chunk_prices=chunk_prices_of(found),
        **course_of(found.recipe, found.corpus),
        **more,
    )


STEP = "step of the checkpoint"
"""The name under which host 0 tells the others which checkpoint is complete."""


class Prepared(NamedTuple):
    """The ranks' job, and what is known of the run before they start."""

    found: Examined
    """The recipe, resolved as far as it can be."""
    job: Job
    checkpoint: Checkpoint | None
    """The checkpoint to resume."""
    damaged: list[str]
    """A line for each newer checkpoint, all of which are damaged."""
    needed: int
    """How many bytes the run will write."""


def prepare_job(
    found: Examined, place: Invocation, screen: Console, lease: Lease | None = None
) -> Prepared:
    """Prepare model and data, and return the ranks' job.

    lease: on the output folder, on host 0.
    """
    require_here(found.recipe, found.loaded.recipe.launch.device, place.environment)
    found = with_model(found, place)
    recipe = found.recipe
    model = examine_model(found.here)
    if model.trains:
        screen.print(f"trains: {model.trains}", markup=False)
    base = {BASE: base_digest(found.here.model)}
    checkpoint, damaged = _checkpoint(recipe, place.meeting, screen)
    _same(checkpoint, identity_of(recipe) | base)
    keeps = counts_samples(checkpoint.state["identity"]) if checkpoint else None
    found = with_data(found, place, screen, keeps=keeps)
    identity = identity_of(found.recipe) | base | {CONTENTS: Corpus.open(found.corpus).contents}
    sets = found.known.evaluation.values()
    evaluated = {EVALUATION: sorted(Corpus.open(folder).contents for folder in sets)}
    chooses = bool(recipe.checkpoint.keep_best or recipe.training.patience)
    if checkpoint and checkpoint.folder.resolve().parent.parent != output_of(recipe).resolve():
        chooses = False  # the evaluations of another folder's run do not count here
    _same(checkpoint, identity | evaluated if chooses else identity)
    identity |= evaluated
    if wrong := exchange_findings(found.recipe, found.layout):
        raise Fault(wrong)
    tokenizer = exported_tokenizer(found.here)
    job = job_of(
        found,
        place,
        identity,
        evaluation=found.known.evaluation,
        resume_from=checkpoint.folder if checkpoint else None,
        lease=lease,
        tokenizer=tokenizer,
        serving=serving_of(found.here, found.known.formats, model.config, tokenizer),
        comments=found.decision.comments if found.decision else {},
    )
    needed = space_needed(recipe, model.trained, model.parameters, job.saves)
    return Prepared(found, job, checkpoint, damaged, needed)


def _checkpoint(recipe: Recipe, meeting: Meeting, screen: Console) -> Newest:
    """Return the checkpoint to resume, or None where the run starts from the beginning.

    Only host 0 compares the files with their checksums. Raises Fault where the named checkpoint, or
    every one in the output folder, is incomplete.
    """
    wish = recipe.checkpoint.resume
    if wish == "never":
        return Newest(None, [])
    waiting, reads = Waiting(screen), meeting.hosts.index == 0
    waiting.view.start()
    try:
        with waiting.on("the files of the checkpoint to be compared with their checksums"):
            if wish == AUTO:
                found = _newest(recipe, meeting)
            else:
                found = Newest(named(Path(wish), contents=reads), [])
    except CheckpointError as error:
        raise not_whole(error) from error
    finally:
        waiting.close()
    for line in found.damaged:
        screen.print(f"{line}; the one before it is taken", markup=False)
    if found.checkpoint and not found.checkpoint.has_checksums:
        what = "was written without checksums, so that flipped bits would not be found"
        screen.print(f"{found.checkpoint.folder} {what}", markup=False)
    return found


def _newest(recipe: Recipe, meeting: Meeting) -> Newest:
    """Return the newest complete checkpoint of the output folder.

    Only host 0 reads it all; the other hosts wait for the result. Raises as `newest` and
    `Meeting.least` do.
    """
    output, limit_seconds = output_of(recipe), recipe.launch.timeout_minutes * 60
    if meeting.hosts.index == 0:
        found = newest(output)
        meeting.least(STEP, found.checkpoint.step if found.checkpoint else 0, limit_seconds)
        return found
    step = meeting.least(STEP, sys.maxsize, limit_seconds)
    return Newest(Checkpoint.open(folder_of(output, step), contents=False) if step else None, [])


def _same(checkpoint: Checkpoint | None, identity: dict[str, object]) -> None:
    """Check that the recipe has not changed since the checkpoint. Raises Fault where it has."""
    if checkpoint and (changed := differences(checkpoint.state["identity"], identity)):
        raise Fault(changed)


PIECE = 1 << 24
"""Tokens that are searched at a time."""
FIRST_ROWS = 4
"""How many of the first rows `auto` considers when it picks one split for the run."""


def prepare_data(
    recipe: Recipe, shape: ModelShape, place: Invocation, screen: Console
) -> tuple[Path, dict[str, Path]]:
    """Tokenise the training data and each evaluation set, unless they are cached.

    Without evaluation sets, data.eval_fraction holds one out of the training data. Returns the
    folder of the training data, and those of the evaluation sets by title. Raises DataError where a
    sample has a token that stands for an image.
    """
    vocabulary, cache, hidden = shape.vocab_size, place.data_cache(recipe), not screen.is_terminal
    columns = (*Progress.get_default_columns(), TimeElapsedColumn())
    with Progress(*columns, console=screen, transient=True, disable=hidden) as progress:
        task = progress.add_task("reading data", total=None)
        waiting = Waiting(screen)
        started = told = time.monotonic()

        def tick(done: int, total: int) -> None:
            nonlocal told
            waiting.over()
            progress.update(task, description="tokenising", completed=done, total=total)
            now = time.monotonic()
            if hidden and now - told >= TOLD_SECONDS:
                told = now
                screen.print(f"tokenising: {done / (total or 1):.0%} after {now - started:.0f} s")

        tokenizer = tokenizer_of(recipe.model)
        with waiting.on("the data"):
            corpus = prepare(recipe.data, tokenizer, vocabulary, cache, tick)
        progress.reset(task, description="reading evaluation data", total=None)
        with waiting.on("the evaluation data"):
            evaluation = prepare_sets(recipe.data, tokenizer, vocabulary, cache, tick)
    whole = corpus
    for folder in (corpus, *evaluation.values()):
        require_text(Corpus.open(folder), shape)
    if recipe.data.eval_fraction:
        corpus, held = hold_out(corpus, recipe)
        evaluation = {HELD_OUT: held}
    _tell("data", whole, screen, mix_of=corpus)
    for title, folder in evaluation.items():
        _tell(f"evaluation data {title}", folder, screen)
    return corpus, evaluation


def require_text(corpus: Corpus, shape: ModelShape) -> None:
    """Check that no sample has a token that stands for an image, since only the language model of a
    multimodal model is trained. Raises DataError, which names the samples."""
    lines = dict[str, None]()
    for key, token in shape.media.items():
        for start in range(0, len(corpus.tokens), PIECE):
            places = start + np.flatnonzero(corpus.tokens[start : start + PIECE] == token)
            for sample in np.unique(np.searchsorted(corpus.offsets, places, "right") - 1):
                what = f"holds the token {token}, {key} of {shape.whole_type}, and text alone is"
                remedy = "trained: leave the record out, or name a model without images"
                lines[f"{corpus.origin(int(sample))}: {what} {remedy}"] = None
            if len(lines) >= SHOWN_LINES:
                break
    if lines:
        raise DataError([*lines][:SHOWN_LINES])


def _tell(what: str, folder: Path, screen: Console, mix_of: Path | None = None) -> None:
    """Print how much data there is, and how many samples were dropped, cut or have no targets.

    mix_of: the folder whose mix of sources to print, which may be a part of the data.
    """
    report = read_report(folder)
    samples, longest = counted(report["samples"], "sample"), report["longest"]
    lines = [*report.get("shapes", ()), *report.get("unused", ())]
    lines += [f"{samples}, {report['tokens']:,} tokens, longest {longest:,}", *report["notes"]]
    lines += [*report.get("skipped", ()), *report.get("untrained", ())]
    for line in (*lines, *(read_report(mix_of).get("mix", ()) if mix_of else ())):
        screen.print(f"{what}: {line}", markup=False)


def first_rows(recipe: Recipe, corpus: Path) -> list[Segments]:
    """Return the documents of each of the run's first FIRST_ROWS rows."""
    stream = training_rows(recipe.data, corpus, recipe.seed)
    return [stream.row(index).segments for index in range(FIRST_ROWS)]

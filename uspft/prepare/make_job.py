"""The stages in which a recipe becomes a job before ranks start; each adds what it finds out.

    examine       what is written, and what this machine shows (prepare/examine.py)
    with_model    the model's folder and sizes
    with_data     the tokenised data, its formats and first rows; the layouts that `auto` becomes
    job_of        what ranks are given
    prepare_job   all of it for a run, with the checkpoint to go on from

Each returns the examination with more facts (`Known`), by which every `auto` is settled again.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from uspft.checkpoint.folder import (
    Checkpoint,
    CheckpointError,
    Newest,
    folder_of,
    named,
    newest,
)
from uspft.checkpoint.identity import BASE, CONTENTS, counts_samples, differences, identity_of
from uspft.config import Fault, Recipe
from uspft.config.algorithms import AUTO
from uspft.data import Corpus, formats_of
from uspft.job import Job
from uspft.launcher.meeting import Meeting
from uspft.launcher.terminal import Waiting
from uspft.lease import Lease
from uspft.parameters.source import base_digest
from uspft.prepare.data import first_rows, prepare_data, steps_of
from uspft.prepare.examine import Examined
from uspft.prepare.files import not_whole
from uspft.prepare.host import Invocation, require_here
from uspft.prepare.make_plan import chunk_prices_of, prices_of
from uspft.prepare.memory import exchange_findings
from uspft.prepare.model import examine_model, exported_tokenizer, fetched, serving_of
from uspft.prepare.output import output_of, space_needed
from uspft.prepare.weigh_strategies import knowing_memory, lengths_of, weighing


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

    keeps: as of `weighing`. Raises DataError, and Fault where no layout fits.
    """
    assert found.shape  # its config is here
    corpus, evaluation = prepare_data(found.here, found.shape, place, screen)
    rows, formats = first_rows(found.here, corpus), formats_of(found.recipe.data)
    found = found.knowing(corpus=corpus, evaluation=evaluation, rows=rows, formats=formats)
    if not found.is_open:
        return found
    found = knowing_memory(found, place.meeting)
    return weighing(found, lengths_of(found.here, corpus), keeps=keeps)


def job_of(found: Examined, place: Invocation, identity: dict[str, Any], **more: Any) -> Job:
    """Return what ranks are given of a recipe whose model and data are ready.

    identity, more: other fields of the job.
    """
    return Job(
        found.recipe,
        found.corpus,
        steps_of(found.recipe, found.corpus),
        identity,
        command=place.command,
        places=found.known.places,
        prices=prices_of(found),
        chunk_prices=chunk_prices_of(found),
        **more,
    )


STEP = "step of the checkpoint"
"""The name under which host 0 tells the others which checkpoint is whole."""


class Prepared(NamedTuple):
    """What ranks are given to run, and what is known of the run before they start."""

    found: Examined
    """The recipe, resolved as far as it can be."""
    job: Job
    checkpoint: Checkpoint | None
    """What the run goes on from."""
    damaged: list[str]
    """A line for each newer checkpoint, which is damaged."""
    needed: int
    """How many bytes the run will write."""


def prepare_job(
    found: Examined, place: Invocation, screen: Console, lease: Lease | None = None
) -> Prepared:
    """Make model and data ready, and return what ranks are given to run.

    lease: the hold on the output folder, on host 0.
    """
    require_here(found.recipe, found.loaded.recipe.launch.device, place.environment)
    found = with_model(found, place)
    recipe = found.recipe
    model = examine_model(found.here)
    if model.trains:
        screen.print(f"trains: {model.trains}", markup=False)
    needed = space_needed(recipe, model.trained, model.parameters)
    base = {BASE: base_digest(found.here.model)}
    checkpoint, damaged = _checkpoint(recipe, place.meeting, screen)
    _same(checkpoint, identity_of(recipe) | base)
    keeps = counts_samples(checkpoint.state["identity"]) if checkpoint else None
    found = with_data(found, place, screen, keeps=keeps)
    identity = identity_of(found.recipe) | base | {CONTENTS: Corpus.open(found.corpus).contents}
    _same(checkpoint, identity)
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
    return Prepared(found, job, checkpoint, damaged, needed)


def _checkpoint(recipe: Recipe, meeting: Meeting, screen: Console) -> Newest:
    """Return the checkpoint to go on from, None where the run starts anew.

    Host 0 alone compares the files with their checksums. Raises Fault where the named one, or every
    one in the output folder, is not whole.
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
    """Return the newest whole checkpoint of the output folder.

    Host 0 alone reads all of it, and the other hosts wait to hear which it is. Raises as `newest`
    and `Meeting.least` do.
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
    changed = differences(checkpoint.state["identity"], identity) if checkpoint else []
    if changed:
        raise Fault(changed)

"""The command `check`: it prints everything that is known before a run starts, and writes
nothing."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from uspft.blocks import WIDEST
from uspft.checkpoint.folder import Checkpoint, CheckpointError, folders_of
from uspft.config import Fault, InputError, Recipe
from uspft.config.inputs import ELEMENT_BYTES
from uspft.config.problems import UsageError, counted
from uspft.data.corpus.prepare import first_look
from uspft.data.files.sources import is_hub_id
from uspft.job import Job
from uspft.launcher.hosts import planned_hosts
from uspft.metrics import as_size
from uspft.prepare.examine import Examined, examine
from uspft.prepare.files import not_writable, output_of, space_finding, space_free, space_needed
from uspft.prepare.host import Invocation
from uspft.prepare.make_plan import corpus_here, counts_epochs, course_of, weighed_here
from uspft.prepare.model import ExaminedModel, examine_model, tokenizer_here
from uspft.prepare.remarks import expert_side, intervals_told, too_short

CACHE = "data.cache_dir"
SHOWN_FILES = 10
"""How many data files are listed."""


def check(target: Path, overrides: Sequence[str], place: Invocation) -> int:
    """Print what the recipe resolves to here, and what could not be checked; for a folder, which of
    its checkpoints are complete. Raises InputError."""
    if target.is_dir():
        return check_checkpoint(target, overrides, place)
    environment = place.environment
    found = examine(
        target, overrides, planned_hosts(environment), place.ranks, environment=environment
    )
    recipe, shape = found.recipe, found.shape
    with found.placed():
        if recipe.data.cache_dir is None and (wrong := not_writable(CACHE, place.cache)):
            raise Fault([wrong])
    examined = None
    named = ("adapter", "freeze", "overrides")
    asks = [f"model.{key}" for key in named if getattr(recipe.model, key)]
    if shape:
        with found.placed():
            examined = examine_model(recipe)
    elif asks:
        found.not_checked.append(f"the names in {', '.join(asks)} (no config of the model here)")
    vocabulary = shape.vocab_size if shape else None
    with found.placed(), tokenizer_here(recipe) as tokenizer:
        look = first_look(recipe.data, tokenizer, vocabulary)
        found.not_checked.extend(look.not_read)
        if shape and found.is_open:
            found = weighed_here(found, place, tokenizer, look.lengths)
            recipe = found.recipe
        job = _job(found, place, tokenizer)
        disk = _disk(recipe, examined, job) if examined else []
    if recipe.launch.device == "cuda" and not found.known.gpus:
        of = f"{counted(found.layout.ranks, 'process', 'es')}, with the figures under `hardware`"
        found.not_checked.append(f"GPUs (there is none here; what is said is for {of})")
    if not examined:
        found.not_checked.append("disk (the sizes of the model are not known here)")
    data = [*look.shapes[:SHOWN_FILES]]
    if more := len(look.shapes[SHOWN_FILES:]):
        data.append(f"... and {more:,} more files")
    lines = [f"{target}: no problem found", *(f"data: {line}" for line in (*data, *look.notes))]
    memory, unknown = found.memory
    few = too_short(recipe, job.steps) if job else ()
    lines += [*found.settled, *(f"warning: {what}" for what in (*found.wasted, *few))]
    lines += [*_model(found, examined, memory), *disk]
    lines += intervals_told(recipe, job)
    if not memory:
        found.not_checked.append(f"memory ({unknown})")
    after = place.to_type("preprocess", str(target), *overrides)
    knows = f"(a run knows the lengths of the data, or `{after}`)"
    if job is None:  # preprocess does not tell what is held out, nor what the hub has
        hub = any(is_hub_id(source.path) for source in recipe.data.train)
        known = "(a run knows them)" if hub or recipe.data.eval_fraction else knows
        found.not_checked.append(f"the steps in which epochs end {known}")
    if found.is_open:
        found.not_checked.append(f"strategies {knows}")
    print("\n".join([*lines, *(f"not checked: {thing}" for thing in found.not_checked)]))
    return 0


def _model(found: Examined, examined: ExaminedModel | None, memory: str | None) -> list[str]:
    """Return lines on the model: its sizes, its parameters (all, trained, and used per token) with
    their bytes, and the memory of a rank."""
    lines, shape, recipe = [], found.shape, found.recipe
    if shape:
        of = f", the language model of {shape.whole_type}" if shape.whole_type else ""
        heads = f"{shape.heads} query and {shape.kv_heads} KV heads"
        if shape.seeing_all:
            kv_heads, dim = shape.seeing_all
            heads += f" of {shape.head_dim}, {kv_heads} of {dim} in layers that see all"
        lines.append(
            f"model: {shape.model_type}{of}, {shape.layers} layers × {shape.hidden_size}, "
            f"{heads}, vocabulary {shape.vocab_size}"
        )
        if max(one.head_dim for one in shape.of_each_size) > WIDEST:
            lines.append(
                f"attention: on a GPU heads of more than {WIDEST} features, which no flash kernel "
                "takes, are attended with ten times slower or more, and no price counts that"
            )
    if examined:
        every, active, dtype = examined.parameters, examined.active, recipe.model.dtype
        size = {n: as_size(n * ELEMENT_BYTES[dtype]) for n in (every, active, examined.trained)}
        said = f"{every:,} in all ({size[every]} in {dtype})"
        if active < every:  # in a mixture of experts
            said += f", {active:,} active for a token ({size[active]})"
        trained = f"{examined.trained:,} trained ({size[examined.trained]})"
        lines.append(f"parameters: {said}, {trained}")
    if memory:
        lines.append(f"memory: {memory}")
    hardware = found.known.hardware_on(found.layout.ranks)
    if shape and (side := expert_side(recipe, shape, found.layout, hardware)):
        lines.append(f"experts: {side}")
    if examined and examined.trains:
        lines.append(f"trains: {examined.trains}")
    return lines


def _job(found: Examined, place: Invocation, tokenizer: str | None) -> Job | None:
    """Return a job with the steps of the run; None where they follow from data that is not
    tokenised here."""
    recipe, corpus = found.recipe, Path()
    if counts_epochs(recipe):
        # what is held out is not trained, and is chosen when the run starts
        here = None if recipe.data.eval_fraction else corpus_here(found, place, tokenizer)
        if here is None:
            return None
        corpus = here
    return Job(recipe, corpus, identity={}, **course_of(recipe, corpus))


def _disk(recipe: Recipe, examined: ExaminedModel, job: Job | None) -> list[str]:
    """Return a line on the disk space that the run needs, or a warning where this machine has less;
    another machine may have more.

    Raises Fault instead where the output folder exists here, so that the run is meant to be here.
    """
    output = output_of(recipe)
    needed = space_needed(recipe, examined.trained, examined.parameters, job.saves if job else None)
    if wrong := space_finding(recipe, needed):
        if os.path.isdir(output):
            raise Fault([wrong])
        return ["warning: {}: {}; {}".format(*wrong)]
    least = "at least " if job is None and recipe.checkpoint.keep_last is None else ""
    free = as_size(space_free(output))
    return [f"disk: writes {least}{as_size(needed)}; {free} free in {output}"]


def check_checkpoint(target: Path, overrides: Sequence[str], place: Invocation) -> int:
    """Print for each checkpoint in a folder whether it is complete.

    target: a checkpoint, `checkpoints/` or an output folder. Raises InputError with a line for each
    damaged checkpoint.
    """
    if overrides or place.ranks:
        more = overrides[0] if overrides else "--ranks"
        raise UsageError(more, "a checkpoint is checked, and not a recipe", "leave it out")
    damaged = []
    try:
        folders = folders_of(target)
    except CheckpointError as error:
        remedy = "name a recipe, a checkpoint or the output folder of a run"
        what = str(error).removeprefix(f"{target} ")
        raise UsageError(str(target), what, remedy) from error
    for folder in folders:
        try:
            found = Checkpoint.open(folder)
        except CheckpointError as error:
            damaged.append(UsageError(str(target), str(error), "go on from another checkpoint"))
            continue
        files = f"{folder}: step {found.step}, {len(found.state['sizes'])} files"
        if found.has_checksums:
            print(f"{files}, {as_size(found.size)}: every checksum is right")
        else:
            print(f"{files}: whole by their lengths and headers, and written without checksums")
    if damaged:
        raise InputError("\n".join(map(str, damaged)))
    return 0

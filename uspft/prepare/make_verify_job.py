"""The making of what `verify` compares: as many layers as one process holds, and every layout that
the recipe can run in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from uspft.config import Fault, Finding, InputError, Recipe
from uspft.config.pipeline_rules import beside_stages
from uspft.config.problems import COMMAND_LINE
from uspft.layout import Layout
from uspft.planner.layouts import MAX_LAYOUTS, Candidate, candidates, chosen
from uspft.prepare.depth import fitting_depth, memory_here, sizes_of, why_not_plain, with_depth
from uspft.prepare.examine import Examined
from uspft.prepare.gpus import require_here
from uspft.prepare.invocation import Invocation
from uspft.prepare.known import Known
from uspft.prepare.layout_findings import run_findings
from uspft.prepare.model import examine_model
from uspft.prepare.output import output_of
from uspft.prepare.pipelines import with_stages
from uspft.prepare.stages import job_of, with_data, with_model
from uspft.verify.inject import FAULTS
from uspft.verify.work import FOLDER, GRADIENT_FILES, REPORT, VerifyJob, without_extras

STEPS = 3
"""How many steps are compared where the command does not say."""


@dataclass(frozen=True)
class Asked:
    """The options of the command `verify`."""

    steps: int | None = None
    inject: str | None = None
    """The name of the fault that every layout is to show."""
    every: bool = False
    """Whether layouts beyond MAX_LAYOUTS are run too."""

    def require_known(self) -> None:
        """Check that the fault is one that can be injected. Raises InputError where it is not."""
        if self.inject is not None and self.inject not in FAULTS:
            what = f"unknown fault `{self.inject}`; write one of {', '.join(FAULTS)}"
            raise InputError(f"{COMMAND_LINE}: --inject: {what}")


def prepare_verify(
    found: Examined, place: Invocation, screen: Console, asked: Asked
) -> tuple[VerifyJob, list[Candidate], dict[str, Any]]:
    """Make model and data ready, and return what ranks run, every layout, and facts for the report.

    Layouts that are not run have a reason. Raises Fault where this host, the model or the data
    cannot be verified.
    """
    require_here(found.recipe, found.loaded.recipe.launch.device, place.environment)
    found = found.asking(without_extras)
    found = with_model(found, place)
    limit_seconds = found.recipe.launch.timeout_minutes * 60
    memory = place.meeting.least("bytes of a process", memory_here(found.recipe), limit_seconds)
    config = examine_model(found.here).config
    why_not = why_not_plain(found.here, config, memory)
    whole = config.num_hidden_layers
    assert found.shape  # its config is here
    sizes = sizes_of(found.here, config, found.shape, with_plain=why_not is None)
    kept = fitting_depth(sizes, memory)
    if kept < whole:
        what = f"its first {kept} of {whole} layers, which is what one process holds here"
        screen.print(f"model: {what}", markup=False)
        places = found.known.places
        found = found.asking(lambda recipe: with_depth(recipe, kept)).knowing_model(places)
        config = examine_model(found.here).config  # what is to be frozen may all lie beyond them
    if why_not:
        screen.print(f"plain transformers is not run: {why_not}", markup=False)
    found = with_data(found, place, screen)
    if found.why_strategies:
        screen.print(f"strategies: {found.why_strategies}", markup=False)
    job = job_of(found, place, {})
    every = _candidates(found, None if asked.every else MAX_LAYOUTS)
    work = VerifyJob(
        job,
        tuple(one.parallel for one in every if one.reason is None),
        min(asked.steps or STEPS, job.steps),
        output_of(found.recipe) / FOLDER,
        with_plain=why_not is None,
        inject=asked.inject,
    )
    return work, every, {**_facts(work, found.layout.ranks), "layers": {"kept": kept, "of": whole}}


def _candidates(found: Examined, limit: int | None) -> list[Candidate]:
    def problems(recipe: Recipe, layout: Layout) -> list[Finding]:
        wrong = beside_stages(recipe) if layout.pipeline > 1 else []
        return wrong + run_findings(recipe, layout, found.shape)

    every = chosen(candidates(found.recipe, found.layout.ranks, problems), limit)
    return [with_layers(found.recipe, one, found.known) for one in every]


def with_layers(recipe: Recipe, one: Candidate, known: Known) -> Candidate:
    """Return a layout in which each of several stages has its layers, as ranks read it."""
    recipe = recipe.model_copy(update={"parallel_config": one.parallel})
    return replace(one, parallel=with_stages(recipe, one.layout, known).parallel_config)


def _facts(work: VerifyJob, ranks: int) -> dict[str, Any]:
    recipe = work.job.recipe
    return {
        "command": work.job.command,
        "ranks": ranks,
        "device": recipe.launch.device,
        "dtype": recipe.model.dtype,
        "zero_stage": recipe.deepspeed.zero_optimization.get("stage", 1),
        "sequence_length": recipe.data.sequence_length,
        "global_batch_size": recipe.training.global_batch_size,
        "steps": work.steps,
    }


def clear_results(work: VerifyJob) -> None:
    """Make the folder of results, and delete the results that an earlier command left there.

    Nothing else is deleted, since another host may already log there. Raises Fault where the folder
    cannot be written.
    """
    try:
        work.folder.mkdir(parents=True, exist_ok=True)
        for pattern in (REPORT, "*.jsonl", GRADIENT_FILES):
            for file in work.folder.glob(pattern):
                file.unlink()
    except OSError as error:
        what = f"`{work.folder}` cannot be written: {error.strerror}"
        raise Fault([("output_dir", what, "name another folder")]) from error

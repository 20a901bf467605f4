"""`verify`: the recipe's first steps under every legal layout, beside one process."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from uspft.commands.starting import start_ranks
from uspft.config import Fault, InputError, Recipe
from uspft.config.problems import COMMAND_LINE
from uspft.job import Job
from uspft.launcher import Hosts, hosts_from
from uspft.layout import Layout
from uspft.model.fetch import fetch_model
from uspft.model.hf_config import layer_windows
from uspft.planner.auto import Work
from uspft.planner.layouts import MAX_LAYOUTS, Candidate, candidates, chosen
from uspft.planner.memory import fitting_depth, memory_here, sizes_of, why_not_plain, with_depth
from uspft.prepare.data import first_rows, prepare_data, require_here, steps_of
from uspft.prepare.examine import Examined, examine, layout_findings
from uspft.prepare.invocation import Invocation
from uspft.prepare.model import examine_model
from uspft.prepare.output import output_of
from uspft.verify.inject import FAULTS
from uspft.verify.report import Report
from uspft.verify.result import Result, results
from uspft.verify.work import LAYOUTS, PLAIN, REFERENCE, VerifyJob, without_extras

FOLDER, REPORT = "verify", "verify.json"
STEPS = 3


@dataclass(frozen=True)
class Asked:
    """The options of the command. every: beyond MAX_LAYOUTS layouts too."""

    steps: int | None = None
    inject: str | None = None
    every: bool = False


def verify(target: Path, overrides: Sequence[str], place: Invocation, asked: Asked) -> int:
    """Compare, print a table, write OUTPUT/verify/verify.json; 0 equal, 1 not.

    With `inject`, 0 where every layout shows the fault. Raises InputError before any rank starts.
    """
    _require_fault(asked.inject)
    hosts = hosts_from(place.environment)
    found = examine(target, overrides, hosts.count, None, trains=False)
    screen = Console(highlight=False, soft_wrap=True, quiet=hosts.index > 0)
    with found.placed():
        found, work, depth = _prepared(found, place, screen, asked)
    every = _candidates(found, None if asked.every else MAX_LAYOUTS)
    tried = [one for one in every if one.reason is None]
    layouts = replace(work, layouts=tuple(one.parallel for one in tried))
    if hosts.index == 0:
        with found.placed():
            _fresh(work.folder)
        screen.print(
            f"one process, then {len(tried)} layouts of {found.layout.ranks}", markup=False
        )
    try:
        code = _run(work, layouts, hosts, place)
        if code or hosts.index:
            return code
        report = _report(work, every, {**_facts(found, place, work), "layers": depth})
    finally:
        for name in work.folder.glob("*gradients.*") if hosts.index == 0 else ():
            name.unlink()
    path = work.folder / REPORT
    path.write_text(json.dumps(report.as_json(), indent=2) + "\n")
    screen.print(f"{report.text()}\nall numbers: {path}", markup=False)
    return 0 if report.ok else 1


def _run(work: VerifyJob, layouts: VerifyJob, hosts: Hosts, place: Invocation) -> int:
    """The one process on the first host, then the layouts on all; an exit code."""
    if hosts.index == 0:
        code = _start(work.alone(), Hosts(), place, "one-process")
        if code:
            return code
        (reference,) = results(work.folder / REFERENCE)
        if not reference.measured.losses:
            what = f"one process already fails: {reference.measured.stopped}"
            print(f"{what}; nothing was compared", file=sys.stderr)
            return 1
    return _start(layouts, hosts, place, "logs")


def _require_fault(name: str | None) -> None:
    if name is not None and name not in FAULTS:
        words = ", ".join(FAULTS)
        raise InputError(f"{COMMAND_LINE}: --inject: unknown fault `{name}`; write one of {words}")


def _prepared(
    found: Examined, place: Invocation, screen: Console, asked: Asked
) -> tuple[Examined, VerifyJob, dict[str, int]]:
    """With the recipe as it would train; what ranks do but for the layout; layers kept, and all."""
    require_here(found.recipe)
    found = found.knowing_model(fetch_model(found.recipe.model))
    config = examine_model(found.here).config
    local, with_plain, depth = _fitted(found.here, config, screen)
    corpus, _ = prepare_data(
        local.model_copy(update={"data": local.data.model_copy(update={"eval": None})}),
        config.vocab_size,
        place,
        screen,
    )
    job = without_extras(Job(local, corpus, steps_of(local, corpus), {}, command=place.command))
    steps = min(asked.steps or STEPS, job.steps)
    folder = output_of(found.recipe) / FOLDER
    work = VerifyJob(job, (), steps, folder, with_plain=with_plain, inject=asked.inject)
    rows = Work(first_rows(local, corpus), layer_windows(config))
    return found.knowing(work=rows), work, depth


def _fitted(recipe: Recipe, config: Any, screen: Console) -> tuple[Recipe, bool, dict[str, int]]:
    """The recipe with as many layers as one process holds, and whether plain transformers fits."""
    memory = memory_here(recipe)
    without = why_not_plain(recipe, config, memory)
    whole = config.num_hidden_layers
    kept = fitting_depth(sizes_of(recipe, config, with_plain=without is None), memory)
    if kept < whole:
        screen.print(
            f"model: its first {kept} of {whole} layers, which is what one process holds here",
            markup=False,
        )
        recipe = with_depth(recipe, kept)
        examine_model(recipe)  # what is to be frozen may all lie beyond them
    if without:
        screen.print(f"plain transformers is not run: {without}", markup=False)
    return recipe, without is None, {"kept": kept, "of": whole}


def _candidates(found: Examined, limit: int | None) -> list[Candidate]:
    def problems(recipe: Recipe, layout: Layout) -> list[tuple[str, str, str]]:
        return layout_findings(recipe, layout, found.shape)

    return chosen(candidates(found.recipe, found.layout.ranks, problems), limit)


def _start(work: VerifyJob, hosts: Hosts, place: Invocation, logs: str) -> int:
    with tempfile.TemporaryDirectory(prefix="uspft-") as folder:
        work.write(Path(folder))
        return start_ranks(
            [folder, "verify"],
            work.job.recipe,
            hosts,
            place,
            logs=work.folder / logs,
            on_stop="nothing is saved",
        )


def _fresh(folder: Path) -> None:
    """A folder without what an earlier one of this command found; another host may log there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for pattern in (REPORT, "*.jsonl", "*gradients.*"):
            for file in folder.glob(pattern):
                file.unlink()
    except OSError as error:
        what = f"`{folder}` cannot be written: {error.strerror}"
        raise Fault([("output_dir", what, "name another folder")]) from error


def _facts(found: Examined, place: Invocation, work: VerifyJob) -> dict[str, Any]:
    recipe = found.recipe
    return {
        "command": place.command,
        "ranks": found.layout.ranks,
        "device": recipe.launch.device,
        "dtype": recipe.model.dtype,
        "zero_stage": recipe.deepspeed.zero_optimization.get("stage", 1),
        "sequence_length": recipe.data.sequence_length,
        "global_batch_size": recipe.training.global_batch_size,
        "steps": work.steps,
    }


def _report(work: VerifyJob, every: Sequence[Candidate], facts: dict[str, Any]) -> Report:
    (reference,) = results(work.folder / REFERENCE)
    plain = results(work.folder / PLAIN)
    waiting = iter(results(work.folder / LAYOUTS))
    layouts: list[tuple[Candidate, Result | None]] = [
        (one, next(waiting) if one.reason is None else None) for one in every
    ]
    found = (reference.measured, plain[0] if plain else None)
    return Report.of(facts, found, layouts, work.inject)

"""What a report shows of a run: what it has left in its output folder, also while it is going on,
and what the planner predicts of its step."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from uspft.commands.plan_pages import machine_line, parts_table
from uspft.config import read
from uspft.config.problems import InputError, UsageError
from uspft.config.strategies import strategies_of
from uspft.layout import Layout
from uspft.metrics.trackers import numbers
from uspft.planner.rank import Ranked, ranked
from uspft.prepare.examine import Examined
from uspft.prepare.host import Invocation
from uspft.prepare.make_plan import (
    examine_for_plan,
    hardware_of,
    mix_seconds,
    own_way,
    sample_of,
    step_of,
)
from uspft.written import ENVIRONMENT, INCIDENTS, METRICS, RECIPE

JournalLine = Mapping[str, Any]
UNDER = "seconds_under/"
"""Prefix of the fields that give the seconds under each strategy."""
HAPPENED = {
    "resumed_from_step": "resumed from step",
    "after_step": "started again after step",
    "step": "bad step",
}
"""The fields whose value is the step of an event, with the event's label; a save has `step` too,
but no `why`, and is not shown."""
MOST = 1e100
"""Larger numbers are not drawn."""
REMEDY = "name the output folder of a run that has taken a step"


@dataclass(frozen=True)
class ReportedRun:
    """A run, as read from its output folder."""

    output: Path
    name: str
    """The folder's name, with its parents' names where two runs have the same."""
    steps: Sequence[JournalLine]
    """The records of training steps, by step."""
    evaluations: Sequence[JournalLine]
    events: Sequence[JournalLine]
    """Other records: saves, resumptions, restarts, and lines on the data."""
    incidents: Sequence[JournalLine]
    environment: JournalLine
    recipe: str
    """The resolved recipe's text; empty without one."""
    notes: Sequence[str]
    """Messages on what could not be read."""

    def of(self, name: str) -> list[tuple[float, float]]:
        """Return the points of a field such as `comm_bytes/ring`, by step, without null, text and
        numbers that are not finite or too large.
        """
        pairs = ((step, told.get(name, math.nan)) for step, told in self._numbers)
        return [(step, float(value)) for step, value in pairs if abs(value) < MOST]

    def names(self, name: str) -> list[str]:
        """Return the field of this name, or, for a name that ends in `/`, all fields that begin
        with it, in order of appearance.
        """
        if not name.endswith("/"):
            return [name]
        every = dict.fromkeys(one for _, told in self._numbers for one in told)
        return [one for one in every if one.startswith(name)]

    @cached_property
    def _numbers(self) -> list[tuple[int, Mapping[str, float]]]:
        return [(one["step"], numbers(one)) for one in (*self.steps, *self.evaluations)]

    @property
    def gpu(self) -> str:
        """The first GPU's name; empty on CPUs, where the memory field is the process's resident
        size.
        """
        gpus = self.environment.get("gpus")
        return str(gpus[0]) if isinstance(gpus, list) and gpus else ""

    @property
    def marks(self) -> list[tuple[float, str]]:
        """The steps at which something happened, with a label."""
        found = set()
        for record in (*self.events, *self.incidents):
            key = next((key for key in HAPPENED if key in record), None)
            if key and _is_step(record, key) and (key != "step" or "why" in record):
                why = f": {record['why']}" if "why" in record else ""
                found.add((record[key], f"{HAPPENED[key]} {record[key]}{why}"))
        return sorted(found)


def read_runs(outputs: Sequence[Path]) -> list[ReportedRun]:
    """Return the runs of output folders. Raises UsageError for a folder without a run."""
    names = [output.resolve().name for output in outputs]
    each = zip(outputs, names, strict=True)
    return [_read(output, str(output) if names.count(n) > 1 else n) for output, n in each]


def _read(output: Path, name: str) -> ReportedRun:
    if not (output / METRICS).is_file():
        what = f"has no {METRICS}" if output.is_dir() else "is no folder"
        raise UsageError(str(output), what, REMEDY)
    records, notes = _records(output / METRICS)
    steps = {r["step"]: _flat(r) for r in records if "learning_rate" in r and _is_step(r)}
    if not steps:
        told = "; ".join([f"{METRICS} has no training step", *notes])
        raise UsageError(str(output), told, REMEDY)
    evaluations = [r for r in records if "eval_loss" in r and _is_step(r)]
    events = [r for r in records if "learning_rate" not in r and "eval_loss" not in r]
    incidents: list[JournalLine] = []
    if (output / INCIDENTS).is_file():
        every, more = _records(output / INCIDENTS)
        # numbered as in the journal
        incidents = [one for one in every if "resumed_from_step" not in one]
        notes += more
    environment, recipe = {}, ""
    try:
        found = json.loads((output / ENVIRONMENT).read_text("utf-8"))
        environment = found if isinstance(found, dict) else {}
    except (OSError, ValueError) as error:
        notes.append(f"{ENVIRONMENT} cannot be read: {getattr(error, 'strerror', error)}")
    try:
        recipe = (output / RECIPE).read_text("utf-8", errors="replace")
    except OSError as error:
        notes.append(f"{RECIPE} cannot be read: {error.strerror}")
    in_order = [steps[step] for step in sorted(steps)]
    return ReportedRun(
        output, name, in_order, evaluations, events, incidents, environment, recipe, notes
    )


def _flat(record: JournalLine) -> JournalLine:
    """Return a step's record with its list of seconds per strategy as separate fields."""
    listed = record.get("strategies")
    every = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    under = {str(one.get("name")): one.get("seconds") for one in every}
    return {**record, UNDER.removesuffix("/"): under}


def _is_step(record: JournalLine, key: str = "step") -> bool:
    value = record.get(key)
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST


def _records(file: Path) -> tuple[list[JournalLine], list[str]]:
    """Return the objects of a JSON Lines file, and notes on other lines; an incomplete last line is
    not an error, since the file may still be written."""
    found: list[JournalLine] = []
    damaged: list[str] = []
    lines = file.read_text("utf-8", errors="replace").split("\n")
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict):
            found.append(record)
        elif line.strip() and number < len(lines):
            damaged.append(str(number))
    few = ", ".join(damaged[:10]) + (" …" if len(damaged) > 10 else "")
    what = "line" if len(damaged) == 1 else f"{len(damaged)} lines"
    return found, [f"{file.name}: {what} {few} damaged, left out"] if damaged else []


SENT = "comm_bytes/"
KINDS = {kind: kind for kind in ("all_to_all", "ring", "gather", "tensor", "experts")}
KINDS["state"] = "states"
"""The kinds of comm_bytes that the planner predicts for the busiest rank, each with the part of a
step that sends them."""
NO_KIND = "the planner does not count it, or not as the busiest rank sends it"
ALONE = "not predicted: of several layouts in a step other numbers than its seconds"


@dataclass(frozen=True)
class Predicted:
    """The predictions for a run, and why others are missing."""

    numbers: Mapping[str, float] = field(default_factory=dict)
    why_not: Mapping[str, str] = field(default_factory=dict)
    """Why a number is not predicted, by its name."""
    lines: tuple[str, ...] = ()
    """Lines on the layout, the hardware, and why nothing more is predicted."""
    parts: str = ""
    """The predicted step by part, as `plan` prints it."""
    layout: Layout | None = None
    experts: int = 1
    """Experts in a layer."""


def predicted_of(run: ReportedRun, place: Invocation) -> Predicted:
    """Return the predictions for a run from its output folder; nothing is written."""
    file, ranks = run.output / RECIPE, run.environment.get("ranks")
    if not run.recipe or not isinstance(ranks, int):
        return not_predicted(f"{RECIPE} or the number of ranks is not there")
    try:
        processes = read(file).recipe.launch.processes
        hosts = ranks // processes if isinstance(processes, int) else 1
        return predicted(examine_for_plan(file, (), max(1, hosts), ranks), place)
    except InputError as error:
        return not_predicted(str(error))


def not_predicted(why: str) -> Predicted:
    """Return predictions without numbers, and why."""
    return Predicted(lines=tuple(f"not predicted: {line}" for line in why.splitlines()))


def predicted(found: Examined, place: Invocation) -> Predicted:
    """Return the predictions for a recipe's step. Raises InputError."""
    told = tuple(found.settled)
    if strategies_of(found.recipe):
        if seconds := mix_seconds(found, place):
            return Predicted({"step_seconds": seconds}, lines=(*told, ALONE))
        unknown = not_predicted("the lengths of the data are not known here").lines
        return Predicted(lines=(*told, *unknown))
    step, hardware = step_of(found), hardware_of(found)
    step = replace(step, sample=sample_of(found, place))
    one = ranked(step, own_way(found), hardware, own=True)
    numbers, why_not = _numbers(one)
    lines = (*told, machine_line(hardware, found.layout.ranks))
    return Predicted(numbers, why_not, lines, parts_table(one), found.layout, step.model.experts)


def _numbers(one: Ranked) -> tuple[dict[str, float], dict[str, str]]:
    """Return the predicted numbers by name, and why others are not predicted."""
    numbers, why_not = {"step_seconds": one.seconds}, {}
    numbers["tokens_per_second"] = one.tokens_per_second_per_rank * one.layout.ranks
    if (mfu := one.mfu) is None:
        why_not["mfu"] = "no maker says what the device's peak is"
    else:
        numbers["mfu"] = mfu
    numbers["peak_memory_bytes"] = one.memory.peak_bytes
    for kind, part in KINDS.items():
        sent = one.time.bytes_of(part)
        # the planner has an all-reduce's whole elements, of which each rank sends a share
        if kind == "tensor":
            sent *= 0 if one.layout.is_mesh else 2 - 2 / one.layout.tensor
        if sent:
            numbers[SENT + kind] = sent
    return numbers, why_not

"""What the planner predicts of a run's step by its resolved recipe, under the names of
metrics.jsonl."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from uspft.commands.plan_pages import machine_line, parts_table
from uspft.commands.report_runs import ReportedRun
from uspft.config import read
from uspft.config.problems import InputError
from uspft.config.strategies import strategies_of
from uspft.layout import Layout
from uspft.planner.memory import options_of
from uspft.planner.rank import Ranked, ranked
from uspft.prepare.examine import Examined
from uspft.prepare.invocation import Invocation
from uspft.prepare.make_plan import examine_for_plan, hardware_of, own_way, step_of
from uspft.prepare.weigh_strategies import sample_of, weighed_here
from uspft.written import RECIPE

SENT = "comm_bytes/"
KINDS = {kind: kind for kind in ("all_to_all", "ring", "gather", "tensor", "experts")}
KINDS["state"] = "states"
"""The kinds of comm_bytes that the planner counts as the busiest rank sends them, and the name of
the part of a step that has them."""
NO_KIND = "the planner does not count it, or not as the busiest rank sends it"


@dataclass(frozen=True)
class Predicted:
    """What is predicted, and why the rest is not."""

    numbers: Mapping[str, float] = field(default_factory=dict)
    why_not: Mapping[str, str] = field(default_factory=dict)
    """By name why a number is not predicted; "" stands for all others."""
    lines: tuple[str, ...] = ()
    """The layout and the hardware, for a person."""
    parts: str = ""
    """The predicted step by part, as `plan` prints it."""
    layout: Layout | None = None
    experts: int = 1
    """Experts of a layer."""

    def reason(self, name: str) -> str:
        """Return why a number is not predicted."""
        if name.startswith(SENT) and self.numbers and "" not in self.why_not:
            return NO_KIND
        return self.why_not.get(name) or self.why_not.get("", "")


def predicted_of(run: ReportedRun, place: Invocation) -> Predicted:
    """Return what is predicted of a run by what stands in its folder; nothing is written."""
    file, ranks = run.output / RECIPE, run.environment.get("ranks")
    if not run.recipe or not isinstance(ranks, int):
        return Predicted(why_not={"": f"{RECIPE} or the number of ranks is not there"})
    try:
        processes = read(file, ()).loaded.recipe.launch.processes
        hosts = ranks // processes if isinstance(processes, int) else 1
        return predicted(examine_for_plan(file, (), max(1, hosts), ranks), place)
    except InputError as error:
        return Predicted(why_not={"": str(error)})


def predicted(found: Examined, place: Invocation) -> Predicted:
    """Return what is predicted of a recipe's step. Raises InputError."""
    told = tuple(found.settled)
    experts = found.shape.experts if found.shape else 1
    if strategies_of(found.recipe):
        weighed = weighed_here(found, place, ()).known.weighed
        seconds = weighed.choice.mix_seconds if weighed and weighed.choice.mix else None
        numbers = {} if seconds is None else {"step_seconds": seconds}
        several = "several layouts in a step: `plan` prices their seconds alone"
        return Predicted(numbers, {"": several}, told, "", found.layout, experts)
    step, hardware = step_of(found), hardware_of(found)
    step = replace(step, sample=sample_of(found, place))
    options = options_of(found.recipe, found.layout)
    one = ranked(step, own_way(found), hardware, options, own=True)
    numbers, why_not = _numbers(one)
    lines = (*told, machine_line(hardware, found.layout.ranks))
    return Predicted(numbers, why_not, lines, parts_table(one), found.layout, experts)


def _numbers(one: Ranked) -> tuple[dict[str, float], dict[str, str]]:
    """Return what is predicted, and why the rest is not."""
    numbers, why_not = {"step_seconds": one.seconds}, {}
    numbers["tokens_per_second"] = one.tokens_per_second_per_rank * one.layout.ranks
    if (mfu := one.mfu(one.hardware)) is None:
        why_not["mfu"] = "no maker says what the device's peak is"
    else:
        numbers["mfu"] = mfu
    if doubts := one.memory.unpredicted:
        why_not["peak_memory_bytes"] = f"nothing predicts it with {' or with '.join(doubts)}"
    else:
        numbers["peak_memory_bytes"] = one.memory.peak_bytes
    for kind, part in KINDS.items():
        sent = one.time.bytes_of(part)
        if kind == "tensor":  # of a sum the planner has the elements, of which ranks send shares
            sent *= 0 if one.layout.is_mesh else 2 - 2 / one.layout.tensor
        if sent:
            numbers[SENT + kind] = sent
    return numbers, why_not

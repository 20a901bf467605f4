"""Measurements of pipelines → tables and sentences, and whether the bounds hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations
from statistics import median
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

from benchmarks.lab.machine import measured_on
from benchmarks.lab.results import NOT_YET
from benchmarks.lab.tables import listed, markdown, span
from benchmarks.pipelines import computing, copies
from benchmarks.pipelines.between import LAYOUTS
from benchmarks.pipelines.between import Setting as Between
from benchmarks.pipelines.counted import EQUAL_TIME, EQUAL_TOKENS, Case
from benchmarks.pipelines.sleeping import RANKS, SCHEDULES, Contender, simulated
from benchmarks.pipelines.sleeping import Setting as Sleeping

MIB = 2**20
MOST_SLOWER = 1.10
"""A step may take so many times what is simulated."""
APART = 1.15
"""Schedules whose simulated steps differ by more are faster and slower in that order."""
MOST_OFF = 0.02
"""So far from the formula, relatively, may be what is counted under GPipe and 1F1B, and in chunks
on the first rank."""
ALIKE = 1.05
"""Repeats of one schedule that computes may differ by so much; else there is no verdict."""
LEAST_GONE = 0.7
"""So much of the way to their bound have copies by turns to go."""


Schedule = TypeVar("Schedule", Contender, computing.Contender)


class Step(NamedTuple, Generic[Schedule]):
    """A contender's step, measured in each round, and simulated."""

    one: Schedule
    seconds: list[float]
    simulated: float
    costs: Mapping[str, float] = MappingProxyType({})
    """By kind, what all of a micro-batch's actions take on the mean, on all ranks; of steps that
    compute."""

    @property
    def measured(self) -> float:
        return float(median(self.seconds))

    @property
    def ratio(self) -> float:
        return self.measured / self.simulated

    @property
    def spread(self) -> float:
        return max(self.seconds) / min(self.seconds)


def too_slow(steps: list[Any]) -> list[str]:
    """Return which steps are slower than simulated by more than the bound, as sentences."""
    return [
        f"{step.one.name} takes {step.ratio:.2f} times what is simulated"
        for step in steps
        if step.ratio > MOST_SLOWER
    ]


def steps_of(part: dict[str, Any]) -> list[Step[Contender]]:
    """Return the steps of all contenders, simulated with what the same run slept and sent."""
    setting, measured = Sleeping.of(part["setting"]), part["measured"]
    found = []
    for one in setting.contenders:
        record = measured["contenders"][one.name]
        whole = SCHEDULES[one.schedule].chunks == 1
        message = median(measured["messages" if whole else "of chunks"])
        predicted = simulated(one, record["slept"], message)
        found.append(Step(one, record["seconds"], predicted))
    return found


def apart(steps: list[Step[Contender]]) -> Iterator[tuple[Step[Contender], Step[Contender]]]:
    """Yield the pairs, faster one first, that are simulated to be apart at as many
    micro-batches."""
    for pair in combinations(steps, 2):
        fast, slow = sorted(pair, key=lambda step: step.simulated)
        same = fast.one.micro_batches == slow.one.micro_batches
        if same and slow.simulated > APART * fast.simulated:
            yield fast, slow


def wrong_steps(part: dict[str, Any]) -> list[str]:
    """Return what is not as the simulator says, as sentences."""
    steps = steps_of(part)
    found = too_slow(steps)
    for fast, slow in apart(steps):
        if fast.measured >= slow.measured:
            found.append(f"{fast.one.name} is not faster than {slow.one.schedule}")
    return found


def wrong_bytes(part: dict[str, Any]) -> list[str]:
    """Return which ranks' bytes are not those of the formula, as sentences."""
    return [
        f"{name}, rank {rank}: {have:,} bytes, and {want:,} by the formula"
        for name in ("gpipe", "1f1b", EQUAL_TOKENS, EQUAL_TIME)
        for rank, (have, want) in enumerate(_pairs(part["by_schedule"].get(name)))
        if abs(have / want - 1) > MOST_OFF
    ]


def _pairs(one: dict[str, Any] | None) -> list[tuple[int, int]]:
    return list(zip(one["counted_bytes"], one["predicted_bytes"], strict=True)) if one else []


def schedules_table(part: dict[str, Any]) -> str:
    """Lay out seconds of steps beside the simulator's as Markdown."""
    heads = ["schedule", "micro-batches", "s a step", "least and most", "simulated", "÷ simulated"]
    rows = [
        [
            step.one.schedule,
            str(step.one.micro_batches),
            f"{step.measured:.2f}",
            span(step.seconds),
            f"{step.simulated:.2f}",
            f"{step.ratio:.3f}",
        ]
        for step in steps_of(part)
    ]
    return markdown(heads, rows)


def schedules_sentence(part: dict[str, Any]) -> str:
    """Say how well the simulator foresees steps."""
    steps, setting = steps_of(part), Sleeping.of(part["setting"])
    pairs = list(apart(steps))
    right = sum(fast.measured < slow.measured for fast, slow in pairs)
    message = median(part["measured"]["messages"])
    return (
        f"A forward sleeps {1e3 * setting.forward_seconds:.0f} ms, a backward twice as long, and a "
        f"message of {setting.message_bytes / MIB:g} MiB is under way for {1e3 * message:.0f} ms "
        f"({setting.mbit} Mbit/s). Steps take {min(step.ratio for step in steps):.2f} to "
        f"{max(step.ratio for step in steps):.2f} of what is simulated; of {len(pairs)} pairs that "
        f"are simulated to be {APART - 1:.0%} apart, {right} are in that order."
    )


def bytes_table(part: dict[str, Any]) -> str:
    """Lay out counted bytes of activations beside the formula's as Markdown."""
    ranks = [f"rank {rank}, MiB" for rank in range(RANKS)]
    heads = ["schedule", *ranks, "÷ formula", "inputs kept"]
    rows = []
    for name, one in part["by_schedule"].items():
        pairs = _pairs(one)
        cells = [f"{have / MIB:,.0f}" for have, _ in pairs]
        ratios = span([have / want for have, want in pairs], 3)
        rows.append([name, *cells, ratios, ", ".join(map(str, one["inputs"]))])
    return markdown(heads, rows)


def between_table(part: dict[str, Any]) -> str:
    """Lay out what layouts of two hosts take, send and hold as Markdown."""
    heads = [
        "layout",
        "ZeRO",
        "s a step",
        "least and most",
        "MiB from a host",
        "MiB held by a rank",
    ]
    rows = []
    for name, one in part["measured"].items():
        held = span([size / MIB for size in one["held_bytes"]], 1)
        sent = f"{median(one['host_bytes']) / MIB:.1f}"
        took = f"{median(one['seconds']):.2f}"
        rows.append([name, str(LAYOUTS[name].zero), took, span(one["seconds"]), sent, held])
    return markdown(heads, rows)


def between_sentence(part: dict[str, Any]) -> str:
    """Say what stages across hosts take beside the layouts without stages."""
    took = {name: median(one["seconds"]) for name, one in part["measured"].items()}
    sent = {name: median(one["host_bytes"]) for name, one in part["measured"].items()}
    best = min((name for name in took if "stages" in name), key=lambda name: took[name])
    others = [name for name in took if "stages" not in name]
    more = listed([f"{took[name] / took[best]:.1f} ({name})" for name in others])
    least = min(sent[name] for name in others) / sent[best]
    return (
        f"Of those with stages `{best}` is the fastest. Without stages a step takes {more} times "
        f"as long, and a host sends at least {least:.0f} times as much."
    )


def rows_sentence(part: dict[str, Any]) -> str:
    """Say how many rows' activations the first rank keeps in chunks, where 1F1B keeps those of as
    many as there are ranks."""
    every = {name: one["counted_bytes"][0] for name, one in part["by_schedule"].items()}
    rows = {name: RANKS * size / every["1f1b"] for name, size in every.items()}
    sizes = ", ".join(f"{size:,}" for size in part["chunks"][EQUAL_TIME])
    return (
        f"{Case(**part['case']).sentence}. Where whole rows under 1F1B are {RANKS} rows' "
        f"activations on the first rank, chunks of equal tokens are {rows[EQUAL_TOKENS]:.2f}, and "
        f"of equal time ({sizes} tokens) {rows[EQUAL_TIME]:.2f}: keys, values and the sums of "
        "their gradients are among them."
    )


def computed(part: dict[str, Any]) -> list[Step[computing.Contender]]:
    """Return the steps of all contenders that compute."""
    setting, measured = computing.Setting.of(part["setting"]), part["measured"]
    found = []
    for one in setting.contenders:
        record = measured["contenders"][one.name]
        message = median(measured["messages"][str(computing.message_bytes(setting, one))])
        costs = {"forward": 0.0, "backward": 0.0}
        for action, seconds in computing.costs_of(one, record["took"]).items():
            costs[action.kind] += seconds / one.micro_batches
        predicted = computing.simulated(one, record["took"], message)
        found.append(Step(one, record["seconds"], predicted, costs))
    return found


def _plain(
    every: list[Step[computing.Contender]], of: Step[computing.Contender]
) -> Step[computing.Contender]:
    """Return the step of 1F1B with the same rows and micro-batches."""
    plain = of.one._replace(schedule="1f1b")
    return next(step for step in every if step.one == plain)


def computing_table(part: dict[str, Any]) -> str:
    """Lay out steps that compute as Markdown."""
    heads = ["rows of", "micro-batches", "schedule", "s a step", "least and most", "÷ simulated"]
    heads += ["÷ 1F1B", "at equal costs", "forwards ÷ 1F1B's", "backwards"]
    every, rows = computed(part), []
    for step in every:
        plain = _plain(every, step)
        equal = [computing.of_equal_costs(one.one) for one in (step, plain)]
        lost = [f"{step.costs[kind] / plain.costs[kind]:.2f}" for kind in ("forward", "backward")]
        cells = [f"{step.one.tokens:,}", str(step.one.micro_batches), step.one.schedule]
        cells += [f"{step.measured:.2f}", span(step.seconds), f"{step.ratio:.3f}"]
        cells += [f"{step.measured / plain.measured:.2f}", f"{equal[0] / equal[1]:.2f}", *lost]
        rows.append(cells)
    return markdown(heads, rows)


def wrong_computing(part: dict[str, Any]) -> list[str]:
    """Return which steps are slower than simulated by more than the bound, as sentences; none where
    repeats differ too much for a verdict."""
    every = computed(part)
    return [] if max(step.spread for step in every) > ALIKE else too_slow(every)


def computing_sentence(part: dict[str, Any]) -> str:
    """Say how well the simulator foresees steps that compute, if their repeats are alike."""
    every, setting = computed(part), computing.Setting.of(part["setting"])
    ratios = span([step.ratio for step in every])
    unlike = [step for step in every if step.spread > ALIKE]
    said = f"Steps take {ratios} of what is simulated of their own actions' medians."
    if unlike:
        worst = max(unlike, key=lambda step: step.spread)
        said += (
            f" Repeats of one schedule differ by up to {worst.spread - 1:.0%} ({worst.one.name}): "
            "there is no verdict."
        )
    return f"{said} {setting.sentence}; medians of {setting.rounds} rounds."


def copies_table(part: dict[str, Any]) -> str:
    """Lay out copies by turns beside what bounds them as Markdown."""
    setting, seconds = copies.Setting.of(part["setting"]), part["measured"]["seconds"]
    middle = {name: median(each) for name, each in seconds.items()}
    both = middle[copies.COMPUTATION], middle[copies.TRANSFERS]
    rows = []
    alone = [copies.COMPUTATION, copies.TRANSFERS]
    alone += [copies.AT_ONCE] * (copies.AT_ONCE in seconds)  # a record from before has none
    titles = {str(n): f"{n} copies" if n > 1 else "whole" for n in setting.copies}
    for name in (*alone, *titles):
        cells = [f"{middle[name]:.2f}", span(seconds[name])]
        told = ["", "", ""]
        if name.isdigit() and name != "1":
            least = copies.bound(*both, int(name))
            gone = [copies.way_gone(seconds, int(name), one) for one in (None, *alone[2:])]
            told = [f"{least:.2f}", *(f"{each:.0%}" for each in gone), ""][:3]
        rows.append([titles.get(name, name), *cells, *told])
    heads = ["what runs", "s", "least and most", "bound", "of the way", "of that on one core"]
    return markdown(heads, rows)


def wrong_copies(part: dict[str, Any]) -> list[str]:
    """Return whether copies hide less than they are to, as sentences."""
    setting, seconds = copies.Setting.of(part["setting"]), part["measured"]["seconds"]
    found = {number: copies.way_gone(seconds, number) for number in setting.copies if number > 1}
    return [
        f"{number} copies go {gone:.0%} of the way to their bound"
        for number, gone in found.items()
        if gone < LEAST_GONE
    ]


def figures(result: dict[str, Any]) -> dict[str, str]:
    """Return what pages show of pipelines.json, by name, as Markdown."""
    found = dict.fromkeys(("chunks", "chunks simulated", "chunks measured"), NOT_YET)
    found |= dict.fromkeys(("computing", "computing simulated", "computing measured"), NOT_YET)
    found |= dict.fromkeys(("copies", "copies measured"), NOT_YET)
    if part := result.get("chunks"):
        found["chunks"] = schedules_table(part)
        found["chunks simulated"] = schedules_sentence(part)
        found["chunks measured"] = measured_on([part])
    if part := result.get("chunk bytes"):
        found["chunk bytes"] = bytes_table(part)
        found["chunk bytes case"] = rows_sentence(part)
    if part := result.get("computing"):
        found["computing"] = computing_table(part)
        found["computing simulated"] = computing_sentence(part)
        found["computing measured"] = measured_on([part])
    if part := result.get("copies"):
        found["copies"] = copies_table(part)
        of = copies.Setting.of(part["setting"]).sentence
        found["copies measured"] = f"{measured_on([part])} {of}."
    if part := result.get("schedules"):
        found["schedules"] = schedules_table(part)
        found["simulated"] = schedules_sentence(part)
        found["schedules measured"] = measured_on([part])
    if part := result.get("bytes"):
        found["bytes"] = bytes_table(part)
        found["bytes case"] = Case(**part["case"]).sentence + "."
    if part := result.get("between"):
        found["between"] = between_table(part)
        found["stages between hosts"] = between_sentence(part)
        found["between measured"] = (
            f"{measured_on([part])} {Between.of(part['setting']).sentence}, float32."
        )
    return found

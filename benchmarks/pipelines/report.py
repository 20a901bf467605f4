"""Measurements of pipelines → tables and sentences, and whether the bounds hold."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from statistics import median
from typing import Any, NamedTuple

from benchmarks.lab.machine import measured_on
from benchmarks.lab.tables import listed, markdown, span
from benchmarks.pipelines.between import LAYOUTS
from benchmarks.pipelines.between import Setting as Between
from benchmarks.pipelines.counted import Case
from benchmarks.pipelines.sleeping import RANKS, Contender, simulated
from benchmarks.pipelines.sleeping import Setting as Sleeping

MIB = 2**20
MOST_SLOWER = 1.10
"""A step may take so many times what is simulated."""
APART = 1.15
"""Schedules whose simulated steps differ by more are faster and slower in that order."""
MOST_OFF = 0.02
"""So far from the formula, relatively, may be what is counted under GPipe and 1F1B."""


class Step(NamedTuple):
    """A contender's step, measured in each round, and simulated."""

    one: Contender
    seconds: list[float]
    simulated: float

    @property
    def measured(self) -> float:
        return float(median(self.seconds))

    @property
    def ratio(self) -> float:
        return self.measured / self.simulated


def steps_of(part: dict[str, Any]) -> list[Step]:
    """Return the steps of all contenders, simulated with what the same run slept and sent."""
    setting, measured = Sleeping.of(part["setting"]), part["measured"]
    message = median(measured["messages"])
    found = []
    for one in setting.contenders:
        record = measured["contenders"][one.name]
        predicted = simulated(one, record["slept"], message)
        found.append(Step(one, record["seconds"], predicted))
    return found


def apart(steps: list[Step]) -> Iterator[tuple[Step, Step]]:
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
    found = [
        f"{step.one.name} takes {step.ratio:.2f} times what is simulated"
        for step in steps
        if step.ratio > MOST_SLOWER
    ]
    for fast, slow in apart(steps):
        if fast.measured >= slow.measured:
            found.append(f"{fast.one.name} is not faster than {slow.one.schedule}")
    return found


def wrong_bytes(part: dict[str, Any]) -> list[str]:
    """Return which ranks' bytes are not those of the formula, as sentences."""
    return [
        f"{name}, rank {rank}: {have:,} bytes, and {want:,} by the formula"
        for name in ("gpipe", "1f1b")
        for rank, (have, want) in enumerate(_pairs(part["by_schedule"][name]))
        if abs(have / want - 1) > MOST_OFF
    ]


def _pairs(one: dict[str, Any]) -> list[tuple[int, int]]:
    return list(zip(one["counted_bytes"], one["predicted_bytes"], strict=True))


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


def figures(result: dict[str, Any]) -> dict[str, str]:
    """Return what pages show of pipelines.json, by name, as Markdown; of the parts it has."""
    found = {}
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

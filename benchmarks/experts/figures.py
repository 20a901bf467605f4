"""What was counted and measured of experts → tables, and whether the order is as predicted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from statistics import median
from typing import Any

from benchmarks.experts.counted import DEGREES, Point, crossing, formula
from benchmarks.experts.measured import HostsCase
from benchmarks.lab.machine import measured_on
from benchmarks.lab.tables import as_tokens, listed, markdown, span
from benchmarks.planning.judge import APART

GIB = 1 << 30
CLOSE = 0.02
"""How far the crossover of what is counted may be from the formula's, and memory from what is
predicted."""


def points_of(records: Sequence[dict[str, Any]]) -> list[Point]:
    return [Point(**record) for record in records]


def bytes_table(points: Sequence[Point]) -> str:
    """Return by model and tokens what a rank sends for a layer, dispatch and ZeRO-3 together."""
    cells = {(one.model, one.tokens, one.experts): one for one in points}
    heads = ["GiB sent for a layer", "tokens", "local", *(f"E {d}" for d in DEGREES[1:])]
    lines = []
    for model, tokens in dict.fromkeys((one.model, one.tokens) for one in points):
        sent = [cells[model, tokens, degree].sent / GIB for degree in DEGREES]
        best = min(sent)
        shown = [f"**{one:.2f}**" if one == best else f"{one:.2f}" for one in sent]
        lines.append([model.split("/")[1], as_tokens(tokens), *shown])
    return markdown(heads, lines)


def memory_table(points: Sequence[Point]) -> str:
    """Return by model and tokens the most alive of two layers' activations, and of one layer's
    experts."""
    cells = {(one.model, one.tokens, one.experts): one for one in points}
    heads = ["GiB alive + gathered", "tokens", "local", *(f"E {d}" for d in DEGREES[1:])]
    lines = []
    for model, tokens in dict.fromkeys((one.model, one.tokens) for one in points):
        row = [cells[model, tokens, degree] for degree in DEGREES]
        shown = [f"{one.live_bytes / GIB:.2f} + {one.gathered_bytes / GIB:.2f}" for one in row]
        lines.append([model.split("/")[1], as_tokens(tokens), *shown])
    return markdown(heads, lines)


def crossings(points: Sequence[Point]) -> dict[tuple[str, int], tuple[float, float]]:
    """Return by model and degree the crossover of what was counted, and the formula's."""
    found = {}
    for model in dict.fromkeys(one.model for one in points):
        for degree in DEGREES[1:]:
            own = [one for one in points if one.model == model and one.experts in (1, degree)]
            found[model, degree] = crossing(own), formula(model, degree)
    return found


def crossing_table(points: Sequence[Point]) -> str:
    """Return the tokens of a rank at which dispatch sends as much as it saves."""
    found = crossings(points)
    heads = ["tokens, counted / by the formula", *(f"E {d}" for d in DEGREES[1:])]
    lines = []
    for model in dict.fromkeys(model for model, _ in found):
        pairs = [found[model, degree] for degree in DEGREES[1:]]
        lines.append([model.split("/")[1], *(f"{a:,.0f} / {b:,.0f}" for a, b in pairs)])
    return markdown(heads, lines)


def problems(points: Sequence[Point]) -> list[str]:
    """Return where a count is not what is predicted."""
    wrong = [
        f"{model}, E {degree}: crosses over at {a:,.0f}, by the formula at {b:,.0f}"
        for (model, degree), (a, b) in crossings(points).items()
        if abs(a / b - 1) > CLOSE
    ]
    return wrong + [
        f"{one.model}, {one.tokens} tokens, E {one.experts}: {one.live_bytes} bytes alive, "
        f"{one.predicted_live_bytes} predicted"
        for one in points
        if abs(one.predicted_live_bytes / one.live_bytes - 1) > CLOSE
    ]


def seconds_of(one: dict[str, Any]) -> float:
    """Return the seconds of a degree: the median over rounds of the median of a round's steps."""
    return float(median(median(steps) for steps in one["rounds"]))


def disagreements(hosts: dict[str, Any]) -> list[str]:
    """Return the pairs of degrees that are apart, and that `plan` has in another order."""
    wrong, degrees = [], hosts["degrees"]
    for one, other in combinations(degrees, 2):
        a, b = (seconds_of(degrees[name]) for name in (one, other))
        said = degrees[one]["predicted"] - degrees[other]["predicted"]
        if max(a, b) / min(a, b) > APART and (a - b) * said <= 0:
            wrong.append(f"{one} and {other}")
    return wrong


def hosts_table(hosts: dict[str, Any]) -> str:
    """Return measured and predicted seconds of a step by the ranks that divide experts."""
    heads = ["experts over", "seconds a step", "least and most", "predicted"]
    lines = []
    for name, one in hosts["degrees"].items():
        every = [median(steps) for steps in one["rounds"]]
        lines.append([name, f"{seconds_of(one):.2f}", span(every), f"{one['predicted']:.2f}"])
    return markdown(heads, lines)


def hosts_verdict(hosts: dict[str, Any]) -> str:
    """Return in a sentence whether the order is as `plan` predicts."""
    wrong = disagreements(hosts)
    case = HostsCase(**hosts["case"])
    order = "not " + listed(wrong) if wrong else "all that are apart"
    return f"{case.sentence}; medians of {case.rounds} rounds in turn. In `plan`'s order: {order}."


def crossing_sentence(points: Sequence[Point]) -> str:
    """Return for a reader who chooses where the first model crosses over."""
    found = crossings(points)
    model = next(iter(found))[0]
    each = [f"{round(found[model, degree][1], -3):,.0f}" for degree in DEGREES[1:]]
    return (
        f"For {model.split('/')[1]} under ZeRO-3, with layers recomputed, that is about "
        f"{listed(each)} tokens for E {listed([str(d) for d in DEGREES[1:]])}; with frozen experts "
        "half of that, since they have no gradients."
    )


def figures(result: dict[str, Any]) -> dict[str, str]:
    """Return what pages show of experts.json, by name, as Markdown."""
    points, hosts = points_of(result["counted"]), result.get("hosts")
    told = {
        "bytes": bytes_table(points),
        "memory": memory_table(points),
        "crossover": crossing_table(points),
        "choice": crossing_sentence(points),
        "hosts": "Not measured yet.",
        "order": "",
    }
    if hosts:
        measured = measured_on([result["hosts_on"]])
        told |= {"hosts": hosts_table(hosts), "order": f"{measured} {hosts_verdict(hosts)}"}
    return told

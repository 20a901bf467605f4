"""The tables of what four hosts measured, from the JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import Any

from benchmarks.meshslice.hosts.blocks import Measured, choose, total
from benchmarks.meshslice.hosts.overlapped import NEAR, WANTED, WANTED_OF_BLOCK, overlap_of

OTHERS = (
    *("Wang, rows hidden", "Wang, columns hidden", "SUMMA", "SUMMA, twice the panels"),
    *("Cannon", "1-D"),
)
OVERLAP = (
    *("Mbit/s", "flow", "transfers ÷ products", "products s", "transfers s", "Collective s"),
    *("MeshSlice s", "slices", "times faster", "bound s", "reached"),
)
LARGEST_ERROR = 0.1
"""Of the communication model, on average."""


def tables(result: Mapping[str, Any]) -> list[str]:
    """This lays out the parts that there are as Markdown."""
    found = []
    if part := result.get("overlap"):
        found.append(overlap(part["rates"]))
    if part := result.get("block"):
        found.append(block(part["rates"]))
    if part := result.get("baselines"):
        every = [Measured.of(rate) for rate in part["rates"]]
        found += [slices(every), others(every), foreseen(every)]
    return found


def overlap(rates: Sequence[Mapping[str, Any]]) -> str:
    """This tells what each flow of a square product gained."""
    rows = []
    for rate in rates:
        setting = rate["setting"]
        for flow, seconds in rate["measured"].items():
            one = overlap_of(flow, seconds)
            cells = [one.products, one.transfers, one.collective, one.best]
            rows.append(
                [
                    str(setting["mbit"]),
                    flow,
                    f"{one.transfers / one.products:.2f}",
                    *(f"{cell:.3f}" for cell in cells),
                    str(one.slices),
                    f"{one.gain:.2f}",
                    f"{one.bound:.3f}",
                    _yes(one.reached(WANTED.get(setting["ratio"], max(WANTED.values())))),
                ]
            )
    return _markdown(OVERLAP, rows, left=2)


def block(rates: Sequence[Mapping[str, Any]]) -> str:
    """This tells what a whole block took by slices."""
    names = list(rates[0]["measured"])
    heads = ["Mbit/s", "Collective s", *(f"{name} slices s" for name in names[1:])]
    rows = []
    for rate in rates:
        every = [median(rate["measured"][name]) for name in names]
        gain = every[0] / min(every[1:])
        cells = [str(rate["setting"]["mbit"]), *(f"{each:.3f}" for each in every)]
        rows.append([*cells, f"{gain:.2f}", _yes(gain >= WANTED_OF_BLOCK)])
    return _markdown([*heads, "times faster", "reached"], rows, left=1)


def slices(every: Sequence[Measured]) -> str:
    """This sets what MeshSlice took for a block's products beside what was predicted."""
    counts = every[0].setting.slices
    heads = ["Mbit/s, mesh", *(f"{n} slice{'s' if n > 1 else ''}" for n in counts)]
    rows = []
    for one in every:
        for mesh in one.every_mesh:
            cells = [
                f"{sum(one.seconds[mesh, n].values()):.2f} / "
                f"{sum(one.predicted[mesh, n].values()):.2f}"
                for n in counts
            ]
            rows.append([f"{one.setting.mbit}, {mesh[0]} × {mesh[1]}", *cells])
    return _markdown(heads, rows, left=1)


def others(every: Sequence[Measured]) -> str:
    """This tells how many times MeshSlice's seconds the other ways take on the same mesh."""
    rows = []
    for one in every:
        for mesh in one.every_mesh:
            own = {key: each for key, each in one.seconds.items() if key[0] == mesh}
            best = total(own, choose(own))
            engines = one.engines(mesh)
            ratios = [f"{engines[name] / best:.2f}" if name in engines else "–" for name in OTHERS]
            collective = f"{sum(one.seconds[mesh, 1].values()) / best:.2f}"
            place = f"{one.setting.mbit}, {mesh[0]} × {mesh[1]}"
            rows.append([place, f"{best:.2f}", collective, *ratios])
    return _markdown(["Mbit/s, mesh", "MeshSlice s", "Collective", *OTHERS], rows, left=1)


def foreseen(every: Sequence[Measured]) -> str:
    """This tells how good the model was of transfers, and of the best choice."""
    heads = ["Mbit/s", "transfers of 1 MiB shards or more", "mean error", "worst", "reached"]
    heads += ["predicted to be fastest", "s", "fastest", "s", "times", "spread", "reached"]
    rows = []
    for one in every:
        errors, wish, best = one.errors(), choose(one.predicted), choose(one.seconds)
        spread = one.spread(best)
        ratio = total(one.seconds, wish) / total(one.seconds, best)
        rows.append(
            [
                *(str(one.setting.mbit), str(len(errors))),
                *(f"{100 * value:.1f} %" for value in (mean(errors), max(errors))),
                _yes(mean(errors) < LARGEST_ERROR),
                *(wish.name, f"{total(one.seconds, wish):.2f}"),
                *(best.name, f"{total(one.seconds, best):.2f}"),
                *(f"{ratio:.3f}", f"{spread:.3f}", _yes(ratio <= max(NEAR, spread))),
            ]
        )
    return _markdown(heads, rows, left=1)


def _yes(reached: bool) -> str:
    return "yes" if reached else "no"


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    ruler = [" --- " if place < left else " ---: " for place in range(len(heads))]
    lines = [f"| {' | '.join(heads)} |", f"|{'|'.join(ruler)}|"]
    return "\n".join([*lines, *(f"| {' | '.join(cells)} |" for cells in rows)])

"""The figures of what four hosts measured, from the JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, median
from typing import Any

from benchmarks.lab.machine import measured_on
from benchmarks.lab.tables import listed, markdown, span
from benchmarks.meshslice.hosts.blocks import (
    MEGATRON,
    ONE_SLICE,
    TUNED,
    Measured,
    Mesh,
    choose,
    total,
)
from benchmarks.meshslice.hosts.overlapped import overlap_of
from benchmarks.meshslice.hosts.setting import SQUARE

OTHERS = (
    *("Collective", "Wang, rows hidden", "Wang, columns hidden", "SUMMA"),
    *("SUMMA, twice the panels", "Cannon", "1-D"),
)
OVERLAP = (
    *("Mbit/s", "flow", "transfers ÷ products", "products s", "transfers s", "Collective s"),
    *("MeshSlice s", "slices", "times faster", "bound s"),
)


def figures(result: Mapping[str, Any]) -> dict[str, str]:
    """Return what pages show of the parts that there are, by name, as Markdown."""
    found: dict[str, str] = {}
    if part := result.get("overlap"):
        found["overlap"] = overlap(part["rates"])
    if part := result.get("block"):
        found["block"] = block(part["rates"])
    if part := result.get("tuned"):
        found["tuned"] = tuned(part["rates"])
    if part := result.get("baselines"):
        every = [Measured.of(rate) for rate in part["rates"]]
        found["slices"], found["others"] = slices(every), others(every)
        found["foreseen"] = foreseen(every)
    if {"overlap", "block", "baselines"} <= set(result):
        found["summary"] = summary(result)
    return {**found, "measured": measured(result)} if found else {}


def measured(result: Mapping[str, Any]) -> str:
    """Return when and on what the parts were measured, and how often."""
    rounds = {name: part["rates"][0]["setting"]["rounds"] for name, part in result.items()}
    said = listed([f"{number} rounds (`{name}`)" for name, number in rounds.items()])
    return f"{measured_on(result.values())} Medians of {said}."


def summary(result: Mapping[str, Any]) -> str:
    """Return what MeshSlice gained over Collective, and where other ways are beside it."""
    flows = [
        overlap_of(flow, seconds)
        for rate in result["overlap"]["rates"]
        for flow, seconds in rate["measured"].items()
    ]
    links = span([one.transfers / one.products for one in flows], 1)
    blocks = span([_block_gain(rate) for rate in result["block"]["rates"]])
    said = [
        "- On a mesh of 2 × 2, beside Collective, which gathers whole blocks and then multiplies: "
        f"a product in slices is {span([one.gain for one in flows])} times as fast, on links that "
        f"take {links} times as long as the products, and a block of a layer, forward and "
        f"backward, {blocks} times; each in the slices that suit it best."
    ]
    for one in map(Measured.of, result["baselines"]["rates"]):
        choice = choose(one.predicted)
        seconds = total(one.seconds, choice)
        collective = sum(one.seconds[choice.mesh, 1].values()) / seconds
        said.append(
            f"- At {one.setting.mbit} Mbit/s the tuner picks {choice.name} slices for the products "
            f"of a block, {collective:.2f} times as fast as Collective on that mesh; of the other "
            f"ways {_fastest(one, choice.mesh, seconds)} as long. On 2 × 2, beside MeshSlice "
            f"there, {_fastest(one, SQUARE, _best(one, SQUARE))} as long."
        )
    return "\n".join(said)


def _fastest(one: Measured, mesh: Mesh, seconds: float) -> str:
    """Return which other way is the fastest on a mesh, and its share of so many seconds."""
    found = one.engines(mesh)
    name = min((name for name in OTHERS if name in found), key=found.__getitem__)
    return f"the fastest ({name}) takes {found[name] / seconds:.2f} times"


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
                ]
            )
    return markdown(OVERLAP, rows, left=2)


def block(rates: Sequence[Mapping[str, Any]]) -> str:
    """This tells what a whole block took by slices."""
    names = list(rates[0]["measured"])
    heads = ["Mbit/s", "Collective s", *(f"{name} slices s" for name in names[1:])]
    rows = []
    for rate in rates:
        every = [median(rate["measured"][name]) for name in names]
        cells = [str(rate["setting"]["mbit"]), *(f"{each:.3f}" for each in every)]
        rows.append([*cells, f"{_block_gain(rate):.2f}"])
    return markdown([*heads, "times faster"], rows)


def _block_gain(rate: Mapping[str, Any]) -> float:
    """Return how many times faster than in one slice a block is in the slices that suit it."""
    one, *more = (median(each) for each in rate["measured"].values())
    return float(one / min(more))


def tuned(rates: Sequence[Mapping[str, Any]]) -> str:
    """This sets a block on the mesh that the tuner picks beside Megatron's way."""
    heads = [
        "Mbit/s, mesh and slices that the tuner picks",
        "s",
        "least and most",
        "in one slice s",
    ]
    heads += ["Megatron with `use_seq_parallel` s", "least and most", "of Megatron"]
    rows = []
    for rate in rates:
        found = rate["measured"]
        seconds = found["seconds"]
        middle = {name: median(each) for name, each in seconds.items()}
        mesh = " × ".join(map(str, found["mesh"]))
        slices = ", ".join(map(str, found["slices"]))
        rows.append(
            [
                f"{rate['setting']['mbit']}, {mesh} in {slices}",
                f"{middle[TUNED]:.2f}",
                span(seconds[TUNED]),
                f"{middle[ONE_SLICE]:.2f}",
                f"{middle[MEGATRON]:.2f}",
                span(seconds[MEGATRON]),
                f"{middle[TUNED] / middle[MEGATRON]:.2f}",
            ]
        )
    return markdown(heads, rows)


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
    return markdown(heads, rows)


def others(every: Sequence[Measured]) -> str:
    """This tells how many times MeshSlice's seconds the other ways take on the same mesh."""
    rows = []
    for one in every:
        for mesh in one.every_mesh:
            beside = _beside(one, mesh)
            ratios = [f"{beside[name]:.2f}" if name in beside else "–" for name in OTHERS]
            place = f"{one.setting.mbit}, {mesh[0]} × {mesh[1]}"
            rows.append([place, f"{_best(one, mesh):.2f}", *ratios])
    return markdown(["Mbit/s, mesh", "MeshSlice s", *OTHERS], rows)


def _beside(one: Measured, mesh: Mesh) -> dict[str, float]:
    """Return how many times MeshSlice's seconds each other way takes on a mesh."""
    found = {**one.engines(mesh), "Collective": sum(one.seconds[mesh, 1].values())}
    return {name: seconds / _best(one, mesh) for name, seconds in found.items()}


def _best(one: Measured, mesh: Mesh) -> float:
    """Return MeshSlice's seconds on a mesh, each product in the slices that suit it best."""
    own = {key: each for key, each in one.seconds.items() if key[0] == mesh}
    return total(own, choose(own))


def foreseen(every: Sequence[Measured]) -> str:
    """This tells how good the model was of transfers, and of the best choice."""
    heads = ["Mbit/s", "transfers of 1 MiB shards or more", "mean error", "worst"]
    heads += ["predicted to be fastest", "s", "fastest", "s", "times", "spread"]
    rows = []
    for one in every:
        errors, wish, best = one.errors(), choose(one.predicted), choose(one.seconds)
        spread = one.spread(best)
        ratio = total(one.seconds, wish) / total(one.seconds, best)
        rows.append(
            [
                *(str(one.setting.mbit), str(len(errors))),
                *(f"{100 * value:.1f} %" for value in (mean(errors), max(errors))),
                *(wish.name, f"{total(one.seconds, wish):.2f}"),
                *(best.name, f"{total(one.seconds, best):.2f}"),
                *(f"{ratio:.3f}", f"{spread:.3f}"),
            ]
        )
    return markdown(heads, rows)

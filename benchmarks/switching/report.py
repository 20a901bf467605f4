"""The tables of what two hosts measured, from the JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks.switching.automatic import ALONE
from benchmarks.switching.contenders import BOUND, PEER, STATIC, SWITCHED, Contender, contenders
from benchmarks.switching.formulas import held_bytes, sent_bytes

WANTED = {"ulysses": 1.5, "ring": 1.5, "tensor": 2.0}
"""How many times faster than the static layout of the same family."""
WANTED_OF_PEER = 2.0
NEAR = 1.05
"""Times its bound's seconds at which a target that the bound forbids counts as met."""
HEADS = (
    *("s", "static of its kind", "DeepSpeed", "bound", "predicted s", "MiB between hosts"),
    *("state sent, B", "formula", "switch s", "plan ms", "state held, B", "formula", "live MiB"),
)


@dataclass(frozen=True)
class Stage:
    """What all contenders took at one ZeRO stage."""

    ranks: int
    mbit: int
    zero: int
    parameters: int
    measured: Mapping[str, Any]
    inside: Mapping[str, Any] = field(default_factory=dict)
    """What the switched contenders and the bound took on fast links."""

    @property
    def every(self) -> dict[str, Contender]:
        return {name: contenders(self.ranks)[name] for name in self.measured}

    def seconds(self, name: str) -> float:
        """It returns the median of a contender's rounds."""
        return float(median(self.measured[name]["seconds"]))

    def peer(self) -> str:
        return next(name for name, one in self.every.items() if one.kind == PEER)

    def static(self, family: str) -> str | None:
        """It returns the static layout of a family, if there is one."""
        found = [n for n, one in self.every.items() if (one.kind, one.family) == (STATIC, family)]
        return found[0] if found else None

    def bound(self) -> float | None:
        """It returns the seconds of computation and state, and of the least that any switched one
        sends beyond that: rows that no rank may hold whole must be shared."""
        if BOUND not in self.measured:
            return None
        every = [name for name, one in self.every.items() if one.kind == SWITCHED]
        return min(map(self.nothing_hidden, every))

    def host_bytes(self, name: str) -> float:
        """It returns what the busier host sends in a step."""
        return float(median(step["host_bytes"] for step in self.measured[name]["steps"]))

    def nothing_hidden(self, name: str) -> float:
        """It returns the seconds of computation and state alone, and of what a contender sends
        between hosts beyond that, if nothing of it is hidden."""
        more = max(0.0, self.host_bytes(name) - self.host_bytes(BOUND))
        return self.seconds(BOUND) + 8e-6 * more / self.mbit

    def inside_hosts(self, name: str) -> float:
        """It returns how many seconds longer than computation and state alone a contender takes on
        fast links: for what it sends inside hosts, on the cores that compute."""
        if not self.inside:
            return 0.0
        own, alone = (float(median(self.inside[one]["seconds"])) for one in (name, BOUND))
        return max(0.0, own - alone)

    def state_sent(self, name: str) -> float | None:
        """It returns the bytes of the model's state that a rank sends for each parameter: all that
        it writes to others, without what uspft counts as its own of rows."""
        if self.every[name].kind == PEER:
            return None
        found = []
        for step in self.measured[name]["steps"]:
            rows = sum(size for kind, size in step["own_bytes"].items() if kind != "switch")
            found.append((step["written_bytes"] - rows) / self.ranks / self.parameters)
        return float(median(found))


def tables(result: Mapping[str, Any]) -> list[str]:
    """This lays out each number of ranks and stage as Markdown, then the targets."""
    every = result.get("by_ranks", {}).items()
    stages = [
        Stage(
            int(ranks),
            stage["setting"]["mbit"],
            stage["setting"]["stage"],
            found["layouts"]["parameters"],
            stage["measured"],
            found.get("inside", {"measured": {}})["measured"],
        )
        for ranks, found in every
        for stage in found.get("layouts", {"stages": ()})["stages"]
    ]
    shown = [*map(_table, stages)]
    if first := [one for one in stages if one.zero == 1]:
        shown.append(targets(first))
    return [*shown, *(_auto(ranks, found["auto"]) for ranks, found in every if "auto" in found)]


def _table(stage: Stage) -> str:
    peer, bound = stage.seconds(stage.peer()), stage.bound()
    rows = []
    for name, one in stage.every.items():
        record, seconds = stage.measured[name], stage.seconds(name)
        static = stage.static(one.family) if one.kind == SWITCHED else None
        last = [step["switch_seconds"] for step in record["steps"]]
        plan = record.get("schedule_seconds")
        said = stage.zero == 1 and one.kind != PEER
        cells = [
            f"{seconds:.2f}",
            _cell(stage.seconds(static) / seconds if static else None),
            _cell(peer / seconds if name != stage.peer() else None),
            _cell(bound and seconds / bound),
            _cell(record.get("predicted_seconds")),
            f"{stage.host_bytes(name) / 2**20:.1f}",
            _cell(stage.state_sent(name)),
            _cell(sent_bytes(one, stage.ranks) if said else None),
            _cell(median(last) if one.moves else None),
            _cell(plan and 1000 * plan, 1),
            f"{record['held_bytes'] / stage.parameters:.2f}",
            _cell(held_bytes(one, stage.ranks) if stage.zero == 1 else None),
            f"{record['live_bytes'] / 2**20:.1f}",
        ]
        rows.append([name, *cells])
    title = f"{stage.ranks} ranks, {stage.mbit} Mbit/s, ZeRO-{stage.zero}"
    return _markdown([title, *HEADS], rows, left=1)


def _auto(ranks: str, found: Mapping[str, Any]) -> str:
    """This lays out what `strategies: auto` took, beside static layouts."""
    rows = []
    for corpus, one in found["corpora"].items():
        measured = one["measured"]
        seconds = {name: median(each["seconds"]) for name, each in measured.items()}
        best = min((name for name in measured if name.endswith(ALONE)), key=seconds.__getitem__)
        for name, each in measured.items():
            cells = [
                "takes" if name == one["takes"] else "",
                f"{seconds[name]:.2f}",
                f"{seconds[name] / seconds[best]:.2f}",
                _cell(each.get("predicted_seconds")),
            ]
            rows.append([corpus, name, *cells])
    mbit = next(iter(found["corpora"].values()))["setting"]["mbit"]
    heads = [f"{ranks} ranks, {mbit} Mbit/s", "layout", "auto", "s", "of the best alone"]
    return _markdown([*heads, "predicted s"], rows, left=3)


def targets(stages: Sequence[Stage]) -> str:
    """This says of each switched contender what was wanted, and whether it was reached."""
    heads = ["ranks, switched", "against", "wanted", "reached", "its bound allows", "of its bound"]
    heads += ["of that and inside hosts", "target met"]
    rows = []
    for stage in stages:
        bound = stage.bound()
        for name, one in stage.every.items():
            if one.kind != SWITCHED or one.family not in WANTED or bound is None:
                continue
            static, own, limit = (
                stage.static(one.family),
                stage.seconds(name),
                stage.nothing_hidden(name),
            )
            for other, wanted in ((static, WANTED[one.family]), (stage.peer(), WANTED_OF_PEER)):
                if other is None:
                    continue
                gain, allowed = stage.seconds(other) / own, stage.seconds(other) / limit
                moved = limit + stage.inside_hosts(name)
                reached = gain >= wanted or (allowed < wanted and own <= NEAR * moved)
                rows.append(
                    [
                        f"{stage.ranks}, {name}",
                        other,
                        f"{wanted:.1f} ×",
                        f"{gain:.2f} ×",
                        f"{allowed:.2f} ×",
                        f"{own / limit:.2f}",
                        f"{own / moved:.2f}",
                        "yes" if reached else "no",
                    ]
                )
    return _markdown(heads, rows, left=2)


def _cell(value: float | None, places: int = 2) -> str:
    return "–" if value is None else f"{value:.{places}f}"


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    ruler = [" --- " if place < left else " ---: " for place in range(len(heads))]
    lines = [f"| {' | '.join(heads)} |", f"|{'|'.join(ruler)}|"]
    return "\n".join([*lines, *(f"| {' | '.join(cells)} |" for cells in rows)])

"""The figures of what two hosts measured, from the JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.lab.machine import measured_on
from benchmarks.lab.results import NOT_YET
from benchmarks.lab.tables import listed, markdown, span
from benchmarks.switching.automatic import ALONE, HOTSPA
from benchmarks.switching.contenders import PEER, STATIC, SWITCHED, Contender, contenders
from benchmarks.switching.formulas import held_bytes, sent_bytes
from benchmarks.switching.simulation.report import PAPER

HEADS = (
    *("s", "least and most", "static of its kind", "DeepSpeed", "predicted s"),
    *("MiB between hosts", "state sent, B", "formula", "switch s", "plan ms"),
    *("state held, B", "formula", "live MiB"),
)
FAMILIES = {"ulysses": "Ulysses", "ring": "the ring", "planned": "`planned_cp`"}
FAMILIES |= {"tensor": "tensor degrees"}


@dataclass(frozen=True)
class Stage:
    """What all contenders took at one ZeRO stage."""

    ranks: int
    mbit: int
    zero: int
    parameters: int
    measured: Mapping[str, Any]

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

    def host_bytes(self, name: str) -> float:
        """It returns what the busier host sends in a step."""
        return float(median(step["host_bytes"] for step in self.measured[name]["steps"]))

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


def figures(result: Mapping[str, Any]) -> dict[str, str]:
    """Return what pages show of the file, by name, as Markdown."""
    every = result.get("by_ranks", {}).items()
    stages = [
        Stage(
            int(ranks),
            stage["setting"]["mbit"],
            stage["setting"]["stage"],
            found["layouts"]["parameters"],
            stage["measured"],
        )
        for ranks, found in every
        for stage in found.get("layouts", {"stages": ()})["stages"]
    ]
    shown = dict.fromkeys(("hotspa", "hotspa ratio"), NOT_YET)
    shown |= {f"{one.ranks} ranks, ZeRO-{one.zero}": _table(one) for one in stages}
    for ranks, found in every:
        if "auto" in found:
            shown[f"auto, {ranks} ranks"] = _auto(ranks, found["auto"])
        if "layouts" in found:
            shown[f"setting, {ranks} ranks"] = setting(found)
        if "hotspa" in found:
            shown["hotspa"] = hotspa_table(found["hotspa"])
            shown["hotspa ratio"] = hotspa_ratio(found["hotspa"])
    if taken := [(ranks, found["auto"]) for ranks, found in every if "auto" in found]:
        shown["auto"] = "\n".join(line for one in taken for line in chosen(*one))
    if stages:
        shown["summary"] = "\n".join(map(summary, stages))
        parts = [part for _, found in every for part in found.values()]
        shown["measured"] = f"{measured_on(parts)} {_rounds(parts)}"
    return shown


def _rounds(parts: Sequence[Mapping[str, Any]]) -> str:
    stages = [stage["setting"] for part in parts for stage in part.get("stages", ())]
    said = {f"{one['rounds']} under ZeRO-{one['stage']}" for one in stages}
    return f"Medians of rounds in turn, {listed(sorted(said, reverse=True))}."


def chosen(ranks: str, found: Mapping[str, Any]) -> list[str]:
    """Return in a line for each corpus what `strategies: auto` takes, and what it is worth."""
    said = []
    for corpus, one in found["corpora"].items():
        seconds = {name: median(each["seconds"]) for name, each in one["measured"].items()}
        alone = [each for name, each in seconds.items() if name.endswith(ALONE)]
        ratio = seconds[one["takes"]] / min(alone)
        said.append(
            f"- {ranks} ranks, {corpus}: it takes `{one['takes']}`; its step lasts {ratio:.2f} "
            f"times as long as that of the fastest of {len(alone)} layouts alone."
        )
    return said


def hotspa_table(part: Mapping[str, Any]) -> str:
    """Lay out HotSPa's example beside static layouts as Markdown."""
    rows = []
    for name, one in part["measured"].items():
        moved = median(step["switch_seconds"] for step in one["steps"])
        cells = [f"{median(one['seconds']):.2f}", span(one["seconds"]), _cell(moved or None)]
        rows.append([name, *cells, _cell(one.get("predicted_seconds"))])
    heads = [f"4 ranks, {part['setting']['mbit']} Mbit/s", "s", "least and most", "switch s"]
    return markdown([*heads, "predicted s"], rows)


def hotspa_ratio(part: Mapping[str, Any]) -> str:
    """Say how many times as fast HotSPa's example is as the best static layout, beside what its
    authors say."""
    seconds = {name: median(one["seconds"]) for name, one in part["measured"].items()}
    alone = {name: each for name, each in seconds.items() if name != HOTSPA}
    best = min(alone, key=alone.__getitem__)
    staged = alone[f"tensor2-pipeline2 {ALONE}"] / seconds[HOTSPA]
    papers = listed([f"{times} ({corpus})" for corpus, times in PAPER.items()])
    return (
        f"HotSPa's example is {alone[best] / seconds[HOTSPA]:.2f} times as fast as the fastest of "
        f"{len(alone)} static layouts (`{best}`), and {staged:.2f} times as fast as the layout of "
        f"its longest rows alone, on lengths of Python's standard library. Its authors publish, "
        f"against Megatron's best static layout on 8 to 32 A800, up to {papers} times."
    )


def setting(found: Mapping[str, Any]) -> str:
    """Return what samples a step has, and how slow the links are, in a sentence."""
    layouts = found["layouts"]
    one, fast = layouts["stages"][0]["setting"], layouts["fast_links"]
    lengths = one["lengths"]
    return (
        f"{one['ranks']} processes on two hosts, links of {one['mbit']} Mbit/s (static Ulysses "
        f"takes {fast['seconds']:.1f} s a step on links of {fast['mbit']:,}). A step has "
        f"{len(lengths)} samples of {min(lengths)} to {max(lengths):,} tokens, {sum(lengths):,} in "
        f"all, the median {median(lengths):.0f}; {one['layers']} layers × {one['hidden']}, "
        f"{layouts['parameters'] / 1e6:.1f} million parameters, float32."
    )


def summary(stage: Stage) -> str:
    """Return in a line how the switched contenders are beside static ones and DeepSpeed."""
    switched = {n: stage.seconds(n) for n, one in stage.every.items() if one.kind == SWITCHED}
    static = {n: stage.seconds(n) for n, one in stage.every.items() if one.kind == STATIC}
    peer, said = stage.seconds(stage.peer()), list[str]()
    for family, title in FAMILIES.items():
        own = [s for n, s in switched.items() if stage.every[n].family == family]
        alone = stage.static(family)
        if own and alone:
            said.append(f"{title} {span([static[alone] / s for s in own])}")
    alone = min(static, key=static.__getitem__)
    return (
        f"- {stage.ranks} ranks, ZeRO-{stage.zero}: {listed(said)} times as fast as the same "
        f"alone; all of them {span([peer / s for s in switched.values()])} times as fast as "
        f"DeepSpeed's Ulysses. The fastest layout alone ({alone}) takes "
        f"{static[alone] / min(switched.values()):.2f} times as long as the fastest of them."
    )


def _table(stage: Stage) -> str:
    peer, rows = stage.seconds(stage.peer()), []
    for name, one in stage.every.items():
        record, seconds = stage.measured[name], stage.seconds(name)
        static = stage.static(one.family) if one.kind == SWITCHED else None
        last = [step["switch_seconds"] for step in record["steps"]]
        plan = record.get("schedule_seconds")
        said = stage.zero == 1 and one.kind != PEER
        cells = [
            f"{seconds:.2f}",
            span(record["seconds"]),
            _cell(stage.seconds(static) / seconds if static else None),
            _cell(peer / seconds if name != stage.peer() else None),
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
    return markdown([title, *HEADS], rows)


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
                span(each["seconds"]),
                f"{seconds[name] / seconds[best]:.2f}",
                _cell(each.get("predicted_seconds")),
            ]
            rows.append([corpus, name, *cells])
    mbit = next(iter(found["corpora"].values()))["setting"]["mbit"]
    heads = [f"{ranks} ranks, {mbit} Mbit/s", "layout", "auto", "s", "least and most"]
    return markdown([*heads, "of the best alone", "predicted s"], rows, left=3)


def _cell(value: float | None, places: int = 2) -> str:
    return "–" if value is None else f"{value:.{places}f}"

"""How measured points become a hardware file, and the table that shows how well its lines fit."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import torch
import yaml

from uspft import __version__
from uspft.calibration.points import LinkPoint, Points
from uspft.config import as_tree
from uspft.planner.flops import PEAK_BF16, device_of
from uspft.planner.least_squares import Fit, fit_seconds
from uspft.planner.links import COLLECTIVES, SUMS
from uspft.planner.machine import Hardware


class FittedLine(NamedTuple):
    """One fitted line, and what it says of a collective, of products or of attention."""

    what: str
    fit: Fit
    launch: float
    hop: float
    rate: float
    unit: str

    @classmethod
    def of(
        cls, what: str, unit: str, causes: Sequence[Sequence[float]], seconds: Sequence[float]
    ) -> FittedLine:
        """Fit a line to times by their causes: 1, and units.

        Where noise has left nothing to the units, the rate is the best one that was seen.
        """
        fit = fit_seconds(causes, seconds)
        launch, each = fit.coefficients
        fastest = max(cause[-1] / one for cause, one in zip(causes, seconds, strict=True))
        return cls(what, fit, launch, 0.0, 1 / each if each else fastest, unit)


class Fitted(NamedTuple):
    """The keys of a hardware file, and the lines that they come from."""

    tree: dict[str, Any]
    lines: list[FittedLine]

    def table(self) -> str:
        """Return a table of every line with its residuals, for a person."""
        rows = [["", "launch µs", "hop µs", "rate", "", "typical", "worst", "measured"]]
        for line in self.lines:
            numbers = [
                f"{line.launch * 1e6:.1f}",
                f"{line.hop * 1e6:.1f}",
                f"{line.rate / 1e9:.4g}",
            ]
            off = [f"{100 * line.fit.typical:.0f} %", f"{100 * line.fit.worst:.0f} %"]
            rows.append([line.what, *numbers, line.unit, *off, str(len(line.fit.residuals))])
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(
                [row[0].ljust(widths[0])]
                + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
            ).rstrip()
            for row in rows
        )


def fitted(points: Points, name: str, stands_in: Hardware, date: str) -> Fitted:
    """Return the keys of a hardware file that points give.

    stands_in: the cluster whose links stand where there were none to measure. date: when the points
    were measured.
    """
    lines: list[FittedLine] = []
    links, notes, figures = {}, [], ["memory", "products", "attention"]
    for where in ("inside", "between"):
        found = [point for point in points.links if point.where == where]
        if found:
            links[where] = _links(where, points, found, lines)
            figures.append(where)
        else:
            links[where] = _kept(as_tree(getattr(stands_in, where)))
            notes.append(f"{where}: not measured, those of {stands_in.name} stand for it")
    products, attention = _products(points, lines), _attention(points, lines)
    hide = _hide(points)
    figures += ["hide"] * len(hide)
    tree = {
        "name": name,
        "what": f"{points.hosts} × {points.ranks_per_host} ranks on {points.device}, as measured",
        **_peak(points, products.rate),
        "kernel": points.kernel,
        "measured": {"date": date, "versions": _versions(points), "figures": figures},
        "sources": [_source(points), *notes],
        "ranks_per_host": points.ranks_per_host,
        "memory": {
            "bytes": float(points.memory_bytes),
            "bytes_per_second": _round(points.copied_bytes_per_second),
        },
        "products": {
            "share": _round(min(1.0, products.rate / _peak_of(points, products.rate))),
            "launch_seconds": _round(products.launch),
            "dtype": points.dtype,
        },
        "attention": attention,
        **links,
        **hide,
    }
    return Fitted(tree, lines)


def as_yaml(fits: Fitted) -> str:
    """Return the text of a file that `launch.hardware` takes."""
    head = f"# Written by `uspft calibrate`; how well its lines fit:\n#\n{_comment(fits.table())}"
    body = yaml.safe_dump(fits.tree, sort_keys=False, allow_unicode=True, width=1000)
    return f"{head}#\n{body}"


def _comment(text: str) -> str:
    return "".join(f"# {line}".rstrip() + "\n" for line in text.splitlines())


def _source(points: Points) -> str:
    return f"measured: {points.hosts} host(s) of {points.ranks_per_host} ranks, {points.dtype}"


def _versions(points: Points) -> str:
    """Return the programs that took part."""
    backend = "gloo"
    if points.device != "cpu":
        backend = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    return f"uspft {__version__}, torch {torch.__version__}, {backend}, {points.kernel} attention"


def _hide(points: Points) -> dict[str, float]:
    """Return the share of what transfers and attention could have in common that they have; empty
    where one rank has measured alone."""
    able = sum(one.could_hide for one in points.hiding)
    if not able:
        return {}
    share = sum(one.hidden for one in points.hiding) / able
    return {"hide": _round(min(1.0, max(0.0, share)))}


def _peak(points: Points, rate: float) -> dict[str, Any]:
    device = device_of(points.device)
    return {"device": device} if device else {"peak_flops": _round(_peak_of(points, rate))}


def _peak_of(points: Points, rate: float) -> float:
    """Return the maker's figure, or else the most that any product reached."""
    device = device_of(points.device)
    if device:
        return PEAK_BF16[device]
    return max(rate, *(2.0 * point.size**3 / point.seconds for point in points.products))


def _products(points: Points, lines: list[FittedLine]) -> FittedLine:
    causes = [(1.0, 2.0 * point.size**3) for point in points.products]
    seconds = [point.seconds for point in points.products]
    lines.append(FittedLine.of("products", "GFLOP/s", causes, seconds))
    return lines[-1]


def _attention(points: Points, lines: list[FittedLine]) -> dict[str, float]:
    """Return FLOP/s as `Hardware.attention_seconds` counts them, by pairs of query and key."""
    found: dict[str, float] = {}
    for way, of_pair in (("forward", 4), ("backward", 10)):
        chosen = [one for one in points.attention if one.backward == (way == "backward")]
        causes = [
            (1.0, of_pair * one.heads * one.dim * one.tokens * (one.tokens + 1) / 2)
            for one in chosen
        ]
        seconds = [one.seconds for one in chosen]
        lines.append(FittedLine.of(f"attention {way}", "GFLOP/s", causes, seconds))
        found[f"{way}_flops"] = _round(lines[-1].rate)
    forward, backward = lines[-2:]
    return {**found, "launch_seconds": _round((forward.launch + backward.launch) / 2)}


def _links(
    where: str, cluster: Points, points: Sequence[LinkPoint], lines: list[FittedLine]
) -> dict[str, Any]:
    """Return a line for each collective; what stands for any other is that of the all-gather."""
    found: dict[str, Any] = {}
    here = cluster.ranks_per_host
    for kind in COLLECTIVES:
        every = [one for one in points if one.kind == kind]
        rates = _by_load(f"{kind} {where}", every, lines)
        alone = rates.pop(ALONE)
        found[kind] = {
            "launch_seconds": _round(alone.launch),
            "hop_seconds": _round(alone.hop),
            "bytes_per_second": _round(alone.rate),
        }
        sizes = sorted({one.ranks for one in every})
        if kind == "all_to_all" and where == "inside" and len(sizes) > 1:
            found[kind]["by_ranks"] = {
                str(ranks): _rate_of([one for one in every if one.ranks == ranks], lines)
                for ranks in sizes
            }
        if kind in SUMS and rates:  # each group's ring leaves its host once
            found[kind]["host_by_members"] = {
                str(load.members): _round(here // load.members * line.rate)
                for load, line in rates.items()
            }
        elif rates:
            ((load, line),) = rates.items()
            found["host_bytes_per_second"] = _round(load.senders * min(line.rate, alone.rate))
    return {**deepcopy(found["all_gather"]), **found}  # or YAML would write it as an alias


class Load(NamedTuple):
    """What else uses a host's links while a group does: see `LinkPoint`."""

    senders: int
    members: int


ALONE = Load(1, 1)


def _by_load(
    what: str, points: Sequence[LinkPoint], lines: list[FittedLine]
) -> dict[Load, FittedLine]:
    """Return the line of a collective under each load: they differ in their rates alone, and are
    fitted together, since groups of one size do not tell a launch from a hop."""
    loads = sorted({Load(one.senders, one.members) for one in points})
    seconds = [one.seconds for one in points]
    causes = []
    for one in points:
        *latency, moved = one.causes
        mine = [moved * (load == (one.senders, one.members)) for load in loads]
        causes.append([*latency, *mine])
    fit = fit_seconds(causes, seconds)
    launch, hop, *each = fit.coefficients
    found = {}
    for number, load in enumerate(loads):
        own = [i for i, cause in enumerate(causes) if cause[2 + number]]
        fastest = max(causes[i][2 + number] / seconds[i] for i in own)
        rate = 1 / each[number] if each[number] else fastest
        part = Fit(fit.coefficients, tuple(fit.residuals[i] for i in own))
        on_host = f", {load.members} a host" if points[0].kind in SUMS else ""
        name = what if load == ALONE else f"{what}{on_host}, {load.senders} at once"
        found[load] = FittedLine(name, part, launch, hop, rate, "GB/s")
    lines += found.values()
    return found


def _rate_of(points: Sequence[LinkPoint], lines: list[FittedLine]) -> float:
    """Return the bytes per second of a rank in groups of one size, all groups of a host at once."""
    causes = [(1.0, one.of_bytes) for one in points]
    name = f"{points[0].kind} of {points[0].ranks}"
    lines.append(FittedLine.of(name, "GB/s", causes, [one.seconds for one in points]))
    return _round(lines[-1].rate)


def _kept(tree: dict[Any, Any]) -> dict[str, Any]:
    """Return what a file says: its keys are strings, and null is left out."""
    return {
        str(key): _kept(value) if isinstance(value, dict) else value
        for key, value in tree.items()
        if value is not None
    }


def _round(value: float) -> float:
    """Return four digits of a number, which is more than was measured."""
    return float(f"{value:.4g}")

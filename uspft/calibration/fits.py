"""What ranks have measured, and how it becomes a hardware file, with the table that shows how well
its lines fit.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml

from uspft import __version__
from uspft.config import as_tree
from uspft.planner.machine import COLLECTIVES, PEAK_BF16, SUMS, Hardware, device_of

FILE = "measured.json"


@dataclass(frozen=True)
class LinkPoint:
    """The time of one collective, or of one message (point_to_point), in groups of one size."""

    kind: str
    where: str
    """`inside` a host, or `between` hosts."""
    ranks: int
    of_bytes: int
    """The bytes, as `Hardware.collective_seconds` counts them."""
    seconds: float
    senders: int = 1
    """The ranks of a host that send to another host at the same time."""
    members: int = 1
    """The ranks of each group that a host has, where the group spans hosts."""

    @property
    def causes(self) -> tuple[float, float, float]:
        """The causes of the time: 1, the steps that follow one another, and the bytes that a rank
        sends one after the other."""
        if self.kind in ("all_to_all", "point_to_point"):
            steps = self.ranks - 1 if self.kind == "all_to_all" else 0
            return 1.0, steps, self.of_bytes
        ways = 2 if self.kind == "all_reduce" else 1
        steps = ways * (self.ranks - 1)
        return 1.0, steps, steps * self.of_bytes / self.ranks


@dataclass(frozen=True)
class ProductPoint:
    """The time of a product [size, size] × [size, size] while every rank computes one."""

    size: int
    seconds: float


@dataclass(frozen=True)
class AttentionPoint:
    """The time of a causal square of so many tokens, forward alone or backward."""

    tokens: int
    heads: int
    dim: int
    backward: bool
    seconds: float


@dataclass(frozen=True)
class HidingPoint:
    """The times of a transfer to the next rank of a ring, of attention, and of both at once."""

    transfer: float
    attention: float
    both: float

    @property
    def could_hide(self) -> float:
        """The seconds that the two could have in common."""
        return min(self.transfer, self.attention)

    @property
    def hidden(self) -> float:
        """The seconds that they have in common."""
        return self.transfer + self.attention - self.both


@dataclass(frozen=True)
class Points:
    """All points of one cluster, and what it is."""

    device: str
    """The GPU's name, or cpu."""
    dtype: str
    kernel: str
    hosts: int
    ranks_per_host: int
    memory_bytes: float
    copied_bytes_per_second: float
    links: Sequence[LinkPoint] = field(default_factory=tuple)
    products: Sequence[ProductPoint] = field(default_factory=tuple)
    attention: Sequence[AttentionPoint] = field(default_factory=tuple)
    hiding: Sequence[HidingPoint] = field(default_factory=tuple)
    """There are none where one rank measures alone."""

    def leave(self, folder: Path) -> None:
        (folder / FILE).write_text(json.dumps(asdict(self)))

    @classmethod
    def found(cls, folder: Path) -> Points:
        tree: dict[str, Any] = json.loads((folder / FILE).read_text())
        kinds = {
            "links": LinkPoint,
            "products": ProductPoint,
            "attention": AttentionPoint,
            "hiding": HidingPoint,
        }
        for name, kind in kinds.items():
            tree[name] = tuple(kind(**one) for one in tree[name])
        return cls(**tree)


@dataclass(frozen=True)
class Fit:
    """A line, seconds ≈ Σ coefficient · cause, and how far the measured seconds are from it."""

    coefficients: tuple[float, ...]
    residuals: tuple[float, ...]

    @property
    def worst(self) -> float:
        """The largest residual, either way."""
        return max(map(abs, self.residuals))

    @property
    def typical(self) -> float:
        """The root of the mean square of the residuals."""
        return float(np.sqrt(np.mean(np.square(self.residuals))))


def fit_seconds(causes: Sequence[Sequence[float]], seconds: Sequence[float]) -> Fit:
    """Return the line whose relative errors have the least squares.

    Small messages thus count as much as large ones. causes: of each measurement, such as (1, steps,
    bytes). No coefficient is negative: the most negative one becomes 0 and the rest are fitted
    again. A cause that says no more than those before it (steps, where all groups were as large) is
    0 too.
    """
    measured = np.asarray(seconds, float)
    table = np.asarray(causes, float)
    scaled = table / measured[:, None]
    scale = np.abs(scaled).max(axis=0)
    active = _independent(scaled / np.where(scale > 0, scale, 1))
    found = np.zeros(table.shape[1])
    while active:
        part = scaled[:, active] / scale[active]
        solved = np.linalg.lstsq(part, np.ones(len(measured)), rcond=None)[0] / scale[active]
        if solved.min() >= 0:
            found[active] = solved
            break
        active.pop(int(solved.argmin()))
    residuals = (table @ found - measured) / measured
    return Fit(tuple(map(float, found)), tuple(map(float, residuals)))


def _independent(table: np.ndarray) -> list[int]:
    """Return the columns that no combination of those before them gives."""
    kept: list[int] = []
    for column in range(table.shape[1]):
        if np.linalg.matrix_rank(table[:, [*kept, column]], tol=1e-6) > len(kept):
            kept.append(column)
    return kept


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

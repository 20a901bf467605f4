"""The measurements of ranks, the hardware file fitted to them, and a table of how well the lines
fit."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from itertools import starmap
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
import yaml

from uspft import __version__
from uspft.config import as_tree
from uspft.config.messages import aligned
from uspft.planner.machine import (
    COLLECTIVES,
    PEAK_BF16,
    SUMS,
    Collective,
    Hardware,
    device_of,
    in_turn,
)

FILE = "measured.json"
PRODUCTS, ATTENTION = "products", ("attention forward", "attention backward")
"""The names of the timed computations."""


class Load(NamedTuple):
    """What else uses a host's links at the same time as a group."""

    senders: int = 1
    """The ranks of a host that send to another host at the same time."""
    members: int = 1
    """The ranks that each group has on a host, if the group spans hosts."""


ALONE = Load()


class LinkPoint(NamedTuple):
    """The time of one collective, or of one message (point_to_point), in groups of one size."""

    kind: Collective
    where: str
    """`inside` a host, or `between` hosts."""
    ranks: int
    of_bytes: int
    """The bytes, as `Hardware.collective_seconds` counts them."""
    seconds: float
    load: Load = ALONE

    @property
    def causes(self) -> tuple[float, float, float]:
        """The regressors of the time: 1, the number of consecutive steps, and the bytes that a rank
        sends one after the other."""
        return 1.0, *in_turn(self.kind, self.ranks, self.of_bytes)


class FlopPoint(NamedTuple):
    """The time of a matrix product, or of attention forward or backward, while every rank computes
    one."""

    what: str
    """PRODUCTS, or one of ATTENTION."""
    flops: float
    seconds: float


class HidingPoint(NamedTuple):
    """The times of a transfer to the next rank of a ring, of attention, and of both at once."""

    transfer: float
    attention: float
    both: float


class Points(NamedTuple):
    """All measurements of one cluster, and its description."""

    device: str
    """The GPU's name, or cpu."""
    dtype: str
    kernel: str
    hosts: int
    ranks_per_host: int
    memory_bytes: float
    copied_bytes_per_second: float
    links: Sequence[LinkPoint]
    computed: Sequence[FlopPoint]
    hiding: Sequence[HidingPoint]
    """Empty where a single rank measures."""

    def leave(self, folder: Path) -> None:
        (folder / FILE).write_text(json.dumps(self))

    @classmethod
    def found(cls, folder: Path) -> Points:
        *what, links, computed, hiding = json.loads((folder / FILE).read_text())
        points = [LinkPoint._make([*point, Load(*load)]) for *point, load in links]
        flops, hidden = [*starmap(FlopPoint, computed)], [*starmap(HidingPoint, hiding)]
        return cls._make([*what, points, flops, hidden])


class Fit(NamedTuple):
    """A line, seconds ≈ Σ coefficient · regressor, and its residuals."""

    coefficients: tuple[float, ...]
    residuals: tuple[float, ...]

    @property
    def worst(self) -> float:
        """The largest absolute residual."""
        return max(map(abs, self.residuals))

    @property
    def typical(self) -> float:
        """The root mean square of the residuals."""
        return float(np.sqrt(np.mean(np.square(self.residuals))))


def fit_seconds(causes: Sequence[Sequence[float]], seconds: Sequence[float]) -> Fit:
    """Return the linear fit of seconds that minimises the squares of relative errors.

    Relative errors make small messages count as much as large ones. causes: the regressors of each
    measurement, such as (1, steps, bytes). Coefficients are not negative: the most negative one is
    set to 0 and the others are fitted again. A regressor that is linearly dependent on those before
    it (steps, if all groups had the same size) gets 0 too.
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
    """Return the columns that are linearly independent of those before them."""
    kept: list[int] = []
    for column in range(table.shape[1]):
        if np.linalg.matrix_rank(table[:, [*kept, column]], tol=1e-6) > len(kept):
            kept.append(column)
    return kept


class FittedLine(NamedTuple):
    """One fitted line, for a collective, products or attention."""

    what: str
    fit: Fit
    launch: float
    hop: float
    rate: float
    unit: str

    @property
    def cells(self) -> list[str]:
        """Its row in a table."""
        numbers = [f"{self.launch * 1e6:.1f}", f"{self.hop * 1e6:.1f}", f"{self.rate / 1e9:.4g}"]
        off = [f"{100 * one:.0f} %" for one in (self.fit.typical, self.fit.worst)]
        return [self.what, *numbers, self.unit, *off, str(len(self.fit.residuals))]


LineKey = TypeVar("LineKey")
Cause = tuple[LineKey, Sequence[float], float]
"""For one measurement its line, its regressors (1, steps if there are any, bytes or FLOPs), and the
time."""


def fitted_lines(
    names: Mapping[LineKey, str], points: Sequence[Cause[LineKey]], unit: str = "GFLOP/s"
) -> dict[LineKey, FittedLine]:
    """Fit lines that differ only in their rates together, because groups of a single size cannot
    separate launch time from time per step.

    names: of the lines. If noise leaves a line without a rate, it gets the best rate measured.
    """
    rates = [[one[-1] * (line == name) for name in names] for line, one, _ in points]
    causes = [[*one[:-1], *of] for (_, one, _), of in zip(points, rates, strict=True)]
    fit = fit_seconds(causes, [seconds for *_, seconds in points])
    latency, each = fit.coefficients[: -len(names)], fit.coefficients[-len(names) :]
    launch, hop = (*latency, 0.0)[:2]
    found = {}
    for (key, name), by_one in zip(names.items(), each, strict=True):
        own = [(i, one[-1] / took) for i, (line, one, took) in enumerate(points) if line == key]
        rate = 1 / by_one if by_one else max(seen for _, seen in own)
        part = Fit(fit.coefficients, tuple(fit.residuals[i] for i, _ in own))
        found[key] = FittedLine(name, part, launch, hop, rate, unit)
    return found


class Fitted(NamedTuple):
    """The keys of a hardware file, and the lines from which they come."""

    tree: dict[str, Any]
    lines: list[FittedLine]

    def table(self) -> str:
        """Return a table of every line with its residuals."""
        head = ["", "launch µs", "hop µs", "rate", "", "typical", "worst", "measured"]
        return aligned([head, *(line.cells for line in self.lines)])


def fitted(points: Points, name: str, stands_in: Hardware, date: str) -> Fitted:
    """Return the keys of a hardware file for these measurements.

    stands_in: a cluster whose links are used where none were measured. date: of the measurements.
    """
    lines: list[FittedLine] = []
    links, notes, figures = {}, [], ["memory", "products", "attention"]
    for where in ("inside", "between"):
        found = [point for point in points.links if point.where == where]
        if found:
            links[where] = _links(where, points.ranks_per_host, found, lines)
            figures.append(where)
        else:
            links[where] = _kept(as_tree(getattr(stands_in, where)))
            notes.append(f"{where}: not measured, those of {stands_in.name} stand for it")
    for what in (PRODUCTS, *ATTENTION):
        mine = [
            (what, (1.0, one.flops), one.seconds) for one in points.computed if one.what == what
        ]
        lines += fitted_lines({what: what}, mine).values()
    products, forward, backward = lines[-3:]
    device, hide = device_of(points.device), _hide(points)
    # The vendor's figure, or else the highest rate of any product.
    reached = [one.flops / one.seconds for one in points.computed if one.what == PRODUCTS]
    peak = PEAK_BF16[device] if device else max(products.rate, *reached)
    figures += ["hide"] * len(hide)
    tree = {
        "name": name,
        "what": f"{points.hosts} × {points.ranks_per_host} ranks on {points.device}, as measured",
        **({"device": device} if device else {"peak_flops": _round(peak)}),
        "kernel": points.kernel,
        "measured": {"date": date, "versions": _versions(points), "figures": figures},
        "sources": [
            f"measured: {points.hosts} host(s) of {points.ranks_per_host} ranks, {points.dtype}",
            *notes,
        ],
        "ranks_per_host": points.ranks_per_host,
        "memory": {
            "bytes": float(points.memory_bytes),
            "bytes_per_second": _round(points.copied_bytes_per_second),
        },
        "products": {
            "share": _round(min(1.0, products.rate / peak)),
            "launch_seconds": _round(products.launch),
            "dtype": points.dtype,
        },
        "attention": {
            "forward_flops": _round(forward.rate),
            "backward_flops": _round(backward.rate),
            "launch_seconds": _round((forward.launch + backward.launch) / 2),
        },
        **links,
        **hide,
    }
    return Fitted(tree, lines)


def as_yaml(fits: Fitted) -> str:
    """Return the text of a file for `launch.hardware`."""
    table = "".join(f"# {line}\n" for line in fits.table().splitlines())
    head = f"# Written by `uspft calibrate`; how well its lines fit:\n#\n{table}"
    body = yaml.safe_dump(fits.tree, sort_keys=False, allow_unicode=True, width=1000)
    return f"{head}#\n{body}"


def _versions(points: Points) -> str:
    """Return the names and versions of the measured software."""
    backend = "gloo"
    if points.device != "cpu":
        backend = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    return f"uspft {__version__}, torch {torch.__version__}, {backend}, {points.kernel} attention"


def _hide(points: Points) -> dict[str, float]:
    """Return the measured share of the possible overlap of transfers with attention; empty with a
    single rank."""
    able = sum(min(one.transfer, one.attention) for one in points.hiding)
    if not able:
        return {}
    share = sum(one.transfer + one.attention - one.both for one in points.hiding) / able
    return {"hide": _round(min(1.0, max(0.0, share)))}


def _links(
    where: str, here: int, points: Sequence[LinkPoint], lines: list[FittedLine]
) -> dict[str, Any]:
    """Return a line for each collective; missing ones use that of the all-gather.

    here: ranks of a host. lines: the list to append to.
    """
    found: dict[str, Any] = {}
    for kind in COLLECTIVES:
        every = [one for one in points if one.kind == kind]
        on_host = ", {0.members} a host" if kind in SUMS else ""
        more = f"{kind} {where}{on_host}, {{0.senders}} at once"
        names = {load: more.format(load) for load in sorted({one.load for one in every})}
        names[ALONE] = f"{kind} {where}"
        rates = fitted_lines(names, [(one.load, one.causes, one.seconds) for one in every], "GB/s")
        lines += rates.values()
        alone = rates.pop(ALONE)
        found[kind] = {
            "launch_seconds": _round(alone.launch),
            "hop_seconds": _round(alone.hop),
            "bytes_per_second": _round(alone.rate),
        }
        sizes = sorted({one.ranks for one in every})
        if kind == "all_to_all" and where == "inside" and len(sizes) > 1:
            found[kind]["by_ranks"] = {}
            for ranks in sizes:  # all groups of a host at once
                of = [(ranks, (1.0, o.of_bytes), o.seconds) for o in every if o.ranks == ranks]
                (line,) = fitted_lines({ranks: f"{kind} of {ranks}"}, of, "GB/s").values()
                lines.append(line)
                found[kind]["by_ranks"][str(ranks)] = _round(line.rate)
        if kind in SUMS and rates:  # each group's ring leaves its host once
            found[kind]["host_by_members"] = {
                str(load.members): _round(here // load.members * line.rate)
                for load, line in rates.items()
            }
        elif rates:
            ((load, line),) = rates.items()
            found["host_bytes_per_second"] = _round(load.senders * min(line.rate, alone.rate))
    return {**deepcopy(found["all_gather"]), **found}  # a copy: YAML would write an alias otherwise


def _kept(tree: dict[Any, Any]) -> dict[str, Any]:
    """Return a tree for a file, with string keys and without null."""
    return {
        str(key): _kept(value) if isinstance(value, dict) else value
        for key, value in tree.items()
        if value is not None
    }


def _round(value: float) -> float:
    """Return a number rounded to four digits, more than the precision of the measurements."""
    return float(f"{value:.4g}")

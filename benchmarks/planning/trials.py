"""What each table is asked: with which figures it is predicted, and by which rows it is judged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.lab.results import ROOT
from benchmarks.planning.cases import Run, runs
from benchmarks.planning.fit import Figures, fitted, with_figures
from benchmarks.planning.judge import Score, score
from uspft.planner.machine import Hardware, read_hardware

KIB = 1 << 10
A800 = ("a800-one-host", "a800-two-hosts")
HOSTS = "between.host_by_members"
INSIDE = "inside.all_to_all.by_ranks"


@dataclass(frozen=True)
class Trial:
    """A question to a table: figures are never fitted to a row that judges them."""

    name: str
    what: str
    """The figures by which it is predicted."""
    tables: Sequence[str]
    hardware: str
    stated: Figures = field(default_factory=dict)
    """Figures that take the place of the shipped ones."""
    start: Figures = field(default_factory=dict)
    """Figures that are fitted, with where they start."""
    loose: Mapping[str, float] = field(default_factory=dict)
    fits: Callable[[Run], bool] = lambda _: False
    """Whether a run is one that figures are fitted to."""
    judges: Callable[[Run], bool] = lambda _: True


def _crosses(run: Run) -> bool:
    """Tell whether matrices are split in two on two hosts, where no other run shows the rate of
    gradient sums with four members a host."""
    return run.block.table == "a800-two-hosts" and run.layout.mesh_columns == 2


TRIALS = (
    Trial(
        "L20",
        "links fitted to rows of 8K",
        ("l20", "l20-heads-of-32"),
        "l20",
        stated={"attention.forward_flops": 87e12},  # 73 % of the peak, as on an A100
        start={
            "attention.forward_flops": 87e12,
            f"{INSIDE}.2": 10e9,
            f"{INSIDE}.4": 4e9,
            f"{INSIDE}.8": 1.3e9,
            "inside.point_to_point.bytes_per_second": 11e9,
        },
        loose={"*": 0.05, "attention.forward_flops": 0.1},
        fits=lambda run: run.block.tokens == 8 * KIB,
        judges=lambda run: run.block.tokens != 8 * KIB,
    ),
    Trial("A100, NVLink", "shipped figures", ("a100",), "a100"),
    Trial(
        "A800",
        "shipped figures, without tensor 2 on two hosts",
        A800,
        "a800",
        judges=lambda run: not _crosses(run),
    ),
    Trial(
        "A800, one rate",
        "shipped figures, and 26 GB/s a host for sums of groups with 4 members on it",
        A800,
        "a800",
        stated={f"{HOSTS}.{n}": 26e9 if n == 4 else 194e9 for n in (1, 2, 4, 8)},
    ),
    Trial(
        "A800, fitted",
        "figures fitted to rows of 64K",
        A800,
        "a800",
        start={
            "products.share": 0.75,
            "attention.forward_flops": 210e12,
            "attention.backward_flops": 180e12,
            "attention.launch_seconds": 3e-5,
            "inside.bytes_per_second": 140e9,
            "inside.all_to_all.bytes_per_second": 130e9,
            "inside.point_to_point.bytes_per_second": 120e9,
            "between.point_to_point.bytes_per_second": 25e9,
            "hide": 0.6,
            **{f"{HOSTS}.{n}": 100e9 if n == 1 else 150e9 for n in (1, 2, 4, 8)},
        },
        loose={
            "*": 0.1,
            "attention.launch_seconds": 0.05,
            **{f"{HOSTS}.{n}": 0.05 for n in (1, 2, 4, 8)},
        },
        fits=lambda run: run.block.tokens == 64 * KIB,
        judges=lambda run: run.block.tokens != 64 * KIB,
    ),
    Trial(
        "4 × A100, PCIe",
        "links fitted to rows of 4K",
        ("a100-pcie",),
        "a100",
        start={
            "attention.forward_flops": 100e12,
            f"{INSIDE}.2": 10e9,
            f"{INSIDE}.4": 10e9,
            "inside.point_to_point.bytes_per_second": 10e9,
        },
        loose={"*": 0.05},
        fits=lambda run: run.block.tokens == 4 * KIB,
        judges=lambda run: run.block.tokens != 4 * KIB,
    ),
)


@dataclass(frozen=True)
class Outcome:
    """What a trial came to."""

    trial: Trial
    figures: Figures
    """Those that were fitted."""
    score: Score
    judged: Sequence[tuple[Run, float]]
    """The runs that judge it, with their predicted seconds."""


def outcomes() -> Iterator[Outcome]:
    """Yield what every trial comes to."""
    for trial in TRIALS:
        every = runs(*trial.tables)
        machine = with_figures(shipped(trial.hardware), trial.stated)
        found: dict[str, float] = {}
        if trial.start:
            found = fitted([r for r in every if trial.fits(r)], machine, trial.start, trial.loose)
            machine = with_figures(machine, found)
        judged = [run for run in every if trial.judges(run)]
        predicted = [(run, run.predicted(machine)) for run in judged]
        yield Outcome(trial, found, score(judged, machine), predicted)


def shipped(name: str) -> Hardware:
    """Return the machine of a shipped hardware file."""
    return read_hardware(ROOT / "configs" / "hardware" / f"{name}.yaml")

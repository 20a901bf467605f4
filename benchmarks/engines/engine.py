"""What the benchmark asks of an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from benchmarks.layer import Layer

RESULTS = ("out", "dq", "dk", "dv")


class Cannot(Exception):
    """Why an engine does not run a layer; the same on every rank."""


@dataclass(frozen=True)
class Attention:
    """An engine made ready for one layer on this rank.

    positions [T]: the tokens that it wants here, in its order; none: this rank only waits.
    attend: q [T, H, D], k, v [T, G, D] → out [T, H, D], differentiable. results: what must equal
    dense attention. note: what a reader of the table must know.
    """

    positions: Tensor
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    results: tuple[str, ...] = RESULTS
    note: str = ""


Make = Callable[[Layer], Attention]
"""Collective. Raises Cannot, or ImportError where a package is missing."""


@dataclass(frozen=True)
class Engine:
    """A line of the table; kind: ours, peer or bound."""

    name: str
    kind: str
    make: Make

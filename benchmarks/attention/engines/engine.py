"""What the benchmark asks of an engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from benchmarks.attention.layer import Layer

RESULTS = ("out", "dq", "dk", "dv")


class Cannot(Exception):
    """An engine does not run a layer; the message, the same on every rank, says why."""


@dataclass(frozen=True)
class Attention:
    """This is an engine made ready for one layer on this rank.

    positions [T]: the tokens that it wants here, in its order; where there are none, this rank only
    waits. attend: q [T, H, D], k, v [T, G, D] → out [T, H, D], differentiable. results: what must
    equal dense attention. note: what a reader of the table must know.
    """

    positions: Tensor
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]
    results: tuple[str, ...] = RESULTS
    note: str = ""


Make = Callable[[Layer], Attention]
"""It is collective, and raises Cannot, or ImportError where a package is missing."""


@dataclass(frozen=True)
class Engine:
    """An engine is a line of the table; kind: ours, peer or bound."""

    name: str
    kind: str
    make: Make

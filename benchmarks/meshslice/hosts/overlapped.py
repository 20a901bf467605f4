"""How much of its transfers a flow has hidden, and how much it could have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

from uspft.planner.mesh import Flow, Slice, flow_seconds

PRODUCTS, TRANSFERS = "products alone", "transfers alone"
"""What takes turns with the slices, and bounds them."""


class Overlap(NamedTuple):
    """What one flow gained, in seconds, and what it could have gained."""

    products: float
    transfers: float
    collective: float
    best: float
    slices: int
    """Those of the best."""
    bound: float

    @property
    def gain(self) -> float:
        """How many times faster than Collective the best slices are."""
        return self.collective / self.best


def bound_of(flow: Flow, products: float, transfers: float, slices: int) -> float:
    """Return the least seconds of a flow whose transfers share one link: the larger of both parts,
    with a first and a last slice of what the other one cannot hide."""
    one = Slice(transfers / slices, 0.0, products / slices)
    return flow_seconds(flow, one, slices, shared=True)


def overlap_of(flow: Flow, seconds: Mapping[str, Sequence[float]]) -> Overlap:
    """Return what one flow gained, of the seconds of each round by what took turns."""
    middle = {name: median(each) for name, each in seconds.items()}
    products, transfers = middle.pop(PRODUCTS), middle.pop(TRANSFERS)
    collective = middle.pop("1")
    best = min(middle, key=lambda name: middle[name])
    bound = min(bound_of(flow, products, transfers, int(name)) for name in middle)
    return Overlap(products, transfers, collective, middle[best], int(best), bound)

"""The bytes that a layer sends under expert parallelism (model/experts.py).

A token is sent once to each other rank that holds some of its experts, with its scores and choices,
and one sum is sent back. Where tokens go depends on the router: from counted choices the bytes are
exact; without them, all choices are taken to be equally likely.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb
from typing import NamedTuple

from uspft.families import ModelShape
from uspft.planner.layer_kinds import layer_kind
from uspft.planner.memory.operations import INDEX, WIDE
from uspft.sequence import Traffic

CHOICE = 4
"""The bytes in which an expert's number is sent."""


@dataclass(frozen=True)
class RowSizes:
    """The bytes of a token that is sent to an expert's rank."""

    token: int
    """The size of its hidden state, which is also that of the experts' output."""
    scores: int
    choices: int
    returns_again: bool = False
    """Whether a recomputed layer sends the experts' output again, since shared experts come after
    the routed ones."""

    @classmethod
    def of(cls, shape: ModelShape, element: int) -> RowSizes:
        """Return the sizes for a model. element: the bytes of an element of its weights."""
        score = WIDE if layer_kind(shape).wide_scores else element
        met, shared = shape.met_experts, bool(shape.shared_features)
        behind = shared and shape.model_type != "ernie4_5_moe"  # its shared experts come first
        return cls(shape.hidden_size * element, met * score, met * CHOICE, behind)


class RoutedRows(NamedTuple):
    """The rows that one expert parallel rank sends and receives in one forward of a layer."""

    sent: float
    received: float
    to: float
    """The number of ranks to which it sends rows."""
    from_: float
    """The number of ranks from which it receives rows."""

    @classmethod
    def likely(cls, shape: ModelShape, tokens: float, ranks: int) -> RoutedRows:
        """Return the mean if all choices are equally likely. tokens: of each rank."""
        rows = tokens * ranks_met(shape, ranks)
        return cls(rows, rows, ranks - 1, ranks - 1)


def ranks_met(shape: ModelShape, ranks: int) -> float:
    """Return the mean number of other ranks that hold some expert of a token."""
    every, met = shape.experts, shape.met_experts
    none_there = comb(every - every // ranks, met) / comb(every, met)
    return (ranks - 1) * (1 - none_there)


def exchanges(rows: RoutedRows, sizes: RowSizes, ranks: int, forwards: int = 1) -> list[Traffic]:
    """Return every all-to-all of one rank in one layer, forward and backward, in order.

    Forward: the numbers of rows, the rows, their scores, their choices, and the experts' outputs.
    Backward: the gradients of the outputs, of the rows and of the scores. forwards: how often the
    forward runs; a second run stops before the experts' outputs are sent back, unless
    `sizes.returns_again`.
    """
    gone = (rows.sent, rows.to)
    come = (rows.received, rows.from_)

    def of(size: int, way: tuple[float, float]) -> Traffic:
        return Traffic(*(size * way[0], way[1]))  # type: ignore[arg-type]

    count = Traffic(INDEX * (ranks - 1), ranks - 1)
    there = [count, of(sizes.token, gone), of(sizes.scores, gone), of(sizes.choices, gone)]
    back = of(sizes.token, come)
    backward = [of(sizes.token, gone), back, of(sizes.scores, come)]
    again = [*there, *[back] * sizes.returns_again] * (forwards - 1)
    return [*there, back, *again, *backward]

"""What a layer sends whose experts ranks divide (model/experts.py), and where that is as much as
ZeRO would gather.

A token goes once to each other rank that holds some of its experts, with its scores and choices,
and one sum comes back. How many tokens go where is a router's doing: of counted choices what is
sent follows exactly; without any, all choices are taken to be equally likely.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb
from typing import NamedTuple

from uspft.families import ModelShape
from uspft.planner.layer_kinds import layer_kind
from uspft.planner.memory.operations import INDEX, WIDE
from uspft.planner.products import expert_parameters
from uspft.sequence import Traffic

CHOICE = 4
"""The bytes in which an expert's number is sent."""


@dataclass(frozen=True)
class RowSizes:
    """A token on its way to experts, in bytes."""

    token: int
    """Of its hidden state, and of what experts make of it."""
    scores: int
    choices: int
    returns_again: bool = False
    """Whether a layer that is run again ends behind its experts, which shared experts make it."""

    @classmethod
    def of(cls, shape: ModelShape, element: int) -> RowSizes:
        """Return those of a model whose weights have so many bytes."""
        score = WIDE if layer_kind(shape).wide_scores else element
        met, shared = shape.met_experts, bool(shape.shared_features)
        behind = shared and shape.model_type != "ernie4_5_moe"  # which meets shared ones first
        return cls(shape.hidden_size * element, met * score, met * CHOICE, behind)


class RoutedRows(NamedTuple):
    """The rows that one rank and the others of its set exchange in one forward of a layer."""

    sent: float
    received: float
    to: float
    """The number of ranks that get some."""
    from_: float
    """The number of ranks of which some come."""

    @classmethod
    def likely(cls, shape: ModelShape, tokens: float, ranks: int) -> RoutedRows:
        """Return the mean of so many tokens a rank, whose choices are all equally likely."""
        rows = tokens * ranks_met(shape, ranks)
        return cls(rows, rows, ranks - 1, ranks - 1)


def ranks_met(shape: ModelShape, ranks: int) -> float:
    """Return how many other ranks hold some expert of a token, on the mean of all choices."""
    every, met = shape.experts, shape.met_experts
    none_there = comb(every - every // ranks, met) / comb(every, met)
    return (ranks - 1) * (1 - none_there)


def exchanges(rows: RoutedRows, sizes: RowSizes, ranks: int, forwards: int = 1) -> list[Traffic]:
    """Return every all-to-all of one rank in one layer, forward and backward, in their order.

    Forward: how many rows go where, the rows, their scores, their choices, and what experts have
    made of the rows that came. Backward: the gradient of that, those of the rows and of the scores.
    forwards: how often the forward is run; where that is twice, the second ends before experts'
    rows return.
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


def cost(rows: RoutedRows, sizes: RowSizes, ranks: int, forwards: int = 1) -> Traffic:
    """Return what one rank sends in one layer, forward and backward; arguments as of
    `exchanges`."""
    every = exchanges(rows, sizes, ranks, forwards)
    return Traffic(sum(one.bytes for one in every), sum(one.messages for one in every))


def crossover_tokens(shape: ModelShape, ranks: int, zero_bytes: float, token_bytes: float) -> float:
    """Return below how many tokens a rank in one forward its dispatch sends less than ZeRO saves.

    Of experts that Z ranks hold alike ZeRO sends (Z - 1) / Z of their bytes, and of those that
    E of them divide (Z / E - 1) / (Z / E) of an E-th: 1 - 1 / E of their bytes less, whatever Z.
    zero_bytes: that it moves of a parameter for each forward and backward. token_bytes: that a
    token's dispatch sends in a layer (`token_cost`).
    """
    return zero_bytes * expert_parameters(shape) * (1 - 1 / ranks) / token_bytes


def token_cost(shape: ModelShape, element: int, ranks: int, forwards: int = 1) -> float:
    """Return the bytes that a token's dispatch sends in one layer, forward and backward, on the
    mean of all choices; arguments as of `exchanges`."""
    one, none = (RoutedRows.likely(shape, tokens, ranks) for tokens in (1, 0))
    sizes = RowSizes.of(shape, element)
    return cost(one, sizes, ranks, forwards).bytes - cost(none, sizes, ranks, forwards).bytes

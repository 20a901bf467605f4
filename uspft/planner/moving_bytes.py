"""What weights that move between layouts cost, in bytes on a rank for each parameter that trains.

It is of matrices that the tensor degrees divide, in layouts whose parts lie inside one another,
each of which all ranks run at once: n ranks hold n ÷ t copies of each part at degree t. Weights
have the bytes of the compute type, gradients four.
"""

from __future__ import annotations

from collections.abc import Sequence


def sent_by_owners(degrees: Sequence[int], ranks: int, weight_bytes: int) -> float:
    """Return the bytes that a rank sends in a step where layouts gather from owners and give back.

    degrees: of the step's layouts. Each layout's part, but for what a rank owns of it itself.
    """
    return sum((1 / t - 1 / ranks) * (weight_bytes + 4) for t in degrees)


def sent_straight(degrees: Sequence[int], ranks: int, weight_bytes: int) -> float:
    """Return the bytes that a rank sends in a step where weights go from layout to layout.

    degrees: of the step's layouts, rising; the last is where weights are at home. Weights go to the
    first layout; in each but the last the gradient is summed by all copies of a part; the last sums
    it where it is owned, and owners give their copies the new weights.
    """
    *others, home = degrees
    first = (1 / degrees[0] - 1 / home) * weight_bytes
    sums = sum(2 * (ranks // t - 1) / (ranks // t) / t * 4 for t in others)
    return first + sums + (1 / home - 1 / ranks) * (4 + weight_bytes)


def held_bytes(degree: int, ranks: int, weight_bytes: int, *, summed: bool = False) -> float:
    """Return the bytes that a rank holds while the layout of a tensor degree runs.

    Master, two moments and gradient of what it owns; weights and summed gradients of its part.
    summed: whether it also has the sums of layouts before, as it has where they go straight.
    """
    return 16 / ranks + (weight_bytes + 4 + 4 * summed) / degree

"""The bytes that DeepSpeed reads and writes to sum gradients and to update weights."""

from __future__ import annotations

from typing import NamedTuple

from uspft.planner.memory.operations import WIDE
from uspft.planner.step_shape import StepShape


class GradientBytes(NamedTuple):
    """The bytes that DeepSpeed reads and writes per trained element to sum gradients and to update.

    The first number of a pair is for each element that the rank stores, the second for each element
    that it updates (its ZeRO shard).
    """

    first: tuple[float, float]
    """In a step's first pass."""
    later: tuple[float, float]
    """In each later pass."""
    averaged: float
    """Per stored element, after gradients are summed over ranks."""
    once: tuple[float, float]
    """Once a step: the norm, clipping, AdamW and the rounded weights."""


GRADIENT_BYTES_OF: dict[tuple[int, bool], GradientBytes] = {
    (0, False): GradientBytes((20, 0), (20, 0), 8, (34, 28)),
    (1, False): GradientBytes((34, 0), (26, 0), 8, (20, 34)),
    (2, False): GradientBytes((24, 22), (24, 18), 0, (0, 70)),
    (3, False): GradientBytes((22, 8), (22, 12), 0, (0, 70)),
    (0, True): GradientBytes((16, 0), (12, 0), 8, (0, 40)),
    (1, True): GradientBytes((32, 0), (12, 0), 0, (0, 72)),
    (2, True): GradientBytes((24, 8), (24, 20), 0, (0, 72)),
    (3, True): GradientBytes((24, 8), (24, 12), 0, (0, 72)),
}
"""By the ZeRO stage and whether weights are float32, as counted in DeepSpeed 0.19."""


ADAMW_BYTES = 30
"""AdamW reads weight, gradient and two moments in float32, writes all but the gradient, and rounds
the weight to 16 bits."""


def update_bytes(step: StepShape, held: float, ranks: int, passes: int) -> float:
    """Return the bytes that summing gradients and the update read and write in a step.

    held: the trained elements that a rank stores. ranks: how many ranks store the same, which from
    stage 1 on divide the update. passes: the step's forward and backward passes.
    """
    if step.scatters:  # not DeepSpeed: products add to the float32 sums themselves
        return ADAMW_BYTES * held / ranks
    of = GRADIENT_BYTES_OF[step.options.zero_stage, step.options.element == WIDE]
    each = [
        first + (passes - 1) * later + once
        for first, later, once in zip(of.first, of.later, of.once, strict=True)
    ]
    whole = each[0] + of.averaged * (ranks > 1)
    return held * (whole + each[1] / (ranks if step.options.zero_stage else 1))

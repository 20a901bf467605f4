"""The learning rate of each step."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from uspft.config.recipe import ScheduleBlock


def learning_rate(step: int, steps: int, peak: float, schedule: ScheduleBlock) -> float:
    """Learning rate at a step, counted from 1.

    Linear from 0 over the warm-up, then constant, or down to the minimum at the last step along a
    line or half a cosine.
    """
    warmup = schedule.warmup_steps
    if warmup is None:
        # As the recipe's decimals say: in binary 0.07 · 100 is more than 7.
        warmup = math.ceil(Fraction(str(schedule.warmup_ratio or 0)) * steps)
    if step <= warmup:
        return peak * step / warmup
    if schedule.type == "constant":
        return peak
    done = (step - warmup) / (steps - warmup)
    left = 1.0 - done if schedule.type == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return schedule.min_learning_rate + (peak - schedule.min_learning_rate) * left

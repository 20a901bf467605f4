"""The learning rate of each step."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from uspft.config.recipe import ScheduleBlock


def learning_rate(step: int, steps: int, peak: float, schedule: ScheduleBlock) -> float:
    """Return the learning rate at a step, counted from 1.

    It is linear from 0 over the warm-up, then constant, or it falls to the minimum at the last step
    along a line or half a cosine.
    """
    warmup = schedule.warmup_steps
    if warmup is None:
        # Exact, as the recipe's decimals say: in binary 0.07 · 100 is more than 7.
        warmup = math.ceil(Fraction(str(schedule.warmup_ratio or 0)) * steps)
    if step <= warmup:
        return peak * step / warmup
    if schedule.type == "constant":
        return peak
    done = (step - warmup) / (steps - warmup)
    left = 1.0 - done if schedule.type == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return schedule.min_learning_rate + (peak - schedule.min_learning_rate) * left

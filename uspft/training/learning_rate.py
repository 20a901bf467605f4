"""The learning rate of each step."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from uspft.config.recipe import ScheduleBlock


def learning_rate(step: int, steps: int, peak: float, schedule: ScheduleBlock) -> float:
    """Return the learning rate at a step, counted from 1.

    It rises linearly over the warm-up; then it is the peak, or falls to the minimum at the last
    step, as `schedule.type` says.
    """
    warmup = schedule.warmup_steps
    if warmup is None:
        warmup = _share(schedule.warmup_ratio or 0, steps)
    if step <= warmup:
        return schedule.warmup_initial + (peak - schedule.warmup_initial) * step / warmup
    done = (step - warmup) / (steps - warmup)
    left = _left(step, steps, done, schedule)
    return schedule.min_learning_rate + (peak - schedule.min_learning_rate) * left


def _left(step: int, steps: int, done: float, schedule: ScheduleBlock) -> float:
    """Return the rate's position between the minimum (0) and the peak (1).

    done: the share of the steps after the warm-up that has passed with this one.
    """
    if schedule.type == "constant":
        return 1.0
    if schedule.type == "linear":
        return 1.0 - done
    if schedule.type == "polynomial":
        return (1.0 - done) ** (1.0 if schedule.power is None else schedule.power)
    if schedule.type == "wsd":
        falls = _share(0.1 if schedule.decay_ratio is None else schedule.decay_ratio, steps)
        return min(1.0, (steps - step) / falls) if falls else 1.0
    if schedule.type == "cosine_restarts" and done < 1.0:
        done = (done * (schedule.cycles or 1)) % 1.0
    return 0.5 * (1.0 + math.cos(math.pi * done))


def _share(ratio: float, steps: int) -> int:
    """Return a share of the steps, rounded up; exact in decimals: in binary 0.07 · 100 is more than
    7."""
    return math.ceil(Fraction(str(ratio)) * steps)

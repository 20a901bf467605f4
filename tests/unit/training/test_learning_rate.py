"""The learning rate against tables worked out by hand from the contract's formula."""

from __future__ import annotations

from typing import Any

import pytest

from uspft.config.recipe import ScheduleBlock
from uspft.training.learning_rate import learning_rate

ROOT_HALF = 0.5**0.5
NO_WARMUP = {"warmup_ratio": 0.0}
TABLES: dict[str, tuple[dict[str, Any], list[float]]] = {
    "cosine": (NO_WARMUP, [(1 + ROOT_HALF) / 2, 0.5, (1 - ROOT_HALF) / 2, 0.0]),
    "cosine to a minimum": (
        NO_WARMUP | {"min_learning_rate": 0.2},
        [0.6 + 0.4 * ROOT_HALF, 0.6, 0.6 - 0.4 * ROOT_HALF, 0.2],
    ),
    "linear": (NO_WARMUP | {"type": "linear"}, [0.75, 0.5, 0.25, 0.0]),
    "linear to a minimum": (
        NO_WARMUP | {"type": "linear", "min_learning_rate": 0.2},
        [0.8, 0.6, 0.4, 0.2],
    ),
    "constant": (NO_WARMUP | {"type": "constant", "min_learning_rate": 0.2}, [1.0] * 4),
    "warm-up by steps": ({"warmup_steps": 2}, [0.5, 1.0, 0.5, 0.0]),
    "warm-up by ratio, rounded up": ({"warmup_ratio": 0.3}, [0.5, 1.0, 0.5, 0.0]),
    "warm-up, then constant": ({"type": "constant", "warmup_steps": 2}, [0.5, 1.0, 1.0, 1.0]),
    "warm-up alone": ({"warmup_ratio": 1.0}, [0.25, 0.5, 0.75, 1.0]),
    "warm-up from a rate": ({"warmup_steps": 2, "warmup_initial": 0.4}, [0.7, 1.0, 0.5, 0.0]),
    "polynomial": (
        NO_WARMUP | {"type": "polynomial", "power": 2.0, "min_learning_rate": 0.2},
        [0.2 + 0.8 * 0.5625, 0.2 + 0.8 * 0.25, 0.2 + 0.8 * 0.0625, 0.2],
    ),
    "polynomial of power 1": (NO_WARMUP | {"type": "polynomial"}, [0.75, 0.5, 0.25, 0.0]),
    "cosine with restarts": (
        NO_WARMUP | {"type": "cosine_restarts", "cycles": 2, "min_learning_rate": 0.2},
        [0.6, 1.0, 0.6, 0.2],
    ),
    "cosine with one cycle": (
        NO_WARMUP | {"type": "cosine_restarts"},
        [(1 + ROOT_HALF) / 2, 0.5, (1 - ROOT_HALF) / 2, 0.0],
    ),
    "stays, then falls": (
        {"warmup_steps": 1, "type": "wsd", "decay_ratio": 0.5, "min_learning_rate": 0.2},
        [1.0, 1.0, 0.6, 0.2],
    ),
    "stays, then falls in a tenth, rounded up": (NO_WARMUP | {"type": "wsd"}, [1.0, 1.0, 1.0, 0.0]),
    "stays to the end": (NO_WARMUP | {"type": "wsd", "decay_ratio": 0.0}, [1.0] * 4),
    "warm-up longer than the run": ({"warmup_steps": 8}, [0.125, 0.25, 0.375, 0.5]),
}


@pytest.mark.parametrize("name", TABLES)
def test_four_steps(name: str) -> None:
    given, want = TABLES[name]
    schedule = ScheduleBlock.model_validate(given)
    rates = [learning_rate(step, 4, 1.0, schedule) for step in (1, 2, 3, 4)]
    assert rates == pytest.approx(want, abs=1e-12)


@pytest.mark.parametrize(
    ("ratio", "steps", "warmup"),
    [(0.03, 1000, 30), (0.03, 150, 5), (0.1, 150, 15), (0.07, 100, 7), (0.14, 50, 7)],
)
def test_the_warm_up_is_as_long_as_the_decimals_say(ratio: float, steps: int, warmup: int) -> None:
    schedule = ScheduleBlock.model_validate({"warmup_ratio": ratio})
    rates = [learning_rate(step, steps, 1.0, schedule) for step in range(1, steps + 1)]
    assert rates.index(1.0) + 1 == warmup, "0.07 · 100 is a little more than 7 in binary"
    assert rates[0] == pytest.approx(1 / warmup)


def test_the_default_is_cosine_with_three_percent_of_warm_up() -> None:
    schedule = ScheduleBlock.model_validate({})
    assert learning_rate(1, 100, 1.0, schedule) == pytest.approx(1 / 3)
    assert learning_rate(3, 100, 1.0, schedule) == 1.0
    assert learning_rate(100, 100, 1.0, schedule) == pytest.approx(0.0, abs=1e-12)

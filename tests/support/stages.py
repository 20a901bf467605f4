"""ZeRO's stages, as `deepspeed.zero_optimization` of a recipe has them."""

from __future__ import annotations

from typing import Any

ZERO: dict[str, dict[str, Any]] = {
    "zero0": {"stage": 0},
    "zero1": {"stage": 1},
    "zero2": {"stage": 2},
    "zero3": {"stage": 3},
    "zero3 whole": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero3 no reduce_scatter": {"stage": 3, "reduce_scatter": False},
}
FULLY = [name for name in ZERO if "no reduce" not in name]

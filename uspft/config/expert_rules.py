"""What experts that ranks divide cannot be beside, most of it silently wrong in DeepSpeed 0.19."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from uspft.config.algorithms import AUTO
from uspft.config.messages import shown
from uspft.config.problems import Finding
from uspft.config.types import Open

if TYPE_CHECKING:
    from uspft.config.recipe import Recipe

_ZERO = "deepspeed.zero_optimization"
_WRONG: dict[str, tuple[object, str]] = {
    "contiguous_gradients": (False, "sums their gradients twice"),
    "round_robin_gradients": (True, "ends in an error"),
    "reduce_scatter": (False, "averages them with those of ranks that hold others"),
}
"""Keys of ZeRO with the value that divided experts cannot have, and what DeepSpeed does there."""


def experts(recipe: Recipe) -> Iterator[Finding]:
    """Experts that ranks divide stand beside what they go with."""
    parallel, zero = recipe.parallel_config, recipe.deepspeed.zero_optimization
    if isinstance(parallel.expert_parallel, Open) and parallel.strategies is not None:
        what = f"is {AUTO}, beside strategies, whose layouts all have it"
        yield "parallel_config.expert_parallel", what, "write a number"
    if parallel.expert_parallel == 1:
        return
    beside = f"beside parallel_config.expert_parallel {parallel.expert_parallel}"
    if zero.get("stage", 1) == 0:
        what = f"is 0, {beside}: each rank would clip by the norm of its own experts"
        yield f"{_ZERO}.stage", what, "write 1, 2 or 3"
    for key, (value, does) in _WRONG.items():
        if zero.get(key) is value:
            what = f"is {shown(value)}, {beside}, where DeepSpeed {does}"
            yield f"{_ZERO}.{key}", what, f"write {shown(not value)}, or leave it out"
    if (shared := zero.get("zero_hpz_partition_size", 1)) > 1:
        what = f"is {shared}, which is not available {beside}"
        yield f"{_ZERO}.zero_hpz_partition_size", what, "leave it out"
    if parallel.switching == "move":
        what = f"is move, {beside}: owners gather weights that all ranks hold alike"
        yield "parallel_config.switching", what, "write in_place, or expert_parallel: 1"

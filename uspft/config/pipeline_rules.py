"""What a pipeline cannot be beside: what would be wrong without a word, or wait for ever."""

from __future__ import annotations

from typing import TYPE_CHECKING

from uspft.config.problems import Finding

if TYPE_CHECKING:
    from uspft.config.recipe import Recipe

_ZERO = "deepspeed.zero_optimization"


def beside_stages(recipe: Recipe) -> list[Finding]:
    """Return what speaks against a recipe with several `pipeline_stage`."""
    parallel, zero = recipe.parallel_config, recipe.deepspeed.zero_optimization
    stages = f"parallel_config.pipeline_stage {parallel.pipeline_stage}"
    stage = zero.get("stage", 1)
    found: list[Finding] = []
    if stage == 0:
        found.append((f"{_ZERO}.stage", f"is 0, beside {stages}", "write 1, 2 or 3"))
    for key, off in (("zero_hpz_partition_size", 1), ("mics_shard_size", -1)):
        if zero.get(key, off) > off:
            what = f"is {zero[key]}, which is not available beside {stages}"
            found.append((f"{_ZERO}.{key}", what, "leave it out"))
    if parallel.strategies is not None:
        what = f"are several layouts, which have no stages, beside {stages}"
        found.append(("parallel_config.strategies", what, "leave them out, or write 1 stage"))
    if parallel.pp_interleave_num == 1:
        return found
    virtual = f"parallel_config.pp_interleave_num {parallel.pp_interleave_num}"
    if stage in (2, 3) and zero.get("offload_optimizer"):
        what = f"loses gradients at stage {stage}, beside {virtual}"
        found.append((f"{_ZERO}.offload_optimizer", what, "leave it out, or write 1 virtual stage"))
    return found

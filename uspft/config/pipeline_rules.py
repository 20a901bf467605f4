"""What a pipeline cannot be beside: what would be wrong without a word, or wait for ever; and what
is said of stages where there are none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from uspft.config.algorithms import AUTO
from uspft.config.problems import Finding, reads
from uspft.config.strategies import KEY, strategies_of
from uspft.config.types import Open

if TYPE_CHECKING:
    from uspft.config.degrees import ParallelBlock
    from uspft.config.recipe import Recipe

_ZERO = "deepspeed.zero_optimization"
_OFF: dict[str, tuple[object, ...]] = {
    "pp_interleave_num": (1,),
    "pipeline_scheduler": (None, AUTO),
    "layers_per_stage": (None,),
    "offset": (None, 0, (0,)),
}
"""Keys that say something of stages, and the values that say nothing, of which the first is off."""
WITHOUT_STAGES = {
    "pipeline_stage": 1,
    "micro_batch_num": 1,
    "pipeline_interleave": None,
    **{key: values[0] for key, values in _OFF.items()},
}
"""What a resolved `parallel_config` says of stages where there is one."""


@reads("parallel_config", "deepspeed.zero_optimization")
def stages(recipe: Recipe) -> Iterator[Finding]:
    """Stages stand beside what they go with; where there is one, nothing is said of several."""
    parallel = recipe.parallel_config
    for number, one in enumerate(strategies_of(recipe)):
        for key, off in (("pipeline_stage", 1), ("pp_interleave_num", 1), ("micro_batch_num", 1)):
            if (value := getattr(one, key)) not in (off, AUTO):
                what = f"is {value}, and layouts that switch have no stages"
                yield f"{KEY}[{number}].{key}", what, f"write {off}, or leave {KEY} out"
    if parallel.strategies is not None and parallel.micro_batch_num not in (1, AUTO):
        what = f"is {parallel.micro_batch_num}, and with {KEY} it follows from a step's samples"
        yield "parallel_config.micro_batch_num", what, f"write {AUTO}, or leave it out"
    virtual, interleaved = parallel.pp_interleave_num, parallel.pipeline_interleave
    if isinstance(interleaved, bool) and interleaved != (virtual > 1):
        what = f"is {str(interleaved).lower()}, and parallel_config.pp_interleave_num is {virtual}"
        remedy = "write true, or pp_interleave_num: 1"
        if interleaved:
            remedy = "write pp_interleave_num above 1, or leave this out"
        yield "parallel_config.pipeline_interleave", what, remedy
    if isinstance(parallel.pipeline_stage, Open):
        yield from _beside_open(parallel)
        return
    if parallel.pipeline_stage > 1:
        yield from beside_stages(recipe)
        return
    for key, values in _OFF.items():
        if (given := getattr(parallel, key)) not in values:
            what = f"is {as_list(given)}, and parallel_config.pipeline_stage is 1"
            least = "null" if values[0] is None else values[0]
            yield f"parallel_config.{key}", what, f"write {least}, or pipeline_stage above 1"


def _beside_open(parallel: ParallelBlock) -> Iterator[Finding]:
    """Where the planner chooses how many stages there are, nothing is said of each of them."""
    for key in ("layers_per_stage", "offset"):
        if (given := getattr(parallel, key)) not in _OFF[key]:
            what = f"is {as_list(given)}, and parallel_config.pipeline_stage is {AUTO}"
            yield f"parallel_config.{key}", what, "leave it out, or write how many stages there are"


def beside_stages(recipe: Recipe) -> list[Finding]:
    """Return what speaks against a recipe with several `pipeline_stage`."""
    parallel, zero = recipe.parallel_config, recipe.deepspeed.zero_optimization
    stages = f"parallel_config.pipeline_stage {parallel.pipeline_stage}"
    stage = zero.get("stage", 1)
    found: list[Finding] = []
    if None not in (parallel.layers_per_stage, parallel.offset):
        what = "stands beside `parallel_config.layers_per_stage`, and only one of them can rule"
        found.append(("parallel_config.offset", what, "keep one and write null for the other"))
    if stage == 0:
        found.append((f"{_ZERO}.stage", f"is 0, beside {stages}", "write 1, 2 or 3"))
    if (shared := zero.get("zero_hpz_partition_size", 1)) > 1:
        what = f"is {shared}, which is not available beside {stages}"
        found.append((f"{_ZERO}.zero_hpz_partition_size", what, "leave it out"))
    if parallel.strategies is not None:
        what = f"are several layouts, which have no stages, beside {stages}"
        found.append((KEY, what, "leave them out, or write 1 stage"))
    if parallel.pp_interleave_num == 1:
        return found
    virtual = f"parallel_config.pp_interleave_num {parallel.pp_interleave_num}"
    if stage in (2, 3) and zero.get("offload_optimizer"):
        what = f"loses gradients at stage {stage}, beside {virtual}"
        found.append((f"{_ZERO}.offload_optimizer", what, "leave it out, or write 1 virtual stage"))
    return found


@reads(
    "memory.gradient_checkpointing",
    "parallel_config.pipeline_stage",
    "parallel_config.pp_interleave_num",
)
def checkpointed(recipe: Recipe) -> Iterator[Finding]:
    """A list of checkpointed layers has a number for each stage."""
    given, parallel = recipe.memory.gradient_checkpointing, recipe.parallel_config
    ranks, virtual = parallel.pipeline_stage, parallel.pp_interleave_num
    if isinstance(given, bool | int):
        return
    if isinstance(ranks, Open):
        what = f"is {as_list(given)}, and parallel_config.pipeline_stage is {AUTO}"
        remedy = "write one number for all, or how many stages there are"
        yield "memory.gradient_checkpointing", what, remedy
        return
    nested = [one for one in given if isinstance(one, tuple)]
    lengths = {len(one) for one in nested} or {len(given)}
    if len(nested) not in (0, virtual) or lengths != {ranks}:
        what = f"is {as_list(given)}, and there are {ranks} stages (parallel_config.pipeline_stage)"
        what += f" of {virtual} virtual ones" if virtual > 1 else ""
        remedy = f"write a list of {ranks} numbers"
        remedy += f", or {virtual} such lists" if virtual > 1 else ", or one number for all"
        yield "memory.gradient_checkpointing", what, remedy


def as_list(value: object) -> object:
    """Return what a recipe has as tuples as a message shows it."""
    return list(map(as_list, value)) if isinstance(value, tuple) else value

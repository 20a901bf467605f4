"""What a pipeline cannot be beside: what would be wrong without a word, or wait for ever; and what
is said of stages where there are none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from uspft.config.algorithms import AUTO
from uspft.config.messages import as_written
from uspft.config.problems import Finding, reads
from uspft.config.strategies import KEY, strategies_of, weights_move
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
    "seq_split_num": (1,),
    "sequence_chunks": ("time",),
}
"""Keys that say something of stages, and the values that say nothing, of which the first is off."""
WITHOUT_STAGES = {
    "pipeline_stage": 1,
    "micro_batch_num": 1,
    "pipeline_interleave": None,
    **{key: values[0] for key, values in _OFF.items()},
}
"""What a resolved `parallel_config` says of stages where there is one."""


def _of_strategies(recipe: Recipe) -> Iterator[Finding]:
    """Layouts that switch have stages where weights move, and neither virtual ones nor chunks."""
    parallel, every = recipe.parallel_config, strategies_of(recipe)
    staged = [number for number, one in enumerate(every) if one.pipeline_stage != 1]
    for number, one in enumerate(every):
        for key in ("pp_interleave_num", "seq_split_num"):
            if (value := getattr(one, key)) != 1:
                has = "virtual stages" if key == "pp_interleave_num" else "chunks"
                what = f"is {value}, and layouts that switch have no {has}"
                yield f"{KEY}[{number}].{key}", what, f"write 1, or leave {KEY} out"
        if one.micro_batch_num not in (AUTO, *[1] * (number not in staged)):
            what = f"is {one.micro_batch_num}, and it follows from a step's samples"
            yield f"{KEY}[{number}].micro_batch_num", what, f"write {AUTO}, or leave it out"
        if one.layers_per_stage is not None and number not in staged:
            what = f"is {as_written(one.layers_per_stage)}, and its pipeline_stage is 1"
            yield f"{KEY}[{number}].layers_per_stage", what, "leave it out, or write more stages"
        if number in staged and not weights_move(parallel):
            what = f"is {one.pipeline_stage}, and with switching: in_place ranks keep their layers"
            yield f"{KEY}[{number}].pipeline_stage", what, "write switching: move, or 1"
    if staged and parallel.offset not in _OFF["offset"]:
        what = f"is {as_written(parallel.offset)}, beside layouts of which each has its own stages"
        yield "parallel_config.offset", what, f"write {KEY}[n].layers_per_stage, or leave it out"
    if staged and not isinstance(recipe.memory.gradient_checkpointing, bool):
        given = as_written(recipe.memory.gradient_checkpointing)
        what = f"is {given} of a stage's layers, and layouts that switch have different stages"
        yield "memory.gradient_checkpointing", what, "write true or false"


@reads("parallel_config", "deepspeed.zero_optimization", "memory.gradient_checkpointing")
def stages(recipe: Recipe) -> Iterator[Finding]:
    """Stages stand beside what they go with; where there is one, nothing is said of several."""
    parallel = recipe.parallel_config
    yield from _of_strategies(recipe)
    if parallel.strategies is not None and parallel.micro_batch_num not in (1, AUTO):
        what = f"is {parallel.micro_batch_num}, and with {KEY} it follows from a step's samples"
        yield "parallel_config.micro_batch_num", what, f"write {AUTO}, or leave it out"
    virtual, interleaved = parallel.pp_interleave_num, parallel.pipeline_interleave
    if isinstance(interleaved, bool) and interleaved != (virtual > 1):
        what = f"is {as_written(interleaved)}, and parallel_config.pp_interleave_num is {virtual}"
        remedy = "write true, or pp_interleave_num: 1"
        if interleaved:
            remedy = "write pp_interleave_num above 1, or leave this out"
        yield "parallel_config.pipeline_interleave", what, remedy
    if isinstance(parallel.pipeline_stage, Open):
        yield from _beside_open(parallel)
        return
    if parallel.pipeline_stage > 1:
        yield from beside_stages(recipe)
        yield from _chunks(recipe)
        return
    staged = any(one.pipeline_stage != 1 for one in strategies_of(recipe))
    for key, values in _OFF.items():
        if staged and key in ("pipeline_scheduler", "offset"):
            continue  # of a strategy's stages, or refused as such
        if (given := getattr(parallel, key)) not in values:
            what = f"is {as_written(given)}, and parallel_config.pipeline_stage is 1"
            least = "null" if values[0] is None else values[0]
            yield f"parallel_config.{key}", what, f"write {least}, or pipeline_stage above 1"


def _chunks(recipe: Recipe) -> Iterator[Finding]:
    """Chunks of rows stand beside the schedule that has them, and what works on a whole row at once
    beside none."""
    parallel, memory = recipe.parallel_config, recipe.memory
    chunks, order = parallel.seq_split_num, parallel.pipeline_scheduler
    if chunks == 1:
        if parallel.sequence_chunks != "time":
            what = f"is {parallel.sequence_chunks}, and parallel_config.seq_split_num is 1"
            yield "parallel_config.sequence_chunks", what, "leave it out, or write more chunks"
        return
    beside = f"beside parallel_config.seq_split_num {chunks}"
    if order in ("gpipe", "1f1b"):
        what = f"is {order}, which takes rows whole, {beside}"
        yield "parallel_config.pipeline_scheduler", what, "write seqpipe, or seq_split_num: 1"
    if memory.attention_heads != "all":
        what = f"is {memory.attention_heads}, which is not available {beside}"
        yield "memory.attention_heads", what, "write all: a chunk's attention takes less as it is"
    if memory.offload_activations != "none":
        what = f"is {memory.offload_activations}, which is not available {beside}"
        yield "memory.offload_activations", what, "write none"


def _beside_open(parallel: ParallelBlock) -> Iterator[Finding]:
    """Where the planner chooses how many stages there are, nothing is said of each of them."""
    for key in ("layers_per_stage", "offset", "seq_split_num", "sequence_chunks"):
        if (given := getattr(parallel, key)) not in _OFF[key]:
            what = f"is {as_written(given)}, and parallel_config.pipeline_stage is {AUTO}"
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
    if isinstance(given, bool | int) or strategies_of(recipe):
        return
    if isinstance(ranks, Open):
        what = f"is {as_written(given)}, and parallel_config.pipeline_stage is {AUTO}"
        remedy = "write one number for all, or how many stages there are"
        yield "memory.gradient_checkpointing", what, remedy
        return
    nested = [one for one in given if isinstance(one, tuple)]
    lengths = {len(one) for one in nested} or {len(given)}
    if len(nested) not in (0, virtual) or lengths != {ranks}:
        what = (
            f"is {as_written(given)}, and there are {ranks} stages (parallel_config.pipeline_stage)"
        )
        what += f" of {virtual} virtual ones" if virtual > 1 else ""
        remedy = f"write a list of {ranks} numbers"
        remedy += f", or {virtual} such lists" if virtual > 1 else ", or one number for all"
        yield "memory.gradient_checkpointing", what, remedy

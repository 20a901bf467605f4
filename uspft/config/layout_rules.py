"""Rules between the keys of one layout: of `parallel_config`, and of each of its strategies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps

from uspft.config.algorithms import (
    AUTO,
    CONTEXT,
    MESH_OPTIONS,
    ON_A_MESH,
    TENSOR,
    Splits,
    every_option,
    having,
    names,
)
from uspft.config.messages import as_written
from uspft.config.problems import Finding
from uspft.config.recipe import Degrees, ParallelBlock, Recipe
from uspft.config.strategies import KEY, strategies_of, weights_move
from uspft.config.types import Open


def of_each_layout(
    check: Callable[[str, Degrees], Iterator[Finding]],
) -> Callable[[Recipe], Iterator[Finding]]:
    """Return a rule that asks `check` of every layout of a recipe, with the key where it stands."""

    @wraps(check)
    def rule(recipe: Recipe) -> Iterator[Finding]:
        yield from check("parallel_config", recipe.parallel_config)
        for number, strategy in enumerate(strategies_of(recipe)):
            yield from check(f"{KEY}[{number}]", strategy)

    return rule


@of_each_layout
def algorithm(at: str, parallel: Degrees) -> Iterator[Finding]:
    """Require the algorithm by which ranks share a row; on a mesh there is a default."""
    degree = parallel.context_parallel
    if degree > 1 and not parallel.on_a_mesh and parallel.context_parallel_algo is None:
        what = f"is missing, and context_parallel is {degree}"
        yield f"{at}.context_parallel_algo", what, f"write {names(CONTEXT)}"


COPIES = "fine_grain_interleave"
"""The option that `copies` checks, and not `own_options`."""


def copies(recipe: Recipe) -> Iterator[Finding]:
    """Refuse `fine_grain_interleave` where it would hide no transfer, and beside what works on all
    of a rank's tokens at once."""
    parallel, memory = recipe.parallel_config, recipe.memory
    key, number = f"parallel_config.{COPIES}", parallel.fine_grain_interleave
    for at, one in enumerate(strategies_of(recipe)):
        if one.fine_grain_interleave > 1:
            what = f"is {one.fine_grain_interleave}, which layouts that switch do not have yet"
            yield f"{KEY}[{at}].{COPIES}", what, "write 1"
    if number == 1:
        return
    tensor, context = parallel.model_parallel, parallel.context_parallel
    if isinstance(tensor, Open) or isinstance(context, Open):
        what = f"is {number}, and the planner is to choose what it goes with"
        yield key, what, "write model_parallel and context_parallel, or leave this out"
    elif parallel.on_a_mesh:
        name = parallel.tensor_parallel_algo
        what = f"is {number}, beside {name}, whose slices hide transfers already"
        yield key, what, f"write 1 (at tensor_mesh [1, n] {name} hides what this would)"
    elif tensor == 1:
        what = f"is {number}, and model_parallel is 1: no matrix is split, and nothing to hide"
        yield key, what, "write 1, or model_parallel above 1"
    elif not parallel.use_seq_parallel and context == 1:
        what = f"is {number}, with neither use_seq_parallel nor context_parallel above 1"
        yield key, what, "write use_seq_parallel: true, or 1"
    beside = f"which is not available beside {key} {number}"
    if memory.attention_heads != "all":
        what = f"is {memory.attention_heads}, {beside}"
        yield "memory.attention_heads", what, "write all"
    if memory.mlp_tile_tokens != "none":
        what = f"is {memory.mlp_tile_tokens}, {beside}"
        yield "memory.mlp_tile_tokens", what, "write none"


@of_each_layout
def tensor_options(at: str, parallel: Degrees) -> Iterator[Finding]:
    """Refuse keys of tensor parallelism that do not fit its algorithm and degree."""
    degree, name, mesh = parallel.model_parallel, parallel.tensor_parallel_algo, "tensor_mesh"
    if parallel.use_seq_parallel and parallel.on_a_mesh:
        what = f"is true, and {name} splits tokens between matrices already, over mesh rows"
        yield f"{at}.use_seq_parallel", what, "write false, or leave it out"
    elif parallel.use_seq_parallel and degree == 1 and not isinstance(degree, Open):
        what = "is true, and model_parallel is 1: no matrix is split, and no tokens between them"
        remedy = "write false, or model_parallel above 1"
        yield f"{at}.use_seq_parallel", what, remedy
    if isinstance(parallel.tensor_mesh, tuple) and mesh in TENSOR[name].options:
        rows, columns = parallel.tensor_mesh
        if isinstance(degree, Open):
            what = f"is [{rows}, {columns}], {rows * columns} ranks, and model_parallel is {AUTO}"
            yield f"{at}.{mesh}", what, f"write model_parallel: {rows * columns}, or {AUTO} here"
            return
        if rows * columns != degree:
            shapes = [f"[{r}, {degree // r}]" for r in range(1, degree + 1) if degree % r == 0]
            what = f"is [{rows}, {columns}], {rows * columns} ranks, and model_parallel is {degree}"
            yield f"{at}.{mesh}", what, f"write one of {', '.join(shapes)}, or {AUTO}"
            return
    own = MESH_OPTIONS & TENSOR[name].options.keys()
    none = degree == 1 and not isinstance(degree, Open)
    for option in sorted(own if none else ()):
        value = getattr(parallel, option)
        if value not in (AUTO, None):
            what = f"is {as_written(value)}, and model_parallel is 1: no matrix is split"
            yield f"{at}.{option}", what, "leave it out, or write model_parallel above 1"


@of_each_layout
def ulysses_degree(at: str, parallel: Degrees) -> Iterator[Finding]:
    """Require the Ulysses degree where nothing implies it, and that it divides a row's ranks."""
    key = f"{at}.ulysses_degree_in_cp"
    degree, ulysses = parallel.row_ranks, parallel.ulysses_degree_in_cp
    product = f"context_parallel: {parallel.context_parallel}"
    if parallel.mesh_is_open:  # the mesh decides how many ranks share a row: so many at most
        degree = parallel.model_parallel * parallel.context_parallel
        product = f"model_parallel: {parallel.model_parallel} × {product}"
    elif parallel.mesh_rows > 1:
        product = f"{parallel.mesh_rows} mesh rows × {product}"
    algorithm = parallel.context_parallel_algo
    if degree == 1 or isinstance(ulysses, Open):
        return
    row = CONTEXT.get(algorithm or "")
    divisors = [d for d in range(1, min(degree, 4096) + 1) if degree % d == 0]
    fitting = f"write one of {', '.join(map(str, divisors))}"
    if ulysses is None:
        if row and row.ulysses_required:
            yield key, f"is missing, and context_parallel_algo is {algorithm}", fitting
        return
    implied = row.implied_ulysses(degree) if row else None
    if row and row.splits is Splits.HEADS and parallel.mesh_is_open:
        what = f"is {ulysses}, and with {algorithm} the mesh that is chosen decides it"
        yield key, what, "leave it out, or write tensor_mesh"
    elif implied is not None and ulysses != implied:
        what = f"is {ulysses}, and with {algorithm} it is {implied}"
        free = [other.name for other in CONTEXT.values() if other.splits is Splits.BOTH]
        yield key, what, f"leave it out, or write context_parallel_algo: {' or '.join(free)}"
    elif degree % ulysses:
        yield key, f"is {ulysses}, which does not divide {product}", fitting


@of_each_layout
def own_options(at: str, parallel: Degrees) -> Iterator[Finding]:
    """Refuse options that only other algorithms have, instead of dropping them."""
    shared = ON_A_MESH if parallel.on_a_mesh else None
    for table, name in (
        (CONTEXT, parallel.context_parallel_algo or shared),
        (TENSOR, parallel.tensor_parallel_algo),
    ):
        row = table.get(name or "")
        for option in sorted(every_option(table) - {COPIES}):
            value = getattr(parallel, option)
            off = value in (None, AUTO) or isinstance(value, bool)
            if not off and not (row and option in row.options):
                what = (
                    f"is {as_written(value)}, and only {' and '.join(having(option, table))} has it"
                )
                yield f"{at}.{option}", what, f"write {AUTO}, or leave it out"


# Experts that ranks divide: DeepSpeed 0.19 is silently wrong beside much that is set with them.

_ZERO = "deepspeed.zero_optimization"
_WRONG: dict[str, tuple[object, str]] = {
    "contiguous_gradients": (False, "sums their gradients twice"),
    "round_robin_gradients": (True, "ends in an error"),
    "reduce_scatter": (False, "averages them with those of ranks that hold others"),
}
"""Keys of ZeRO with the value that divided experts cannot have, and what DeepSpeed does there."""


def experts(recipe: Recipe) -> Iterator[Finding]:
    """Refuse settings with which DeepSpeed's gradients of divided experts are wrong."""
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
            what = f"is {as_written(value)}, {beside}, where DeepSpeed {does}"
            yield f"{_ZERO}.{key}", what, f"write {as_written(not value)}, or leave it out"
    if (shared := zero.get("zero_hpz_partition_size", 1)) > 1:
        what = f"is {shared}, which is not available {beside}"
        yield f"{_ZERO}.zero_hpz_partition_size", what, "leave it out"
    if weights_move(parallel):
        what = f"is move, {beside}: owners gather weights that all ranks hold alike"
        yield "parallel_config.switching", what, "write in_place, or expert_parallel: 1"


# Pipelines: what beside one would be silently wrong or hang, and keys of stages without one.

_OFF: dict[str, tuple[object, ...]] = {
    "pp_interleave_num": (1,),
    "pipeline_scheduler": (None, AUTO),
    "layers_per_stage": (None,),
    "offset": (None, 0, (0,)),
    "seq_split_num": (1,),
    "sequence_chunks": ("time",),
}
"""Keys of stages, each with the values that ask for nothing; a resolved recipe has the first."""
WITHOUT_STAGES = {
    "pipeline_stage": 1,
    "micro_batch_num": 1,
    "pipeline_interleave": None,
    **{key: values[0] for key, values in _OFF.items()},
}
"""The keys of stages in a resolved `parallel_config` without a pipeline."""


def _of_strategies(recipe: Recipe) -> Iterator[Finding]:
    """Refuse pipelines of strategies, except plain stages where weights move between layouts."""
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


def stages(recipe: Recipe) -> Iterator[Finding]:
    """Refuse what cannot stand beside stages, and keys of stages where there is no pipeline."""
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
    """Refuse chunks of rows under a schedule that takes rows whole, and beside what works on a
    whole row at once."""
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
    """Refuse keys of single stages where the planner chooses how many there are."""
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


def checkpointed(recipe: Recipe) -> Iterator[Finding]:
    """Require as many numbers of checkpointed layers as there are stages, or one for all."""
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

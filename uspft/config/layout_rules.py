"""Rules between the keys of one layout: `parallel_config` itself, or one of its strategies."""

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
from uspft.config.messages import as_written, refused
from uspft.config.problems import Finding
from uspft.config.recipe import Degrees, Recipe
from uspft.config.strategies import KEY, strategies_of, weights_move
from uspft.config.types import Open


def of_each_layout(
    check: Callable[[str, Degrees], Iterator[Finding]],
) -> Callable[[Recipe], Iterator[Finding]]:
    """Return a rule that applies `check` to every layout of a recipe, with the layout's key
    path."""

    @wraps(check)
    def rule(recipe: Recipe) -> Iterator[Finding]:
        yield from check("parallel_config", recipe.parallel_config)
        for number, strategy in enumerate(strategies_of(recipe)):
            yield from check(f"{KEY}[{number}]", strategy)

    return rule


@of_each_layout
def algorithm(at: str, parallel: Degrees) -> Iterator[Finding]:
    """Require `context_parallel_algo` where several ranks share a row; on a mesh it has a
    default."""
    degree = parallel.context_parallel
    if degree > 1 and not parallel.on_a_mesh and parallel.context_parallel_algo is None:
        what = f"is missing, and context_parallel is {degree}"
        yield f"{at}.context_parallel_algo", what, f"write {names(CONTEXT)}"


COPIES = "fine_grain_interleave"
"""The option that `copies` checks instead of `own_options`."""


def copies(recipe: Recipe) -> Iterator[Finding]:
    """Refuse `fine_grain_interleave` where there is no communication to hide, or where a setting
    works on all tokens of a rank at once."""
    parallel, number = recipe.parallel_config, recipe.parallel_config.fine_grain_interleave
    for at, one in enumerate(strategies_of(recipe)):
        why = "which layouts that switch do not have yet"
        yield from refused(one, COPIES, (1,), why, "write 1", f"{KEY}[{at}]")
    if number == 1:
        return
    tensor, context, why = parallel.model_parallel, parallel.context_parallel, ""
    if isinstance(tensor, Open) or isinstance(context, Open):
        why = "and the planner is to choose what it goes with"
        remedy = "write model_parallel and context_parallel, or leave this out"
    elif parallel.on_a_mesh:
        name = parallel.tensor_parallel_algo
        why = f"with {name}, whose slices hide transfers already"
        remedy = f"write 1 (at tensor_mesh [1, n] {name} hides what this would)"
    elif tensor == 1:
        why = "and model_parallel is 1: no matrix is split, and nothing to hide"
        remedy = "write 1, or model_parallel above 1"
    elif not parallel.use_seq_parallel and context == 1:
        why = "with neither use_seq_parallel nor context_parallel above 1"
        remedy = "write use_seq_parallel: true, or 1"
    if why:
        yield f"parallel_config.{COPIES}", f"is {number}, {why}", remedy
    beside = f"which is not available with parallel_config.{COPIES} {number}"
    yield from refused(recipe, "memory.attention_heads", ("all",), beside, "write all")
    yield from refused(recipe, "memory.mlp_tile_tokens", ("none",), beside, "write none")


@of_each_layout
def tensor_options(at: str, parallel: Degrees) -> Iterator[Finding]:
    """Refuse tensor-parallel keys that do not fit the algorithm and degree."""
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
        why = "and model_parallel is 1: no matrix is split"
        remedy = "leave it out, or write model_parallel above 1"
        yield from refused(parallel, option, (AUTO, None), why, remedy, at)


@of_each_layout
def ulysses_degree(at: str, parallel: Degrees) -> Iterator[Finding]:
    """Require the Ulysses degree where nothing implies it, and that it divides the ranks of
    a row."""
    key = f"{at}.ulysses_degree_in_cp"
    degree, ulysses = parallel.row_ranks, parallel.ulysses_degree_in_cp
    product = f"context_parallel: {parallel.context_parallel}"
    # at most: the mesh that is chosen will decide how many ranks share a row
    if parallel.mesh_is_open:
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
    """Refuse options that the chosen algorithm does not have."""
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


# Expert parallelism: with many settings DeepSpeed 0.19 computes wrong gradients silently.

_ZERO = "deepspeed.zero_optimization"
_WRONG: dict[str, tuple[object, str]] = {
    "contiguous_gradients": (False, "sums their gradients twice"),
    "round_robin_gradients": (True, "ends in an error"),
    "reduce_scatter": (False, "averages them with those of ranks that hold others"),
}
"""ZeRO settings refused under expert parallelism: the refused value, and what DeepSpeed does with
it."""


def experts(recipe: Recipe) -> Iterator[Finding]:
    """Refuse settings with which DeepSpeed computes wrong gradients under expert parallelism."""
    parallel, zero = recipe.parallel_config, recipe.deepspeed.zero_optimization
    if isinstance(parallel.expert_parallel, Open) and parallel.strategies is not None:
        what = f"is {AUTO}, with strategies, whose layouts all have it"
        yield "parallel_config.expert_parallel", what, "write a number"
    if parallel.expert_parallel == 1:
        return
    beside = f"with parallel_config.expert_parallel {parallel.expert_parallel}"
    if zero.get("stage", 1) == 0:
        what = f"is 0, {beside}: each rank would clip by the norm of its own experts"
        yield f"{_ZERO}.stage", what, "write 1, 2 or 3"
    for key, (value, does) in _WRONG.items():
        if zero.get(key) is value:
            what = f"is {as_written(value)}, {beside}, where DeepSpeed {does}"
            yield f"{_ZERO}.{key}", what, f"write {as_written(not value)}, or leave it out"
    yield from _shared_in_a_host(recipe, beside)
    if weights_move(parallel):
        what = f"is move, {beside}: owners gather weights that all ranks hold alike"
        yield "parallel_config.switching", what, "write in_place, or expert_parallel: 1"


def _shared_in_a_host(recipe: Recipe, beside: str) -> Iterator[Finding]:
    if (shared := recipe.deepspeed.zero_optimization.get("zero_hpz_partition_size", 1)) > 1:
        what = f"is {shared}, which is not available {beside}"
        yield f"{_ZERO}.zero_hpz_partition_size", what, "leave it out"


# Pipelines: settings that would be wrong or hang with one, and pipeline keys without one.

_LEFT_OUT = f"write {AUTO}, or leave it out"
_OFF: dict[str, tuple[object, ...]] = {
    "pp_interleave_num": (1,),
    "pipeline_scheduler": (None, AUTO),
    "layers_per_stage": (None,),
    "offset": (None, 0, (0,)),
    "seq_split_num": (1,),
    "sequence_chunks": ("time",),
}
"""Pipeline keys with the values that switch them off; a resolved recipe has the first one."""
WITHOUT_STAGES = {
    "pipeline_stage": 1,
    "micro_batch_num": 1,
    "pipeline_interleave": None,
    **{key: values[0] for key, values in _OFF.items()},
}
"""The values of the pipeline keys in a resolved `parallel_config` without a pipeline."""


def _of_strategies(recipe: Recipe) -> Iterator[Finding]:
    """Refuse pipelines in strategies, except plain stages where weights move between layouts."""
    parallel, every = recipe.parallel_config, strategies_of(recipe)
    staged = [number for number, one in enumerate(every) if one.pipeline_stage != 1]
    for number, one in enumerate(every):
        at, whole = f"{KEY}[{number}]", (1,) if number not in staged else ()
        for key, has in (("pp_interleave_num", "virtual stages"), ("seq_split_num", "chunks")):
            why, remedy = f"and layouts that switch have no {has}", f"write 1, or leave {KEY} out"
            yield from refused(one, key, (1,), why, remedy, at)
        why = "and it follows from a step's samples"
        yield from refused(one, "micro_batch_num", (AUTO, *whole), why, _LEFT_OUT, at)
        if whole:
            why, remedy = "and its pipeline_stage is 1", "leave it out, or write more stages"
            yield from refused(one, "layers_per_stage", (None,), why, remedy, at)
        elif not weights_move(parallel):
            why = "and with switching: in_place ranks keep their layers"
            yield from refused(one, "pipeline_stage", (), why, "write switching: move, or 1", at)
    if staged:
        why = "with layouts that each have their own stages"
        remedy = f"write {KEY}[n].layers_per_stage, or leave it out"
        yield from refused(recipe, "parallel_config.offset", _OFF["offset"], why, remedy)
    if staged and not isinstance(recipe.memory.gradient_checkpointing, bool):
        given = as_written(recipe.memory.gradient_checkpointing)
        what = f"is {given} of a stage's layers, and layouts that switch have different stages"
        yield "memory.gradient_checkpointing", what, "write true or false"


def stages(recipe: Recipe) -> Iterator[Finding]:
    """Refuse settings that a pipeline does not support, and pipeline keys without a pipeline."""
    parallel = recipe.parallel_config
    yield from _of_strategies(recipe)
    if parallel.strategies is not None:
        why, key = f"and with {KEY} it follows from a step's samples", "micro_batch_num"
        yield from refused(parallel, key, (1, AUTO), why, _LEFT_OUT, "parallel_config")
    virtual, interleaved = parallel.pp_interleave_num, parallel.pipeline_interleave
    if isinstance(interleaved, bool) and interleaved != (virtual > 1):
        what = f"is {as_written(interleaved)}, and parallel_config.pp_interleave_num is {virtual}"
        remedy = "write true, or pp_interleave_num: 1"
        if interleaved:
            remedy = "write pp_interleave_num above 1, or leave this out"
        yield "parallel_config.pipeline_interleave", what, remedy
    if isinstance(parallel.pipeline_stage, Open):
        for key in ("layers_per_stage", "offset", "seq_split_num", "sequence_chunks"):
            why = f"and parallel_config.pipeline_stage is {AUTO}"
            remedy = "leave it out, or write how many stages there are"
            yield from refused(parallel, key, _OFF[key], why, remedy, "parallel_config")
        return
    if parallel.pipeline_stage > 1:
        yield from beside_stages(recipe)
        yield from _chunks(recipe)
        return
    staged = any(one.pipeline_stage != 1 for one in strategies_of(recipe))
    for key, values in _OFF.items():
        if staged and key in ("pipeline_scheduler", "offset"):
            continue  # it belongs to a strategy's pipeline, or was refused above
        why = "and parallel_config.pipeline_stage is 1"
        remedy = f"write {as_written(values[0])}, or pipeline_stage above 1"
        yield from refused(parallel, key, values, why, remedy, "parallel_config")


def _chunks(recipe: Recipe) -> Iterator[Finding]:
    """Refuse `seq_split_num` under a schedule that does not split rows, or with a setting that
    needs a whole row at once."""
    chunks = recipe.parallel_config.seq_split_num
    if chunks == 1:
        why, remedy = "and parallel_config.seq_split_num is 1", "leave it out, or write more chunks"
        yield from refused(recipe, "parallel_config.sequence_chunks", ("time",), why, remedy)
        return
    beside = f"with parallel_config.seq_split_num {chunks}"
    why, remedy = f"which takes rows whole, {beside}", "write seqpipe, or seq_split_num: 1"
    by_chunk = ("seqpipe", AUTO, None)
    yield from refused(recipe, "parallel_config.pipeline_scheduler", by_chunk, why, remedy)
    why, remedy = f"which is not available {beside}", "a chunk's attention takes less as it is"
    yield from refused(recipe, "memory.attention_heads", ("all",), why, f"write all: {remedy}")
    yield from refused(recipe, "memory.offload_activations", ("none",), why, "write none")


def beside_stages(recipe: Recipe) -> Iterator[Finding]:
    """Refuse settings that do not work with more than one `pipeline_stage`."""
    parallel, zero = recipe.parallel_config, recipe.deepspeed.zero_optimization
    stages, stage = (
        f"parallel_config.pipeline_stage {parallel.pipeline_stage}",
        zero.get("stage", 1),
    )
    if None not in (parallel.layers_per_stage, parallel.offset):
        what = (
            "is set together with `parallel_config.layers_per_stage`, and only one of them can rule"
        )
        yield "parallel_config.offset", what, "keep one and write null for the other"
    if stage == 0:
        yield f"{_ZERO}.stage", f"is 0, with {stages}", "write 1, 2 or 3"
    yield from _shared_in_a_host(recipe, f"with {stages}")
    if zero.get("enable_sanity_checks"):
        what = f"is true, with {stages}: DeepSpeed compares what all ranks do, and stages differ"
        yield f"{_ZERO}.enable_sanity_checks", what, "leave it out"
    virtual = parallel.pp_interleave_num
    away = (zero.get("offload_optimizer") or {}).get("device", "none") != "none"
    if virtual > 1 and stage in (2, 3) and away:
        what = f"loses gradients at stage {stage}, with parallel_config.pp_interleave_num {virtual}"
        yield f"{_ZERO}.offload_optimizer", what, "leave it out, or write 1 virtual stage"


def checkpointed(recipe: Recipe) -> Iterator[Finding]:
    """Require one number of checkpointed layers, or one for each stage."""
    given, parallel = recipe.memory.gradient_checkpointing, recipe.parallel_config
    ranks, virtual = parallel.pipeline_stage, parallel.pp_interleave_num
    # `stages` refuses it otherwise
    staged = any(one.pipeline_stage != 1 for one in strategies_of(recipe))
    if isinstance(given, bool | int) or staged:
        return
    if isinstance(ranks, Open):
        what = f"is {as_written(given)}, and parallel_config.pipeline_stage is {AUTO}"
        remedy = "write one number for all, or how many stages there are"
        yield "memory.gradient_checkpointing", what, remedy
        return
    nested = [one for one in given if isinstance(one, tuple)]
    lengths = {len(one) for one in nested} or {len(given)}
    if len(nested) not in (0, virtual) or lengths != {ranks}:
        why, also = (
            f"and there are {ranks} stages (parallel_config.pipeline_stage)",
            "one number for all",
        )
        if virtual > 1:
            why, also = f"{why} of {virtual} virtual ones", f"{virtual} such lists"
        remedy = f"write a list of {ranks} numbers, or {also}"
        yield "memory.gradient_checkpointing", f"is {as_written(given)}, {why}", remedy

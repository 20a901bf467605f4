"""The strategies of a recipe: layouts for rows of different lengths, between which a run switches
inside one step; and the rules for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from uspft.config.algorithms import AUTO
from uspft.config.messages import as_written, refused, shown
from uspft.config.problems import Finding
from uspft.config.recipe import Degrees, ParallelBlock, Recipe, Strategy
from uspft.config.types import Open

KEY = "parallel_config.strategies"


def strategies_of(recipe: Recipe) -> tuple[Strategy, ...]:
    """Return the strategies that a recipe lists, shortest rows first; empty without a list."""
    return _listed(recipe.parallel_config)


def _listed(parallel: ParallelBlock) -> tuple[Strategy, ...]:
    return parallel.strategies if isinstance(parallel.strategies, tuple) else ()


def row_lengths(recipe: Recipe) -> tuple[int, ...]:
    """Return the row length of each strategy in tokens, rising, at most `data.sequence_length`."""
    most = recipe.data.sequence_length
    return tuple(min(one.max_length, most) for one in strategies_of(recipe))


def ranks_in_lockstep(recipe: Recipe) -> bool:
    """Return whether all ranks must run the same number of micro-batches: under ZeRO-2, ZeRO-3 and
    expert parallelism every micro-batch contains a collective of all ranks."""
    stage: int = recipe.deepspeed.zero_optimization.get("stage", 1)
    return stage > 1 or recipe.parallel_config.expert_parallel > 1


def degrees_of(layout: Degrees) -> dict[str, object]:
    """Return the layout keys of a strategy or of `parallel_config`, with their values."""
    return {key: getattr(layout, key) for key in Degrees.model_fields}


def under(recipe: Recipe, number: int) -> Recipe:
    """Return the recipe for the rows of one strategy: its layout and its row length."""
    parallel = each_alone(recipe.parallel_config)[number]
    return recipe.changed(
        parallel_config=parallel, data={"sequence_length": row_lengths(recipe)[number]}
    )


def each_alone(parallel: ParallelBlock) -> list[ParallelBlock]:
    """Return one `parallel_config` per strategy, with that strategy's layout and no
    `strategies`."""
    return [parallel.changed(**degrees_of(one), strategies=None) for one in _listed(parallel)]


def alike(parallel: ParallelBlock) -> ParallelBlock:
    """Return the `parallel_config` with its own layout in every strategy, so that a run packs the
    same rows but computes all of them in one layout."""
    own = degrees_of(parallel)
    every = tuple(one.changed(**own) for one in _listed(parallel))
    return parallel.changed(strategies=every) if every else parallel


def weights_move(parallel: ParallelBlock) -> bool:
    """Return whether weights move between ranks when the layout switches. That is where `switching`
    says so, or where it is left open and a layout has pipeline stages, because no rank stores
    another stage's layers."""
    staged = any(one.pipeline_stage != 1 for one in _listed(parallel))
    return parallel.switching == "move" or (staged and parallel.switching in (AUTO, None))


def layouts_of(recipe: Recipe) -> list[Recipe]:
    """Return a recipe for each of its strategies; the recipe itself where it has one layout."""
    return [under(recipe, number) for number in range(len(strategies_of(recipe)))] or [recipe]


def rising(recipe: Recipe) -> Iterator[Finding]:
    """Require that `max_length` rises from strategy to strategy up to `data.sequence_length`, so
    that every row has exactly one strategy."""
    if recipe.parallel_config.strategies == ():
        yield KEY, "is an empty list", "list {max_length: …, context_parallel: …}, or write null"
        return
    every, most = strategies_of(recipe), recipe.data.sequence_length
    for number, one in enumerate(every):
        for key in (key for key in Degrees.model_fields if isinstance(getattr(one, key), Open)):
            remedy = f"write a number, or {KEY}: {AUTO}, which chooses all of them"
            yield f"{KEY}[{number}].{key}", f"is {AUTO}, and a strategy says its degrees", remedy
    for number, (before, one) in enumerate(pairwise(every), 1):
        key, longest = f"{KEY}[{number}].max_length", one.max_length
        if longest == before.max_length:
            what = f"is {longest}, as of {KEY}[{number - 1}]: its rows would have two layouts"
            yield key, what, "keep one of them"
        elif longest < before.max_length:
            what = f"is {longest}, below {before.max_length} of {KEY}[{number - 1}]"
            yield key, what, "list the strategies from the shortest rows to the longest"
        elif before.max_length >= most:
            what = f"is {longest}, and no row has more than data.sequence_length: {most} tokens"
            yield key, f"{what}, which {KEY}[{number - 1}] takes", "leave this strategy out"
    if every and max(one.max_length for one in every) < most:
        what = f"is {every[-1].max_length}, and rows may have data.sequence_length: {most} tokens"
        yield f"{KEY}[{len(every) - 1}].max_length", what, f"write {most} for the longest rows"


def one_layout(recipe: Recipe) -> Iterator[Finding]:
    """Refuse degrees in `parallel_config` itself that differ from those of the last strategy (the
    longest rows), and `switching` without strategies."""
    parallel, every = recipe.parallel_config, strategies_of(recipe)
    beside = [
        key
        for key, field in Degrees.model_fields.items()
        if not _open(value := getattr(parallel, key)) and value != field.default
    ]
    if every:
        for key in Degrees.model_fields if beside else ():
            here, there = getattr(parallel, key), getattr(every[-1], key)
            if here != there and not _open(here, there):
                why = f"and {KEY}[{len(every) - 1}], whose rows are the longest, has "
                what = f"is {as_written(here)}, {why}{as_written(there)}"
                remedy = "leave out the degrees beside the strategies, or write those of the "
                yield f"parallel_config.{key}", what, f"{remedy}longest rows"
    elif parallel.strategies == AUTO:
        for key in beside:
            why, remedy = f"and {KEY}: {AUTO} chooses the layouts", f"leave it out, or list {KEY}"
            yield from refused(parallel, key, (), why, remedy, "parallel_config")
    else:
        why, remedy = (
            "and there are no strategies to switch between",
            f"write {AUTO}, or list {KEY}",
        )
        yield from refused(recipe, "parallel_config.switching", (AUTO, None), why, remedy)


def _open(*values: object) -> bool:
    """Return whether one of the values is not chosen yet: auto, null or Open."""
    return AUTO in values or None in values or any(isinstance(one, Open) for one in values)


def switchable(recipe: Recipe) -> Iterator[Finding]:
    """Refuse settings that do not work with several layouts in one step."""
    if recipe.parallel_config.strategies is None:
        return
    if recipe.deepspeed.zero_optimization.get("stage", 1) == 0:
        what = "is 0, and layouts that switch share one optimizer over all ranks"
        yield "deepspeed.zero_optimization.stage", what, f"write 1, 2 or 3, or leave {KEY} out"
    if weights_move(recipe.parallel_config):
        yield from _movable(recipe)
    else:
        yield from _inside_one_another(strategies_of(recipe))


def _inside_one_another(every: Sequence[Strategy]) -> Iterator[Finding]:
    """Refuse strategies whose matrix shards are not contained in the shards that ranks store.

    Under `switching: in_place` ranks store the shards of the strategy with the smallest
    `model_parallel`; the other strategies compute with parts of them.
    """
    least = min(range(len(every)), key=lambda number: every[number].model_parallel, default=0)
    for number, one in enumerate(every):
        stored, key = every[least], f"{KEY}[{number}]"
        ways, degree = stored.model_parallel, one.model_parallel
        if number == least or ways == 1:
            continue
        there = f"{KEY}[{least}], {ways} ways"
        divides = not one.mesh_is_open and degree // one.mesh_rows % ways == 0
        # compared by name only, because a mesh that is chosen later may differ
        named = one.on_a_mesh and not one.mesh_is_open
        same = stored.on_a_mesh and named and one.tensor_mesh == stored.tensor_mesh
        if stored.on_a_mesh or (one.on_a_mesh and not divides):
            remedy = "write the same tensor_mesh in all, or let one strategy have model_parallel 1"
            if not one.on_a_mesh:
                what = f"is {degree}: its parts are not contained in the blocks of {there}"
                yield f"{key}.model_parallel", what, remedy
            elif not same:
                mesh = "left to be chosen" if one.mesh_is_open else list(one.tensor_mesh or ())
                what = f"is {mesh}: its blocks are not contained in those of {there}"
                yield f"{key}.tensor_mesh", what, remedy
        elif not divides:
            what = f"is {degree}: its parts are not contained in those of {there}"
            yield f"{key}.model_parallel", what, f"write a multiple of {ways} here, or 1 there"
        elif one.use_seq_parallel | one.on_a_mesh != stored.use_seq_parallel | stored.on_a_mesh:
            what = f"is {shown(one.use_seq_parallel)}, and {KEY}[{least}] has the other"
            remedy = "write the same in all, or let one strategy have model_parallel 1"
            if one.on_a_mesh:
                what = f"is false, and the mesh of {KEY}[{number}] splits tokens between blocks"
                key, remedy = f"{KEY}[{least}]", remedy.replace("the same in all", "true")
            yield f"{key}.use_seq_parallel", what, remedy


def _movable(recipe: Recipe) -> Iterator[Finding]:
    """Refuse settings that do not work with `switching: move`, where uspft shards the optimizer as
    ZeRO-1 does and DeepSpeed's ZeRO does not run."""
    staged = any(one.pipeline_stage > 1 for one in strategies_of(recipe))  # in place refuses them
    stay = "no pipeline_stage" if staged else "switching: in_place"
    if recipe.memory.gradient_reduction != "float32":
        what = "is bfloat16, and with switching: move gradients go to their owners in float32"
        yield "memory.gradient_reduction", what, f"write float32, or {stay}"
    tokens: dict[int, bool] = {}
    layers: dict[object, object] = {}
    for number, one in enumerate(strategies_of(recipe)):
        at, degree, splits = f"{KEY}[{number}]", one.model_parallel, one.use_seq_parallel
        stages, given = one.pipeline_stage, one.layers_per_stage
        if given and layers.setdefault(stages, given) != given:
            what = f"differs from that of another strategy with pipeline_stage {stages}"
            yield f"{at}.layers_per_stage", what, "write the same in both"
        if one.on_a_mesh:
            why = "whose blocks owners do not gather"
            remedy = "write megatron in every strategy, or switching: in_place"
            yield from refused(one, "tensor_parallel_algo", (), why, remedy, at)
        if tokens.setdefault(degree, splits) != splits:
            what = f"is {shown(splits)}, and another strategy with model_parallel {degree} has "
            what += "the other"
            yield f"{at}.use_seq_parallel", what, "write the same in both"
    zero, key = recipe.deepspeed.zero_optimization, "deepspeed.zero_optimization"
    if (stage := zero.get("stage", 1)) > 1:
        what = f"is {stage}, and with switching: move weights belong to owners, as in stage 1"
        yield f"{key}.stage", what, f"write 1, or {stay}"
    for name in sorted(set(zero) - {"stage"}):
        what = "is set, and with switching: move DeepSpeed's ZeRO does not run"
        yield f"{key}.{name}", what, f"leave it out, or write {stay}"

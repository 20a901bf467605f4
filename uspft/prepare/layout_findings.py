"""Reasons why a recipe cannot run in its layout, or in those of its strategies."""

from __future__ import annotations

from collections.abc import Iterator

from uspft.config import Finding, Recipe
from uspft.config.algorithms import AUTO
from uspft.config.messages import as_written
from uspft.config.strategies import KEY, strategies_of, under
from uspft.engine.deepspeed_config import micro_batches
from uspft.families import FAMILIES, ModelShape, state_sizes
from uspft.layout import Layout, layout_of
from uspft.pipeline.stages import Stages, fits, offset, stated
from uspft.planner.products import gathered_elements
from uspft.sequence import Heads, chunk_multiple, of_recipe
from uspft.tensor import tensor_algorithm

EXPERTS = "parallel_config.expert_parallel"


def run_findings(recipe: Recipe, layout: Layout, shape: ModelShape | None) -> list[Finding]:
    """Return what is wrong with a recipe's layout, or with the layouts of its strategies, which all
    use the same ranks."""
    every = len(strategies_of(recipe))
    if not every:
        return layout_findings(recipe, layout, shape)
    findings: list[Finding] = []
    degrees = {one.model_parallel for one in strategies_of(recipe)}
    if layout.experts > 1 and len(degrees) > 1:
        what = f"is {layout.experts}, with strategies whose model_parallel differs"
        findings.append((EXPERTS, what, "write 1, or one model_parallel in all strategies"))
    for number in range(every):
        alone = under(recipe, number)
        found = layout_of(alone.parallel_config, layout.ranks)
        wrong = [found] if not isinstance(found, Layout) else layout_findings(alone, found, shape)
        for key, what, remedy in wrong:  # in the terms of the whole recipe
            if key == "data.sequence_length":
                key = f"{KEY}[{number}].max_length"
            elif key != EXPERTS:  # the same key for all strategies
                key = key.replace("parallel_config.", f"{KEY}[{number}].", 1)
            findings.append((key, what, remedy))
    return findings


def layout_findings(recipe: Recipe, layout: Layout, shape: ModelShape | None) -> list[Finding]:
    """Return what is wrong with the `parallel_config` of a recipe with one layout."""
    first = (
        tile_findings(recipe) if layout.tensor > 1 else [],
        group_findings(recipe, shape, layout.mesh_columns),
        _copies(recipe, shape),
        _tensor(recipe, layout, shape) if shape and layout.tensor > 1 else [],
    )
    if wrong := next(filter(None, first), None):
        return wrong
    # An unknown model is assumed to have as many heads as the degree needs.
    wide = [Heads(layout.ulysses, layout.ulysses, 1)]
    if shape:
        each = (Heads(one.heads, one.kv_heads, one.head_dim) for one in shape.of_each_size)
        wide = [one.on(layout.mesh_columns) for one in each]
    algorithm, length = of_recipe(recipe, layout), recipe.data.sequence_length
    problems = next(filter(None, (algorithm.problems(length, one) for one in wide)), [])
    stages = stage_findings(recipe, layout, shape)
    zero = *_accumulation(recipe, layout), *_within_hosts(recipe, layout)
    return [*problems, *stages, *_experts(layout, shape), *zero]


def _copies(recipe: Recipe, shape: ModelShape | None) -> list[Finding]:
    """Return why `fine_grain_interleave` cannot be used with a model or layout."""
    number = recipe.parallel_config.fine_grain_interleave
    if number == 1 or shape is None:
        return []
    family = FAMILIES[shape.model_type]
    kinds = {"a state": family.states, "heads of two sizes": family.two_sizes}
    kinds["experts"] = shape.experts > 1
    if (kind := next((what for what, here in kinds.items() if here), None)) is None:
        return []
    what = f"is {number}, and layers with {kind} of `{shape.model_type}` take their tokens at once"
    return [("parallel_config.fine_grain_interleave", what, "write 1")]


def _experts(layout: Layout, shape: ModelShape | None) -> list[Finding]:
    """Return why a model's experts cannot be divided among ranks."""
    degree, every = layout.experts, shape.experts if shape else 0
    if degree == 1 or shape is None or (shape.routed and every % degree == 0):
        return []
    if not shape.routed:
        able = ", ".join(name for name, one in FAMILIES.items() if one.routed)
        what = f"is {degree}, and `{shape.model_type}` has no experts"
        return [(EXPERTS, what, f"write 1, or name a model of type {able}")]
    fitting = [d for d in range(1, every + 1) if every % d == layout.copies % d == 0]
    what = f"is {degree}, which does not divide the {every} experts of a layer"
    return [(EXPERTS, what, f"write one of {', '.join(map(str, fitting))}")]


def _tensor(recipe: Recipe, layout: Layout, shape: ModelShape) -> list[Finding]:
    """Return why a model's matrices cannot be split over tensor ranks."""
    kind = shape.model_type
    if shape.routed and layout.is_mesh:
        able = [name for name, one in FAMILIES.items() if not (one.routed or one.states)]
        what = f"is meshslice, and experts, which `{kind}` has, cannot be split over a mesh yet"
        remedy = f"write megatron, or name a model of type {', '.join(able)}"
        return [("parallel_config.tensor_parallel_algo", what, remedy)]
    if shape.seeing_all and layout.is_mesh:
        heads = f"heads of two sizes, which `{kind}` has"
        what = f"is meshslice, and {heads}, cannot be split over a mesh yet"
        return [("parallel_config.tensor_parallel_algo", what, "write megatron")]
    if recipe.parallel_config.mesh_is_open:  # no mesh was found that something else does not forbid
        return []
    algorithm, hidden = tensor_algorithm(recipe.parallel_config, layout), shape.hidden_size
    each = (algorithm.problems(one.heads, one.kv_heads, hidden) for one in shape.of_each_size)
    if wrong := next(filter(None, each), []):
        return wrong
    states = state_sizes(shape)
    if states and layout.is_mesh:
        what = f"is meshslice, and `{kind}` has layers with a state"
        return [("parallel_config.tensor_parallel_algo", what, "write megatron")]
    if states and layout.tensor > states.keys:
        what = f"is {layout.tensor}, and layers with a state have {states.keys} key heads"
        return [("parallel_config.model_parallel", what, f"write at most {states.keys}")]
    return []


def _accumulation(recipe: Recipe, layout: Layout) -> list[Finding]:
    """Return why the gradients of several micro-batches would not be summed in float32."""
    passes, zero = micro_batches(recipe, layout), recipe.deepspeed.zero_optimization
    stage, place = zero.get("stage", 1), "deepspeed.zero_optimization"
    what = f"would sum the gradients of {passes} micro-batches in bfloat16"
    if recipe.model.dtype != "bfloat16" or passes == 1:
        return []
    if stage == 0:
        remedy = "write stage 1, or model.dtype float32"
        return [(f"{place}.stage", f"stage 0 {what}", remedy)]
    offloaded = (zero.get("offload_optimizer") or {}).get("device", "none") != "none"
    if offloaded and stage < 3:  # DeepSpeed then sums on the host, in the parameters' dtype
        remedy = "write stage 3, or leave offload_optimizer out, or write model.dtype float32"
        return [(f"{place}.offload_optimizer", f"at stage {stage} {what}", remedy)]
    return []


def _within_hosts(recipe: Recipe, layout: Layout) -> Iterator[Finding]:
    """Refuse hpZ where its groups, which DeepSpeed makes of neighbouring ranks, would not hold the
    same parameters."""
    shared = recipe.deepspeed.zero_optimization.get("zero_hpz_partition_size", 1)
    key, remedy = "deepspeed.zero_optimization.zero_hpz_partition_size", "leave it out"
    if shared > 1 and layout.tensor > 1:
        beside = f"parallel_config.model_parallel {layout.tensor}"
        yield key, f"is {shared}, which is not available with {beside}", remedy
    elif 1 < shared < layout.ranks and layout.ranks % shared:
        what = f"is {shared}, which does not divide the {layout.ranks} processes"
        yield key, what, f"{remedy}, or write a divisor"


def exchange_findings(recipe: Recipe, layout: Layout) -> list[Finding]:
    """Return a finding where `recompute: exchange` is set but heads are not exchanged."""
    strategies = [under(recipe, n) for n in range(len(strategies_of(recipe)))]
    found = [layout_of(one.parallel_config, layout.ranks) for one in strategies] or [layout]
    exchanges = any(isinstance(one, Layout) and one.ulysses > 1 for one in found)
    if recipe.memory.recompute != "exchange" or exchanges:
        return []
    what = "is exchange, and no heads are exchanged: the Ulysses degree is 1"
    return [("memory.recompute", what, f"write {AUTO}, nothing or attention")]


def tile_findings(recipe: Recipe) -> list[Finding]:
    """Return why MLPs cannot run in tiles, nor attention in groups of heads, if matrices are split
    over a mesh."""
    memory, algorithm = recipe.memory, recipe.parallel_config.tensor_parallel_algo
    ways = (
        ("mlp_tile_tokens", memory.mlp_tile_tokens, "none", "tile"),
        ("attention_heads", memory.heads_at_once or "all", "all", "group of heads"),
    )
    why, remedy = f"and {algorithm} would move its matrices again for every", "tensor_parallel_algo"
    return [
        (f"memory.{key}", f"is {asked}, {why} {part}", f"write {off}, or {remedy}: megatron")
        for key, asked, off, part in (ways if recipe.parallel_config.on_a_mesh else ())
        if asked != off
    ]


def group_findings(recipe: Recipe, shape: ModelShape | None, tensor: int = 1) -> list[Finding]:
    """Return why a model's attention cannot run in groups of heads. tensor: over how many ranks its
    heads are split."""
    asked, key = recipe.memory.heads_at_once, "memory.attention_heads"
    if asked is None or shape is None:
        return []
    if shape.seeing_all:
        what = f"is {asked}, and layers of `{shape.model_type}` have heads of two sizes"
        return [(key, what, "write all")]
    if gathered_elements(shape, tensor):
        what = f"is {asked}, and {tensor} tensor ranks share the rows that make a KV head"
        return [(key, what, f"write all, or model_parallel: {shape.kv_heads}")]
    per_kv = shape.heads // shape.kv_heads
    if asked <= per_kv:
        return []
    what = f"is {asked}, and {per_kv} query heads of the model share a KV head"
    return [(key, what, f"write {per_kv} or fewer, or all")]


def stages_said(recipe: Recipe, shape: ModelShape) -> Stages | Finding | None:
    """Return the stages with the layers that a recipe gives them, or what is wrong with them.

    None without a pipeline, or where the recipe leaves the layers of each stage open.
    """
    parallel, place = recipe.parallel_config, "parallel_config"
    ranks, virtual = parallel.pipeline_stage, parallel.pp_interleave_num
    if ranks == 1:
        return None
    if FAMILIES[shape.model_type].cut is None:
        able = ", ".join(name for name, family in FAMILIES.items() if family.cut)
        what = f"is {ranks}, and stages of `{shape.model_type}` are not available yet"
        return f"{place}.pipeline_stage", what, f"write 1, or name a model of type {able}"
    if shape.joined_layers:
        what = f"is {ranks}, and stages of {shape.joined_layers} are not available yet"
        return f"{place}.pipeline_stage", what, "write 1"
    if wrong := fits(shape.layers, ranks, virtual):
        return wrong[0]
    if parallel.layers_per_stage is not None:
        given = parallel.layers_per_stage
        return stated(f"{place}.layers_per_stage", given, shape.layers, ranks, virtual)
    if parallel.offset is not None:
        return offset(f"{place}.offset", parallel.offset, shape.layers, ranks, virtual)
    return None


def stage_findings(recipe: Recipe, layout: Layout, shape: ModelShape | None) -> Iterator[Finding]:
    """Yield findings on a recipe's pipeline stages and its number of micro-batches."""
    parallel, training = recipe.parallel_config, recipe.training
    asked, passes = parallel.micro_batch_num, micro_batches(recipe, layout)
    if asked not in (AUTO, passes) and (asked != 1 or layout.pipeline > 1):
        of = f"micro_batch_size {training.micro_batch_size} × data_parallel {layout.data}"
        batch = f"training.global_batch_size {training.global_batch_size}"
        what = f"is {asked}, and {batch} ÷ ({of}) makes {passes}"
        one = "" if layout.pipeline > 1 else ", or 1"
        remedy = f"write {AUTO} or {passes}{one}, or change the batch"
        yield "parallel_config.micro_batch_num", what, remedy
    found = stages_said(recipe, shape) if shape else None
    if isinstance(found, tuple):
        yield found
    elif shape:
        yield from _checkpointed(recipe, shape.layers)
    if layout.pipeline > 1 and parallel.seq_split_num > 1:
        yield from _chunk_findings(recipe, layout, shape)
    if shape and layout.pipeline > 1 and shape.raw.get("output_router_logits"):
        beside = f"parallel_config.pipeline_stage {layout.pipeline}"
        what = f"is true, which is not available with {beside}"
        yield "model.overrides.output_router_logits", what, "write false"


def _checkpointed(recipe: Recipe, layers: int) -> Iterator[Finding]:
    """Yield the finding that more layers are to be checkpointed than the model has, or than one
    stage of it can have. One number for all stages goes with every number of stages."""
    asked, most, of = recipe.memory.gradient_checkpointing, layers, f"the model has {layers} layers"
    if isinstance(asked, bool):
        return
    if isinstance(asked, tuple):
        most -= recipe.parallel_config.pipeline_stage - 1
        of = f"a stage has at most {most} of the model's {layers} layers"
    each = asked if isinstance(asked, tuple) else (asked,)
    if any(n > most for one in each for n in (one if isinstance(one, tuple) else (one,))):
        what = f"is {as_written(asked)}, and {of}"
        yield "memory.gradient_checkpointing", what, f"write true for all, or at most {most}"


def _chunk_findings(recipe: Recipe, layout: Layout, shape: ModelShape | None) -> Iterator[Finding]:
    """Yield findings on the chunks in which a recipe's rows pass through the stages."""
    parallel, row = recipe.parallel_config, recipe.data.sequence_length
    chunks = parallel.seq_split_num
    if shape and FAMILIES[shape.model_type].states and layout.context > 1:
        what = f"is {chunks}, and layers with a state of `{shape.model_type}` carry it from chunk "
        what += f"to chunk on one rank, where {layout.context} share a row"
        yield "parallel_config.seq_split_num", what, "write 1, or share no rows"
    if row < chunks * (multiple := chunk_multiple(layout, parallel.use_seq_parallel)):
        what = f"{row} tokens do not make {chunks} chunks (parallel_config.seq_split_num), each of "
        what += f"a multiple of {multiple}"
        remedy = f"write at least {chunks * multiple}, or fewer chunks"
        yield "data.sequence_length", what, remedy
    elif row % multiple:
        what = f"{row} tokens are no multiple of {multiple}, of which chunks have multiples"
        remedy = f"the next length that is one is {-(-row // multiple) * multiple}"
        yield "data.sequence_length", what, remedy

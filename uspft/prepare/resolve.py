"""Every `auto` of a recipe is resolved here: a function for each key, called again as more is
known.

Keys that the planner chooses are chosen together (left_open.py). A function returns the recipe
unchanged where its key is not `auto`, or where too little is known yet. As the recipe's reference
says, some `auto` stay: `checkpoint.resume`, and options of algorithms that have no other word for
their default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from uspft.config import Recipe
from uspft.config.algorithms import (
    AUTO,
    CONTEXT,
    MESH_OPTIONS,
    ON_A_MESH,
    every_option,
    row_of,
)
from uspft.config.recipe import Strategy
from uspft.config.strategies import degrees_of, strategies_of, under, weights_move
from uspft.config.types import Open
from uspft.engine.deepspeed_config import micro_batches
from uspft.families import with_factor
from uspft.layout import Layout, layout_of
from uspft.pipeline.schedules import Schedule
from uspft.pipeline.stages import Stages
from uspft.planner.options import slices_of
from uspft.planner.rank import RECOMPUTE, ranked
from uspft.planner.step import dealt_stages
from uspft.planner.step_shape import DrawnRows, Memo
from uspft.planner.ways import way_of
from uspft.prepare.known import (
    Known,
    Weighed,
    recomputes_of,
    settled_memory,
    step_shape,
)
from uspft.prepare.layout_findings import stages_said
from uspft.prepare.left_open import Decision, decided, degrees_are_open, ranks_of, with_values
from uspft.prepare.model import with_vocabulary
from uspft.segments import Segments


def resolved(recipe: Recipe, known: Known) -> tuple[Recipe, Decision | None]:
    """Return the resolved recipe, and the planner's decision, or None if no key was left to it."""
    for settle in dict.fromkeys(FIRST.values()):  # a function may settle several keys
        recipe = settle(recipe, known)
    decision, again = decided(recipe, known), recipe.memory.recompute
    recipe = with_values(recipe, decision.values if decision else {})
    if recipe.parallel_config.strategies == AUTO and known.weighed:
        recipe = with_values(with_layouts(recipe, known.weighed), {RECOMPUTE: again})
        of_layouts = decided(recipe, known)
        recipe = with_values(recipe, of_layouts.values if of_layouts else {})
    for settle in dict.fromkeys(SETTLED.values()):
        recipe = settle(recipe, known)
    return with_vocabulary(recipe, known.shape), decision


def _strategies(recipe: Recipe, known: Known) -> Recipe:
    """Resolve the open keys of strategies, and set the degrees in `parallel_config` itself to the
    longest rows'.

    Each strategy is resolved as a recipe of its own with rows of its length, on the run's processes
    or, if their number is open, on as many as the longest rows' layout needs.
    """
    every, parallel = strategies_of(recipe), recipe.parallel_config
    if not every:
        off = parallel.strategies is None
        return recipe.changed(parallel_config={"switching": None}) if off else recipe
    settles = (_slices, _algorithm, _replicas, _options, _stages)
    found = []
    longest = under(recipe, len(every) - 1)
    ranks = ranks_of(recipe, known)
    if ranks is None and isinstance(layout := layout_of(longest.parallel_config, None), Layout):
        ranks = layout.ranks
    for number, strategy in enumerate(every):
        alone = under(recipe, number)
        row = Segments.single(alone.data.sequence_length)
        here = replace(known, ranks=ranks, rows=[row] if known.rows else ())
        decision = decided(alone, here)
        alone = with_values(alone, decision.values if decision else {})
        for settle in settles:
            alone = settle(alone, here)
        degrees = degrees_of(alone.parallel_config)
        if strategy.pipeline_stage > 1:  # it depends on the samples of a step
            degrees["micro_batch_num"] = AUTO
        found.append(strategy.model_copy(update=degrees))
    # Strategies with the same number of stages have the same layers in each: those that one of them
    # sets, or those balanced for the longest rows.
    said = {one.pipeline_stage: one.layers_per_stage for one in every if one.layers_per_stage}
    layers = {one.pipeline_stage: one.layers_per_stage for one in found} | said
    dealt = [{"layers_per_stage": layers[one.pipeline_stage]} for one in found]
    found = [one.model_copy(update=own) for one, own in zip(found, dealt, strict=True)]
    update = {**degrees_of(found[-1]), "strategies": tuple(found)}
    if parallel.switching in (AUTO, None):
        update["switching"] = "move" if weights_move(parallel) else "in_place"
    return recipe.changed(parallel_config=update)


def on_device(recipe: Recipe, known: Known) -> Recipe:
    """Resolve the device: GPUs if this host has any."""
    if recipe.launch.device != AUTO:
        return recipe
    return recipe.changed(launch={"device": "cuda" if known.gpus else "cpu"})


def _on_hardware(recipe: Recipe, known: Known) -> Recipe:
    """Resolve the hardware file, and on CPU the attention kernel, of which there is one; on GPUs
    the ranks try the installed ones."""
    if recipe.launch.hardware == AUTO and known.cluster:
        recipe = recipe.changed(launch={"hardware": known.cluster.hardware.name})
    if recipe.model.attention == AUTO and recipe.launch.device == "cpu":
        recipe = recipe.changed(model={"attention": "torch"})
    return recipe


def _scaling(recipe: Recipe, known: Known) -> Recipe:
    """Resolve the missing factor of a RoPE scaling by the length of rows."""
    if known.shape is None:
        return recipe
    model = with_factor(recipe.model, known.shape, recipe.data.sequence_length)
    return recipe.changed(model=model)


def _format(recipe: Recipe, known: Known) -> Recipe:
    """Resolve the data's format: one for all sources or, if they differ, one for each."""
    data, found = recipe.data, known.formats
    if not found:
        return recipe
    if len(set(found)) == 1:
        return recipe.changed(data={"format": found[0]})
    pairs = zip(data.train + (data.eval or ()), found, strict=True)
    named = tuple(s.model_copy(update={"format": s.format or f}) for s, f in pairs)
    train, rest = named[: len(data.train)], named[len(data.train) :]
    return recipe.changed(data={"train": train, "eval": rest or None})


def _algorithm(recipe: Recipe, known: Known) -> Recipe:
    """Resolve the context-parallel algorithm if the planner did not choose it; None for whole rows.

    Mesh rows share rows of tokens, so that they have an algorithm even if the recipe names none. An
    `auto` for which the planner found no layout becomes an algorithm too, so that later checks can
    report what is wrong.
    """
    parallel = recipe.parallel_config
    name, shared = parallel.context_parallel_algo, parallel.row_ranks > 1
    open_ = parallel.mesh_is_open or isinstance(parallel.context_parallel, Open)
    if name == AUTO and not open_:
        name = ON_A_MESH if shared else None
    elif name is None and parallel.on_a_mesh and shared:
        name = ON_A_MESH
    return recipe.changed(parallel_config={"context_parallel_algo": name})


def _layout(recipe: Recipe, known: Known) -> Layout | None:
    found = layout_of(recipe.parallel_config, ranks_of(recipe, known))
    return found if isinstance(found, Layout) else None


def _replicas(recipe: Recipe, known: Known) -> Recipe:
    layout = _layout(recipe, known)
    if recipe.parallel_config.data_parallel != AUTO or layout is None:
        return recipe
    return recipe.changed(parallel_config={"data_parallel": layout.data})


def _processes(recipe: Recipe, known: Known) -> Recipe:
    layout = _layout(recipe, known)
    is_open = recipe.parallel_config.strategies == AUTO or degrees_are_open(recipe) is not None
    if layout is None or (recipe.launch.processes != AUTO and known.ranks is None):
        return recipe
    if is_open and ranks_of(recipe, known) is None:  # the degrees do not determine it
        return recipe
    return recipe.changed(launch={"processes": layout.ranks // known.hosts})


def _options(recipe: Recipe, known: Known) -> Recipe:
    """Set options of other algorithms to null; the chosen algorithm's own may stay `auto`."""
    parallel = recipe.parallel_config
    layout = _layout(recipe, known)
    if layout is None:
        return recipe
    row = row_of(parallel.context_parallel_algo, layout.context)
    off = dict.fromkeys(every_option(CONTEXT) - row.options_at(layout.ring))
    if not parallel.on_a_mesh:
        off |= dict.fromkeys(MESH_OPTIONS)
    return recipe.changed(parallel_config=off)


def _slices(recipe: Recipe, known: Known) -> Recipe:
    """Resolve MeshSlice's slices as one number per product; 1 if the cluster is not known yet."""
    parallel = recipe.parallel_config
    if not parallel.on_a_mesh or parallel.mesh_is_open:
        return recipe
    return recipe.changed(parallel_config={"tensor_slices": slices_of(parallel) or (1,) * 4})


def _memory(recipe: Recipe, known: Known) -> Recipe:
    """Resolve the sizes of tiles, and `memory.recompute` if there is only one choice."""
    if known.shape is None:
        return recipe
    recipe, block = settled_memory(recipe, known.shape), recipe.memory
    choices = recomputes_of(recipe, recipe.launch.device)
    if block.recompute == AUTO and block.gradient_checkpointing and len(choices) == 1:
        return recipe.changed(memory={"recompute": next(iter(choices))})
    return recipe


def _head_groups(recipe: Recipe, known: Known) -> Recipe:
    """Resolve how many heads attention computes at once, by the memory of a rank."""
    layout, block = _layout(recipe, known), recipe.memory
    chosen = not (block.recompute == AUTO and block.gradient_checkpointing)  # by the planner
    if block.attention_heads == AUTO and chosen and known.shape and known.cluster and layout:
        step, way = step_shape(recipe, known.shape), way_of(recipe, layout)
        at_once = ranked(step, way, known.cluster.hardware).step.options.at_once
        return recipe.changed(memory={"attention_heads": at_once or "all"})
    return recipe


def _stages(recipe: Recipe, known: Known) -> Recipe:
    layout = _layout(recipe, known)
    return with_stages(recipe, layout, known) if layout else recipe


def with_stages(recipe: Recipe, layout: Layout, known: Known) -> Recipe:
    """Return the recipe with its pipeline keys resolved, as far as they can be.

    Without a pipeline `micro_batch_num` becomes 1, as in MindSpore Transformers. With strategies
    each has its own stages, and the number of micro-batches depends on a step's samples.
    """
    parallel, listed = recipe.parallel_config, strategies_of(recipe)
    several = any(one.pipeline_stage > 1 for one in listed or (parallel,))
    virtual = parallel.pp_interleave_num > 1
    settled: dict[str, Any] = {}
    if parallel.micro_batch_num == AUTO and not (listed and several):
        settled["micro_batch_num"] = micro_batches(recipe, layout) if several else 1
    if parallel.pipeline_scheduler == AUTO or not several:
        order = "seqpipe" if parallel.seq_split_num > 1 else "1f1b"
        settled["pipeline_scheduler"] = order if several else None
    if parallel.pipeline_interleave == AUTO or not several:
        settled["pipeline_interleave"] = virtual if several else None
    if several and known.shape and not listed:
        found = stages_said(recipe, known.shape)
        if found is None:  # balanced by the FLOPs of layers and head
            sample = DrawnRows(tuple(known.rows)) if known.rows else None
            step = replace(step_shape(recipe, known.shape), sample=sample)
            step = step.under(schedule=Schedule(virtual=parallel.pp_interleave_num))
            found = dealt_stages(step, Layout(pipeline=parallel.pipeline_stage), Memo())
        if isinstance(found, Stages):
            dealt = Schedule(sizes=found.sizes).by_rank(found.ranks)
            settled |= {"layers_per_stage": dealt, "offset": None}
    return recipe.changed(parallel_config=settled)


Settle = Callable[[Recipe, Known], Recipe]
FIRST: Mapping[str, Settle] = {
    "launch.device": on_device,
    "launch.hardware": _on_hardware,
    "model.attention": _on_hardware,
    "model.rope_scaling": _scaling,
    "data.format": _format,
}
"""The function that resolves each key that the planner reads."""
SETTLED: Mapping[str, Settle] = {
    "parallel_config.tensor_slices": _slices,
    "parallel_config.context_parallel_algo": _algorithm,
    "parallel_config.data_parallel": _replicas,
    "parallel_config.micro_batch_num": _stages,
    "parallel_config.pipeline_scheduler": _stages,
    "parallel_config.pipeline_interleave": _stages,
    "parallel_config.layers_per_stage": _stages,
    "parallel_config.strategies": _strategies,
    "parallel_config.switching": _strategies,
    "launch.processes": _processes,
    "parallel_config.exchange_stages": _options,
    "memory.loss_tile_tokens": _memory,
    "memory.mlp_tile_tokens": _memory,
    "memory.recompute": _memory,
    "memory.attention_heads": _head_groups,
}
"""The function that resolves each other key; later ones depend on earlier ones."""


def with_layouts(recipe: Recipe, weighed: Weighed) -> Recipe:
    """Return the recipe with the layouts chosen for `strategies: auto`; or, if a single layout is
    as fast, with that layout and a global batch of the rows that a step's samples fill."""
    found, layouts = weighed.choice, weighed.choice.layouts
    if found.switches and layouts:
        listed = tuple(Strategy(max_length=one.length, **one.keys) for one in layouts.buckets)
        way = "move" if layouts.moves else "in_place"
        return recipe.changed(parallel_config={"strategies": listed, "switching": way})
    best = found.best_static
    assert best  # otherwise the choice would have been refused
    degrees = {**best.priced.keys, "data_parallel": best.priced.layout.data}
    recipe = recipe.changed(training={"global_batch_size": weighed.drawn.packed_rows})
    return recipe.changed(parallel_config={"strategies": None, **degrees})

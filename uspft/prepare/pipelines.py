"""The pipeline stages of a recipe: which layers each has, and why it may not have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from uspft.config.algorithms import AUTO
from uspft.config.messages import as_written
from uspft.config.problems import counted
from uspft.config.strategies import strategies_of
from uspft.engine.deepspeed_config import micro_batches
from uspft.families import FAMILIES, NO_KEYS, layer_windows
from uspft.pipeline.schedules import Schedule, forward_and_backward
from uspft.pipeline.simulator import simulate
from uspft.pipeline.stages import Stages, fits, offset, stated
from uspft.planner.stages import chunk_multiple, cut_by_flops, stages_of
from uspft.planner.step_shape import DrawnRows
from uspft.segments import Segments
from uspft.sequence.chunked import Cut

if TYPE_CHECKING:
    from uspft.config import Finding, Recipe
    from uspft.families import ModelShape
    from uspft.layout import Layout
    from uspft.prepare.known import Known


def stages_said(recipe: Recipe, shape: ModelShape) -> Stages | Finding | None:
    """Return the stages with the layers that a recipe states, or what is wrong with them.

    None where there is one stage, or where the recipe leaves open which layers each has.
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


def _dealt(recipe: Recipe, shape: ModelShape, rows: Sequence[Segments]) -> Stages:
    """Return stages in which layers are dealt out by their FLOPs and those of the head.

    rows: the documents of the run's first rows; none where they are not known, when each row counts
    as one document.
    """
    parallel, again = recipe.parallel_config, recipe.memory.gradient_checkpointing is True
    whole = replace(shape, raw=shape.full)
    seen = DrawnRows(tuple(rows)) if rows else DrawnRows.whole(recipe.data.sequence_length)
    ranks, schedule = parallel.pipeline_stage, Schedule(virtual=parallel.pp_interleave_num)
    return stages_of(whole, layer_windows(whole), seen, ranks, schedule, again=again)


def with_stages(recipe: Recipe, layout: Layout, known: Known) -> Recipe:
    """Return the recipe with the keys of its pipeline stages settled, as far as they can be.

    `micro_batch_num` becomes 1 where there are no stages, as MindSpore Transformers has it. With
    strategies each of them has its own stages, and a step's samples decide how many micro-batches.
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
        found = stages_said(recipe, known.shape) or _dealt(recipe, known.shape, known.rows)
        if isinstance(found, Stages):
            dealt = Schedule(sizes=found.sizes).by_rank(found.ranks)
            settled |= {"layers_per_stage": dealt, "offset": None}
    return recipe.model_copy(update={"parallel_config": parallel.model_copy(update=settled)})


def says_layers(asked: Recipe) -> bool:
    """Return whether a user's recipe says which layers each stage has."""
    parallel = asked.parallel_config
    return (parallel.layers_per_stage, parallel.offset) != (None, None)


def stages_sentence(recipe: Recipe, layout: Layout, asked: Recipe, known: Known) -> str | None:
    """Return for a person which layers the stages of a resolved recipe have, and how long ranks
    wait; None where there is one stage, or where the model's layers are not known. asked: the
    recipe as the user wrote it."""
    parallel = recipe.parallel_config
    if layout.pipeline == 1 or parallel.layers_per_stage is None or strategies_of(recipe):
        return None
    order, virtual = parallel.pipeline_scheduler, parallel.pp_interleave_num
    assert order and order != "auto"  # the recipe is resolved
    passes, chunks = micro_batches(recipe, layout), parallel.seq_split_num
    lists = forward_and_backward(order, layout.pipeline, passes, virtual, chunks)
    waits = simulate(lists, lambda action: 2.0 if action.kind == "backward" else 1.0).bubble
    named = f"interleaved {order}" if virtual > 1 and order != "gpipe" else order
    if order == "seqpipe" and chunks == 1:
        named += " of 1 chunk (seq_split_num), which is 1f1b,"
    many = counted(passes, "micro-batch", "es")
    if chunks > 1:
        many += f" in {chunks} chunks of equal {parallel.sequence_chunks}"
        many += _unequal(recipe, layout, known.shape)
        many += _brought(recipe, layout, known.shape)
    later = ""
    if recipe.data.packing != "none" and not (known.rows or says_layers(asked)):
        later = "; layers are dealt out for rows of one document, which the data may change"
    return (
        f"{as_written(parallel.layers_per_stage)} layers, {named} over {many}: ranks wait "
        f"{waits:.0%} of a step where stages take equal time{later}"
    )


UNEQUAL = 1.1
"""How much more than the mean a chunk of equal time may take without a word."""


def _unequal(recipe: Recipe, layout: Layout, shape: ModelShape | None) -> str:
    """Say by how much chunks of equal time differ where rounding to their multiple makes them."""
    if not shape or recipe.parallel_config.sequence_chunks != "time":
        return ""
    cut = _cut(recipe, layout, shape)
    costs = cut.costs(Segments.single(recipe.data.sequence_length))
    if (most := costs.max() / costs.mean()) <= UNEQUAL:
        return ""
    return f" (one takes {most:.2f} of the mean, since all have multiples of {cut.multiple} tokens)"


def _cut(recipe: Recipe, layout: Layout, shape: ModelShape) -> Cut:
    """Return how rows are cut, as near as can be told before the run prices them."""
    parallel = recipe.parallel_config
    multiple = chunk_multiple(layout, parallel.use_seq_parallel)
    cut = cut_by_flops(shape, layer_windows(shape), parallel.seq_split_num, multiple)
    return cut.of_tokens if parallel.sequence_chunks == "tokens" else cut


def _brought(recipe: Recipe, layout: Layout, shape: ModelShape | None) -> str:
    """Say how often ranks that split a row's tokens send its keys: for each chunk, all keys up to
    the chunk's end."""
    if layout.ring == 1 or not shape:
        return ""
    row = Segments.single(recipe.data.sequence_length)
    cut, windows = _cut(recipe, layout, shape), [w for w in layer_windows(shape) if w != NO_KEYS]
    times = sum(cut.brought(row, window) for window in windows) / max(1, len(windows))
    algorithm = recipe.parallel_config.context_parallel_algo
    return f" ({algorithm} sends keys {times:.2f} times as often as for whole rows of one document)"


def stage_findings(recipe: Recipe, layout: Layout, shape: ModelShape | None) -> list[Finding]:
    """Return findings against a recipe's pipeline stages and its number of micro-batches."""
    findings: list[Finding] = []
    parallel, training = recipe.parallel_config, recipe.training
    asked, passes = parallel.micro_batch_num, micro_batches(recipe, layout)
    if asked not in (AUTO, passes) and (asked != 1 or layout.pipeline > 1):
        of = f"micro_batch_size {training.micro_batch_size} × data_parallel {layout.data}"
        batch = f"training.global_batch_size {training.global_batch_size}"
        what = f"is {asked}, and {batch} ÷ ({of}) makes {passes}"
        one = "" if layout.pipeline > 1 else ", or 1"
        remedy = f"write {AUTO} or {passes}{one}, or change the batch"
        findings.append(("parallel_config.micro_batch_num", what, remedy))
    found = stages_said(recipe, shape) if shape else None
    if isinstance(found, tuple):
        findings.append(found)
    if layout.pipeline > 1 and parallel.seq_split_num > 1:
        findings += _chunk_findings(recipe, layout, shape)
    if shape and layout.pipeline > 1 and shape.raw.get("output_router_logits"):
        beside = f"parallel_config.pipeline_stage {layout.pipeline}"
        what = f"is true, which is not available beside {beside}"
        findings.append(("model.overrides.output_router_logits", what, "write false"))
    return findings


def _chunk_findings(recipe: Recipe, layout: Layout, shape: ModelShape | None) -> list[Finding]:
    """Return findings against the chunks in which a recipe's rows go through the stages."""
    parallel, row = recipe.parallel_config, recipe.data.sequence_length
    chunks = parallel.seq_split_num
    findings: list[Finding] = []
    if shape and FAMILIES[shape.model_type].states and layout.context > 1:
        what = (
            f"is {chunks}, and layers with a state of `{shape.model_type}` carry it from chunk to "
            f"chunk on one rank, where {layout.context} share a row"
        )
        findings.append(("parallel_config.seq_split_num", what, "write 1, or share no rows"))
    if row < chunks * (multiple := chunk_multiple(layout, parallel.use_seq_parallel)):
        what = (
            f"{row} tokens do not make {chunks} chunks (parallel_config.seq_split_num), each of a "
            f"multiple of {multiple}"
        )
        remedy = f"write at least {chunks * multiple}, or fewer chunks"
        findings.append(("data.sequence_length", what, remedy))
    elif row % multiple:
        what = f"{row} tokens are no multiple of {multiple}, of which chunks have multiples"
        remedy = f"the next length that is one is {-(-row // multiple) * multiple}"
        findings.append(("data.sequence_length", what, remedy))
    return findings

"""Reasons why a recipe cannot run in its layout, or in those of its strategies."""

from __future__ import annotations

from uspft.config import Finding, Recipe
from uspft.config.strategies import KEY, strategies_of, under
from uspft.engine.deepspeed_config import micro_batches
from uspft.families import FAMILIES, ModelShape, state_sizes
from uspft.layout import Layout, layout_of
from uspft.prepare.memory import group_findings, tile_findings
from uspft.prepare.pipelines import stage_findings
from uspft.sequence import Heads, of_recipe
from uspft.tensor import tensor_algorithm

EXPERTS = "parallel_config.expert_parallel"


def run_findings(recipe: Recipe, layout: Layout, shape: ModelShape | None) -> list[Finding]:
    """Return what is wrong with a recipe's layout, or with each of its strategies on as many
    ranks."""
    every = len(strategies_of(recipe))
    if not every:
        return layout_findings(recipe, layout, shape)
    findings: list[Finding] = []
    degrees = {one.model_parallel for one in strategies_of(recipe)}
    if layout.experts > 1 and len(degrees) > 1:
        what = f"is {layout.experts}, beside strategies whose model_parallel differs"
        findings.append((EXPERTS, what, "write 1, or one model_parallel in all strategies"))
    for number in range(every):
        alone = under(recipe, number)
        found = layout_of(alone.parallel_config, layout.ranks)
        wrong = [found] if not isinstance(found, Layout) else layout_findings(alone, found, shape)
        findings += [_of_strategy(one, number) for one in wrong]
    return findings


def _of_strategy(finding: Finding, number: int) -> Finding:
    """Return a finding about the recipe of one strategy's rows in the terms of the whole recipe."""
    key, what, remedy = finding
    if key == "data.sequence_length":
        return f"{KEY}[{number}].max_length", what, remedy
    if key == EXPERTS:  # said once for all of them
        return finding
    return key.replace("parallel_config.", f"{KEY}[{number}].", 1), what, remedy


def layout_findings(recipe: Recipe, layout: Layout, shape: ModelShape | None) -> list[Finding]:
    """Return what is wrong with the `parallel_config` of a recipe that has one layout."""
    if layout.tensor > 1 and (wrong := tile_findings(recipe)):
        return wrong
    if wrong := group_findings(recipe, shape, layout.mesh_columns):
        return wrong
    if wrong := _copies(recipe, shape):
        return wrong
    if shape and layout.tensor > 1 and (wrong := _tensor(recipe, layout, shape)):
        return wrong
    # A model that is not here is taken to have as many heads as the degree needs.
    wide = [Heads(layout.ulysses, layout.ulysses, 1)]
    if shape:
        each = (Heads(one.heads, one.kv_heads, one.head_dim) for one in shape.of_each_size)
        wide = [one.on(layout.mesh_columns) for one in each]
    algorithm, length = of_recipe(recipe, layout), recipe.data.sequence_length
    problems = next(filter(None, (algorithm.problems(length, one) for one in wide)), [])
    problems = problems + stage_findings(recipe, layout, shape) + _experts(layout, shape)
    return problems + _accumulation(recipe, layout)


def _copies(recipe: Recipe, shape: ModelShape | None) -> list[Finding]:
    """Return why `fine_grain_interleave` cannot be used with a model or layout."""
    number = recipe.parallel_config.fine_grain_interleave
    if number == 1 or shape is None:
        return []
    family = FAMILIES[shape.model_type]
    if not (family.states or shape.experts > 1):
        return []
    kind = "a state" if family.states else "experts"
    what = f"is {number}, and layers with {kind} of `{shape.model_type}` take their tokens at once"
    return [("parallel_config.fine_grain_interleave", what, "write 1")]


def _experts(layout: Layout, shape: ModelShape | None) -> list[Finding]:
    """Return why a model's experts cannot be divided among ranks."""
    degree = layout.experts
    if degree == 1 or shape is None:
        return []
    if not shape.routed:
        able = ", ".join(name for name, one in FAMILIES.items() if one.routed)
        what = f"is {degree}, and `{shape.model_type}` has no experts"
        return [(EXPERTS, what, f"write 1, or name a model of type {able}")]
    if shape.experts % degree == 0:
        return []
    every, copies = shape.experts, layout.copies
    fitting = [d for d in range(1, every + 1) if every % d == copies % d == 0]
    what = f"is {degree}, which does not divide the {shape.experts} experts of a layer"
    return [(EXPERTS, what, f"write one of {', '.join(map(str, fitting))}")]


def _tensor(recipe: Recipe, layout: Layout, shape: ModelShape) -> list[Finding]:
    """Return why a model's matrices cannot be split over tensor ranks."""
    kind = shape.model_type
    if shape.routed and layout.is_mesh:
        able = [name for name, one in FAMILIES.items() if not (one.routed or one.states)]
        what = f"is meshslice, and experts, which `{kind}` has, do not lie on a mesh yet"
        remedy = f"write megatron, or name a model of type {', '.join(able)}"
        return [("parallel_config.tensor_parallel_algo", what, remedy)]
    if shape.seeing_all and layout.is_mesh:
        what = f"is meshslice, and heads of two sizes, which `{kind}` has, do not lie on a mesh yet"
        return [("parallel_config.tensor_parallel_algo", what, "write megatron")]
    algorithm, hidden = tensor_algorithm(recipe.parallel_config, layout), shape.hidden_size
    each = (algorithm.problems(one.heads, one.kv_heads, hidden) for one in shape.of_each_size)
    return next(filter(None, each), []) or _states(layout, shape)


def _states(layout: Layout, shape: ModelShape) -> list[Finding]:
    """Return why the layers with a state of a model cannot be split over tensor ranks."""
    sizes = state_sizes(shape)
    if sizes is None:
        return []
    if layout.is_mesh:
        what = f"is meshslice, and `{shape.model_type}` has layers with a state"
        return [("parallel_config.tensor_parallel_algo", what, "write megatron")]
    if layout.tensor <= sizes.keys:
        return []
    what = f"is {layout.tensor}, and layers with a state have {sizes.keys} key heads"
    return [("parallel_config.model_parallel", what, f"write at most {sizes.keys}")]


def host_findings(layout: Layout, hosts: int) -> list[Finding]:
    if layout.ranks % hosts == 0:
        return []
    what = f"{layout.ranks} processes do not spread evenly over {hosts} hosts"
    return [("launch.processes", what, "start as many on each host")]


def _accumulation(recipe: Recipe, layout: Layout) -> list[Finding]:
    """Return why the gradients of several micro-batches would not be summed in float32."""
    passes = micro_batches(recipe, layout)
    if recipe.model.dtype != "bfloat16" or passes == 1:
        return []
    zero, place = recipe.deepspeed.zero_optimization, "deepspeed.zero_optimization"
    stage = zero.get("stage", 1)
    what = f"would sum the gradients of {passes} micro-batches in bfloat16"
    if stage == 0:
        remedy = "write stage 1, or model.dtype float32"
        return [(f"{place}.stage", f"stage 0 {what}", remedy)]
    offloaded = (zero.get("offload_optimizer") or {}).get("device", "none") != "none"
    if offloaded and stage < 3:  # DeepSpeed keeps the sum on the host, in the parameters' type
        remedy = "write stage 3, or leave offload_optimizer out, or write model.dtype float32"
        return [(f"{place}.offload_optimizer", f"at stage {stage} {what}", remedy)]
    return []

"""What a person is told of a legal recipe before its ranks start: how long the run is, how its
learning rate goes on, where its experts are, and which parts of the layout leave ranks idle."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from uspft.checkpoint.folder import Checkpoint
from uspft.config import Recipe
from uspft.config.problems import counted
from uspft.config.strategies import KEY, strategies_of
from uspft.data import training_rows
from uspft.engine.deepspeed_config import micro_batches
from uspft.families import ModelShape, expert_layers
from uspft.layout import Layout
from uspft.metrics import Journal
from uspft.planner.expert_traffic import crossover_tokens, token_cost
from uspft.planner.options import lora_of
from uspft.planner.step_shape import StepShape
from uspft.planner.trained import EXPERTS, trained_layers
from uspft.prepare.examine import Examined
from uspft.prepare.known import stage_of, step_shape
from uspft.training.learning_rate import learning_rate
from uspft.written import METRICS

NAMED = 3
"""Degrees that are named beside experts that are not divided."""


def expert_side(recipe: Recipe, shape: ModelShape, layout: Layout) -> str | None:
    """Return for a person how many experts a rank has, and whether dispatching tokens to them sends
    less than ZeRO would for experts on every rank; None for a model without experts.

    Where ranks do not divide experts, the degrees that may are named with theirs.
    """
    every, degree = shape.experts, layout.experts
    if every == 1:
        return None
    step = step_shape(recipe, shape)
    tokens = step.tokens(layout)
    said = f"{every // degree} of a layer's {every} on a rank, {tokens:,.0f} tokens in a forward"
    if degree > 1:
        most = _crossover(recipe, step, layout, degree)
        side, sends = ("below", "less") if tokens < most else ("above", "more")
        return f"{said}, {side} the crossover of {most:,.0f}: dispatch sends {sends} than it saves"
    copies = layout.copies
    able = [d for d in range(2, copies + 1) if copies % d == every % d == 0][:NAMED]
    if not able:
        return said
    each = {d: _crossover(recipe, step, layout, d) for d in able}
    lines = ", ".join(f"{most:,.0f} over {d} ranks" for d, most in each.items())
    less = [f"{d}" for d, most in each.items() if tokens < most]
    what = f"expert_parallel {' or '.join(less)} sends less" if less else "none of these sends less"
    if less and step.hides:
        what += ", though nothing hides it, and what ZeRO moves passes behind products"
    return f"{said}; dispatch sends less than it saves below {lines}: {what}"


def _crossover(recipe: Recipe, step: StepShape, layout: Layout, ranks: int) -> float:
    """Return the tokens on a rank below which experts divided over so many ranks send less."""
    token = token_cost(step.model, step.element_bytes, ranks, step.forwards)
    return crossover_tokens(step.model, ranks, _zero_bytes(recipe, step, layout), token)


def _zero_bytes(recipe: Recipe, step: StepShape, layout: Layout) -> float:
    """Return the bytes of one of the experts' parameters that ZeRO moves for each forward and
    backward; an all-reduce moves a gradient twice."""
    model = recipe.model
    layers = trained_layers(step.model, lora_of(model), tuple(model.freeze))
    matrices = [name.startswith(EXPERTS) for one in layers for name in one.weights]
    trained = sum(matrices) / (2 * sum(expert_layers(step.model)))
    gradient, weight, passes = step.gradient_bytes, step.element_bytes, step.passes(layout)
    if step.stage == 3:
        return 2 * weight + gradient * trained
    once = weight / passes
    return (2 * gradient + once if step.stage == 2 else 2 * gradient / passes + once) * trained


def wasted(found: Examined) -> list[str]:
    """Return a line `key: what; remedy` for each thing that leaves ranks without work."""
    lines, several = [*_prefetch(found.recipe, found.layout)], strategies_of(found.recipe)
    for number, (recipe, layout) in enumerate(found.each_layout):
        at = f"{KEY}[{number}]" if several else "parallel_config"
        lines += _heads(recipe, layout, found, at)
    if not (found.is_open or several):  # else samples are dealt out by what they cost
        lines += _rows(found.recipe, found.layout)
    return lines


def _prefetch(recipe: Recipe, layout: Layout) -> Iterator[str]:
    """Where layers are split in stages, ZeRO-3 fetches no weights ahead: ranks run their stages in
    another order each time, and DeepSpeed knows what comes next from one order alone."""
    if layout.pipeline > 1 and stage_of(recipe) == 3:
        yield (
            "deepspeed.zero_optimization.stage: is 3, beside parallel_config.pipeline_stage "
            f"{layout.pipeline}: weights are not fetched ahead there, so each layer waits for its "
            "own; write 1 or 2 where a stage's weights fit"
        )


def _heads(recipe: Recipe, layout: Layout, found: Examined, at: str) -> Iterator[str]:
    """Where Ulysses has more ranks than there are query heads, some of them attend with none."""
    heads = found.shape.heads // layout.mesh_columns if found.shape else layout.ulysses
    if layout.ulysses > heads:
        named = recipe.parallel_config.ulysses_degree_in_cp is not None
        key = f"{at}.{'ulysses_degree_in_cp' if named else 'context_parallel'}"
        of = f"{heads} query heads" + (" of a tensor rank" if layout.mesh_columns > 1 else "")
        yield (
            f"{key}: Ulysses splits {of} over {layout.ulysses} ranks: {layout.ulysses - heads} of "
            f"them compute no attention; split heads {heads} ways at most, and tokens the rest"
        )


def _rows(recipe: Recipe, layout: Layout) -> Iterator[str]:
    """Where a step has fewer rows than places for them, replicas compute padding."""
    rows, micro = recipe.training.global_batch_size, recipe.training.micro_batch_size
    passes, at_once = micro_batches(recipe, layout), micro * layout.data
    if empty := passes * at_once - rows:
        turns = f"{passes} passes" if passes > 1 else "one pass"
        of = f"{layout.data} replicas, {micro} rows each" if micro > 1 else f"{layout.data} rows"
        few = f"{rows} rows a step leave" if rows > 1 else "a row a step leaves"
        yield (
            f"training.global_batch_size: {few} {empty} of {passes * at_once} places empty "
            f"({turns} of {of}), which compute padding; "
            f"write a multiple of {at_once}, or use fewer processes"
        )


def length_of_run(recipe: Recipe, corpus: Path, steps: int) -> str:
    """Return the rows of an epoch with their padding, and the steps with the epochs they make."""
    switches = bool(strategies_of(recipe))
    stream = training_rows(recipe.data, corpus, recipe.seed, one_document=switches)
    rows, each = stream.rows_in_epoch(0), recipe.training.global_batch_size
    counts = "samples" if switches else "rows"
    epochs = recipe.training.epochs or steps * each / rows  # later ones may have other rows
    of_epoch = f"{rows:,} {counts} an epoch"
    if not switches:
        many = "rows" if rows > 1 else "row"
        of_epoch = f"{rows:,} {many} of {recipe.data.sequence_length:,} tokens an epoch"
        of_epoch += f", {stream.padding():.1%} of them padding"
    of_step = f"{each:,} {counts}" if each > 1 else counts.removesuffix("s")
    many = f"{epochs:.3g} epoch{'s' if epochs != 1 else ''}"
    stop = recipe.training.stop_step
    ends = f"; it ends after step {stop:,}, as training.stop_step says" if stop else ""
    return f"{of_epoch}; {counted(steps, 'step')} of {'a ' * (each == 1)}{of_step}, {many}{ends}"


def rate_after(recipe: Recipe, checkpoint: Checkpoint, steps: int) -> str | None:
    """Return a line on the learning rate where it does not go on as it was, or None where it does.

    The schedule runs over all steps of a run, so that other steps make another rate of each. What
    the rate was stands in the metrics of the run that wrote the checkpoint.
    """
    last = _recorded(checkpoint)
    if last is None:
        return None
    step, was = last
    rate = recipe.optimizer.learning_rate, recipe.lr_schedule
    would = learning_rate(step, steps, *rate)
    if math.isclose(was, would, rel_tol=1e-6, abs_tol=1e-15):
        return None
    after = checkpoint.step + 1
    return (
        f"learning rate: {was:.2e} at step {step}, {learning_rate(after, steps, *rate):.2e} from "
        f"step {after} on: lr_schedule now runs over {steps:,} steps from the first one"
    )


def _recorded(checkpoint: Checkpoint) -> tuple[int, float] | None:
    """Return the last step up to a checkpoint's whose learning rate is recorded, and that rate."""
    found = None
    with suppress(OSError):
        for record in Journal(checkpoint.folder.parent.parent / METRICS).records():
            if "learning_rate" in record and record["step"] <= checkpoint.step:
                found = record["step"], record["learning_rate"]
    return found

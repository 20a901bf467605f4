"""On which side of the crossover a recipe is: whether dispatch to experts that ranks divide sends
less than ZeRO saves."""

from __future__ import annotations

from uspft.config import Recipe
from uspft.families import ModelShape
from uspft.layout import Layout
from uspft.planner.expert_traffic import crossover_tokens, token_cost
from uspft.planner.memory import lora_of
from uspft.planner.step_shape import StepShape
from uspft.planner.trained import EXPERTS, trained_layers
from uspft.prepare.step import step_shape

NAMED = 3
"""Degrees that are named beside experts that are not divided."""


def expert_side(recipe: Recipe, shape: ModelShape, layout: Layout) -> str | None:
    """Return for a person where experts are, and on which side of the crossover in local tokens;
    None of a model that has none.

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
    able = [d for d in range(2, layout.copies + 1) if layout.copies % d == every % d == 0]
    if not able:
        return said
    each = {d: _crossover(recipe, step, layout, d) for d in able[:NAMED]}
    lines = ", ".join(f"{most:,.0f} over {d} ranks" for d, most in each.items())
    less = [f"{d}" for d, most in each.items() if tokens < most]
    what = f"expert_parallel {' or '.join(less)} sends less" if less else "none of these sends less"
    return f"{said}; dispatch sends less than it saves below {lines}: {what}"


def _crossover(recipe: Recipe, step: StepShape, layout: Layout, ranks: int) -> float:
    """Return below how many tokens of a rank so many ranks that divide experts send less."""
    token = token_cost(step.model, step.element_bytes, ranks, step.forwards)
    return crossover_tokens(step.model, ranks, _zero_bytes(recipe, step, layout), token)


def _zero_bytes(recipe: Recipe, step: StepShape, layout: Layout) -> float:
    """Return the bytes of one of the experts' parameters that ZeRO moves for each forward and
    backward; an all-reduce moves a gradient twice."""
    model = recipe.model
    layers = trained_layers(step.model, lora_of(model), tuple(model.freeze))
    matrices = [name.startswith(EXPERTS) for one in layers for name in one.weights]
    trained = sum(matrices) / (2 * len(layers))
    gradient, weight, passes = step.gradient_bytes, step.element_bytes, step.passes(layout)
    if step.stage == 3:
        return 2 * weight + gradient * trained
    once = weight / passes
    return (2 * gradient + once if step.stage == 2 else 2 * gradient / passes + once) * trained

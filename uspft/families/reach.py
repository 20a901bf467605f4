"""How many positions a model's rotary embedding supports, and the scaling that longer rows need."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from uspft.config.inputs import ModelBlock
from uspft.config.problems import Finding
from uspft.families.shape import ModelShape
from uspft.families.table import FAMILIES


def with_factor(model: ModelBlock, shape: ModelShape, length_tokens: int) -> ModelBlock:
    """Return the block with a value for `model.rope_scaling.factor`, if a scaling has none.

    It is the factor that supports the rows' length.
    """
    asked = model.rope_scaling
    if asked is None or asked["rope_type"] == "default" or "factor" in asked:
        return model
    factor = max(1.0, length_tokens / _original(asked, shape))
    return model.model_copy(update={"rope_scaling": {**asked, "factor": factor}})


def check_length(shape: ModelShape, model: ModelBlock, length_tokens: int) -> list[Finding]:
    """Return a finding if rows have more positions than the model supports, with its rope scaling
    if any.

    Factors of a longrope scaling that do not fit the model's heads are found too.
    """
    key, asked = "data.sequence_length", with_factor(model, shape, length_tokens).rope_scaling
    if asked is None or asked["rope_type"] == "default":
        reach = shape.max_positions if asked else _own_reach(shape)
        if length_tokens <= reach:
            return []
        what = f"is {length_tokens}, and the model has {reach} positions"
        remedy = f"at most {reach}"
        if "yarn" in FAMILIES[shape.model_type].scalings:
            factor = math.ceil(length_tokens / shape.max_positions)
            remedy += f", or model.rope_scaling: {{rope_type: yarn, factor: {factor}.0}}"
        return [(key, what, f"write {remedy}")]
    findings = _pairs(asked, shape)
    original = _original(asked, shape)
    reach = _reach(asked, original)
    if asked["rope_type"] == "llama3":
        # Llama 3.1 was trained on more positions than original × factor.
        reach = max(reach, shape.max_positions)
    if length_tokens <= reach:
        return findings
    factor = math.ceil(length_tokens / original)
    what = (
        f"is {length_tokens}, and model.rope_scaling reaches {reach} positions "
        f"({original} x {asked['factor']:g})"
    )
    remedy = f"write at most {reach}, or model.rope_scaling.factor: {factor}.0"
    return [*findings, (key, what, remedy)]


def _own_reach(shape: ModelShape) -> int:
    """Return how many positions the model's own config supports."""
    rope = shape.rope or {}
    # Gemma 3's number of positions includes its scaling, unless that is dynamic.
    if not FAMILIES[shape.model_type].scalings and rope.get("rope_type") != "dynamic":
        return shape.max_positions
    return max(shape.max_positions, _reach(rope, shape.max_positions))


def _pairs(asked: Mapping[str, Any], shape: ModelShape) -> list[Finding]:
    """Return what is wrong with the number of factors of a longrope scaling.

    It needs a factor for each rotated pair of dimensions.
    """
    share = {**shape.raw, **(shape.rope or {})}.get("partial_rotary_factor", 1.0)
    pairs = int(shape.head_dim * share) // 2
    found = []
    for key in ("short_factor", "long_factor"):
        if key in asked and len(asked[key]) != pairs:
            what = f"has {len(asked[key])} numbers, and the model turns {pairs} pairs of a head"
            found.append((f"model.rope_scaling.{key}", what, f"write {pairs} numbers"))
    return found


def _original(asked: Mapping[str, Any], shape: ModelShape) -> int:
    """Return the number of positions that a scaling extends.

    It is the scaling's own value, else what the model was first trained on. Dynamic NTK extends all
    positions of the model, as in transformers.
    """
    if asked["rope_type"] == "dynamic":
        return shape.max_positions
    first = (shape.rope or {}).get("original_max_position_embeddings", shape.max_positions)
    value = asked.get("original_max_position_embeddings", first)
    return value if isinstance(value, int) else shape.max_positions


def _reach(rope: Mapping[str, Any], positions: int) -> int:
    """Return how many positions a scaling supports if it extends `positions`, or its own value."""
    original = rope.get("original_max_position_embeddings", positions)
    factor = rope.get("factor", 1.0)
    if not isinstance(original, int) or not isinstance(factor, int | float):
        return positions
    return int(original * factor + 1e-6)  # a factor computed as a quotient may be rounded down

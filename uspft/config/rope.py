"""The keys of `model.rope_scaling` for each of its types, named as Hugging Face names them.

A `factor` left out becomes data.sequence_length ÷ the model's original positions, at least 1.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Required

from pydantic import BeforeValidator, Discriminator, Field, Strict, with_config
from typing_extensions import TypedDict

from uspft.config.messages import unknown_value
from uspft.config.problems import Fault, fault
from uspft.config.types import STRICT, Count, Positive

_BY_PAIR = "a list of numbers, one for each pair of a head's dimensions"
_ByPair = Annotated[tuple[Positive, ...], Strict(False), Field(title=_BY_PAIR)]
_Factor = Annotated[float, Field(ge=1)]


@with_config(STRICT)
class Default(TypedDict, total=False):
    rope_type: Required[Literal["default"]]
    rope_theta: Positive


@with_config(STRICT)
class Linear(TypedDict, total=False):
    rope_type: Required[Literal["linear"]]
    rope_theta: Positive
    factor: _Factor


@with_config(STRICT)
class Dynamic(TypedDict, total=False):
    rope_type: Required[Literal["dynamic"]]
    rope_theta: Positive
    factor: _Factor


@with_config(STRICT)
class Yarn(TypedDict, total=False):
    rope_type: Required[Literal["yarn"]]
    rope_theta: Positive
    factor: _Factor
    original_max_position_embeddings: Count
    attention_factor: Positive
    beta_fast: Positive
    beta_slow: Positive
    mscale: Positive
    mscale_all_dim: Positive
    truncate: bool


@with_config(STRICT)
class LongRope(TypedDict, total=False):
    rope_type: Required[Literal["longrope"]]
    rope_theta: Positive
    factor: _Factor
    original_max_position_embeddings: Count
    attention_factor: Positive
    short_factor: Required[_ByPair]
    long_factor: Required[_ByPair]


@with_config(STRICT)
class Llama3(TypedDict, total=False):
    rope_type: Required[Literal["llama3"]]
    rope_theta: Positive
    factor: _Factor
    original_max_position_embeddings: Count
    low_freq_factor: Required[Positive]
    high_freq_factor: Required[Positive]


TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")


def _of_a_type(value: Any) -> Any:
    if isinstance(value, dict) and "type" in value and "rope_type" not in value:
        raise fault("has `type`, whose key is `rope_type`", f"write rope_type: {value['type']}")
    if not isinstance(value, dict) or "rope_type" not in value:
        what = "has no `rope_type`" if isinstance(value, dict) else "expected a mapping or null"
        raise fault(what, "write {rope_type: yarn, factor: 4.0} or null")
    if value["rope_type"] not in TYPES:
        raise Fault([("rope_type", *unknown_value(value["rope_type"], {"enum": list(TYPES)}))])
    return value


Scaling = Annotated[
    Default | Linear | Dynamic | Yarn | LongRope | Llama3,
    Discriminator("rope_type"),
    BeforeValidator(_of_a_type),
    Field(title=f"a mapping with rope_type: {' | '.join(TYPES)}"),
]
"""A scaling of rotary positions, whose keys are those of its type."""

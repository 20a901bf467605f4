"""The keys of `model.rope_scaling` for each of its types, named as Hugging Face names them.

A `factor` left out becomes data.sequence_length ÷ the model's original positions, at least 1.
"""

from __future__ import annotations

from typing import Any

from uspft.config.allowed import described, lets_pass
from uspft.config.checks import Check, choice, each, flag, real, table, whole
from uspft.config.problems import fault

_THETA: dict[str, Check] = {"rope_theta": real(above=0)}
_SCALED: dict[str, Check] = {**_THETA, "factor": real(1)}
_BY_PAIR = each(real(above=0), "a list of numbers, one for each pair of a head's dimensions")
_FROM: dict[str, Check] = {"original_max_position_embeddings": whole(1)}

TYPES: dict[str, dict[str, Check]] = {
    "default": _THETA,
    "linear": _SCALED,
    "dynamic": _SCALED,
    "yarn": {
        **_SCALED,
        **_FROM,
        "attention_factor": real(above=0),
        "beta_fast": real(above=0),
        "beta_slow": real(above=0),
        "mscale": real(above=0),
        "mscale_all_dim": real(above=0),
        "truncate": flag(),
    },
    "longrope": {
        **_SCALED,
        **_FROM,
        "attention_factor": real(above=0),
        "short_factor": _BY_PAIR,
        "long_factor": _BY_PAIR,
    },
    "llama3": {
        **_SCALED,
        **_FROM,
        "low_freq_factor": real(above=0),
        "high_freq_factor": real(above=0),
    },
}
REQUIRED: dict[str, tuple[str, ...]] = {
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("low_freq_factor", "high_freq_factor"),
}
_type = choice(*TYPES)


def _of_type(kind: str) -> Check:
    """Return the check of a scaling of one type: only that type's keys may stand in it."""
    keys = {"rope_type": choice(kind), **TYPES[kind]}
    return table(keys, required=("rope_type", *REQUIRED.get(kind, ())))


@lets_pass(
    f"a mapping with rope_type: {' | '.join(TYPES)}",
    {"anyOf": [described(_of_type(kind)).schema for kind in TYPES]},
    (None,),
)
def scaling(value: Any) -> dict[str, Any] | None:
    """Return a scaling of rotary positions whose keys are those of its type; None for null.

    Raises Fault.
    """
    if value is None:
        return None
    if isinstance(value, dict) and "type" in value and "rope_type" not in value:
        raise fault("has `type`, whose key is `rope_type`", f"write rope_type: {value['type']}")
    if not isinstance(value, dict) or "rope_type" not in value:
        what = "has no `rope_type`" if isinstance(value, dict) else "expected a mapping or null"
        raise fault(what, "write {rope_type: yarn, factor: 4.0} or null")
    kind = value["rope_type"]
    if not isinstance(kind, str) or kind not in TYPES:
        return dict(table({"rope_type": _type})({"rope_type": kind}))
    return dict(_of_type(kind)(value))

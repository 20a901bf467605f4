"""Rotary positions for the rows' length, where transformers would go by each call's longest one.

Dynamic NTK and LongRoPE have other frequencies for longer calls, and each rank would see another
longest position. A run has one length, and its frequencies stand in the config: for the ranks, for
the exported model, and for whoever reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FROM_ORIGINAL = ("yarn", "longrope", "llama3")
"""Rope types that name the positions which they start from; others start from all the model's."""
_OF_THE_MODEL = ("rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")
"""Rotary parameters that no scaling replaces."""
_KINDS = ("full_attention", "sliding_attention")


def scale_positions(config: Any, asked: Mapping[str, Any]) -> None:
    """Put the recipe's rope_scaling into a config in place of its own."""
    known = dict(config.rope_parameters or {})
    kept = {key: known[key] for key in _OF_THE_MODEL if key in known}
    rope = {key: list(v) if isinstance(v, tuple) else v for key, v in asked.items()}
    if rope["rope_type"] in FROM_ORIGINAL:
        key = "original_max_position_embeddings"
        rope.setdefault(key, known.get(key, config.max_position_embeddings))
        if hasattr(config, key):  # Phi-3 has it beside them, and it would rule
            setattr(config, key, rope[key])
    config.rope_parameters = kept | rope


def settle_positions(config: Any, length_tokens: int) -> None:
    """Choose the frequencies of rows of this length, for calls of every length.

    Dynamic NTK becomes the plain kind at the base that it has for this length; of LongRoPE's two
    lists the one that this length asks for stands in both places. Where the rows are no longer than
    the original positions, transformers chooses the original ones by itself: nothing changes.
    """
    ropes, positions = config.rope_parameters or {}, config.max_position_embeddings
    kinds = [kind for kind in _KINDS if ropes.get(kind)]
    each = [ropes[kind] for kind in kinds] or [ropes]
    found = [settled(rope, config, length_tokens) for rope in each]
    if found == each:
        return
    if any(rope.get("rope_type") == "dynamic" for rope in each):
        config.max_position_embeddings = max(positions, length_tokens)
    config.rope_parameters = (
        {**ropes, **dict(zip(kinds, found, strict=True))} if kinds else found[0]
    )


def settled(rope: dict[str, Any], config: Any, length_tokens: int) -> dict[str, Any]:
    kind, positions = rope.get("rope_type"), config.max_position_embeddings
    if kind == "longrope" and length_tokens > rope["original_max_position_embeddings"]:
        return {**rope, "short_factor": rope["long_factor"]}
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dim = int(head * rope.get("partial_rotary_factor", 1.0))
    if kind != "dynamic" or length_tokens <= positions or dim <= 2:
        return rope
    factor = rope["factor"]
    stretch = factor * length_tokens / positions - (factor - 1)
    base = rope["rope_theta"] * stretch ** (dim / (dim - 2))
    rest = {key: value for key, value in rope.items() if key != "factor"}
    return rest | {"rope_type": "default", "rope_theta": base}

"""The sliding windows of a model's layers, as its config.json has them."""

from __future__ import annotations

from uspft.families.shape import ModelShape
from uspft.families.states import state_layers
from uspft.families.table import FAMILIES, NO_KEYS


def layer_windows(shape: ModelShape) -> tuple[int | None, ...]:
    """Return the window of each layer in keys; None where it sees all, NO_KEYS where it has no
    attention."""
    window, family = shape.window, FAMILIES[shape.model_type]
    types, layers = shape.raw.get("layer_types"), range(shape.layers)
    if family.states:
        return tuple(NO_KEYS if state else None for state in state_layers(shape))
    one_for_all = family.windows == "all" or shape.model_type == "qwen3_moe"
    if window is None or (one_for_all and not types):
        return (window,) * shape.layers
    if types:
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    if family.windows == "switched":
        if shape.model_type == "smollm3":  # those without rotary positions
            every = int(shape.raw.get("no_rope_layer_interval", 4))
            turned = shape.raw.get("no_rope_layers") or [(i + 1) % every for i in layers]
            return tuple(None if turned[i] else window for i in layers)
        first = shape.raw.get("max_window_layers", 28)
        if shape.model_type == "qwen2_moe":  # every other one of the first
            return tuple(None if i >= first or i % 2 else window for i in layers)
        return tuple(window if i >= first else None for i in layers)
    full = 6 if shape.model_type == "gemma3_text" else 2
    return tuple(window if (i + 1) % full else None for i in layers)

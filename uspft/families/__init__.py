"""Facts about each model type, and which models are refused; no torch."""

from uspft.families.layers import (
    Blocks,
    StateSizes,
    attention_windows,
    expert_layers,
    layer_blocks,
    layer_windows,
    state_layers,
    state_sizes,
)
from uspft.families.reach import check_length, with_factor
from uspft.families.shape import ModelShape, read_shape
from uspft.families.table import FAMILIES, NO_KEYS

__all__ = [
    "FAMILIES",
    "NO_KEYS",
    "Blocks",
    "ModelShape",
    "StateSizes",
    "attention_windows",
    "check_length",
    "expert_layers",
    "layer_blocks",
    "layer_windows",
    "read_shape",
    "state_layers",
    "state_sizes",
    "with_factor",
]

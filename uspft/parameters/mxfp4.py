"""Weights in MXFP4, as gpt-oss lies on the hub, read a part at a time.

Of each output 32 inputs have one exponent, and four bits each (OCP Microscaling Formats 1.0): a
parameter [E, i, o] lies as `_blocks` [E, o, i ÷ 32, 16], two values in a byte, the low half first,
and `_scales` [E, o, i ÷ 32]. Every value is one of float32 and of bfloat16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from uspft.parameters.part import Part, as_slices

BLOCKS, SCALES = "_blocks", "_scales"
GROUP = 32
"""How many inputs have one exponent."""
_POSITIVE = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
_VALUES = torch.tensor(_POSITIVE + [-value for value in _POSITIVE])
"""What four bits stand for."""
_BIAS = 127


def dequantised(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the float32 values [..., 32 g] of uint8 blocks [..., g, 16] and scales [..., g]."""
    low, high = _VALUES[(blocks & 15).long()], _VALUES[(blocks >> 4).long()]
    values = torch.stack([low, high], -1).flatten(-2)
    return torch.ldexp(values, scales.int()[..., None] - _BIAS).flatten(-2)


def whole_shape(blocks: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the parameter of blocks of this shape."""
    experts, gives, groups, _ = blocks
    return experts, groups * GROUP, gives


def read_quantised(blocks: Any, scales: Any, part: Part) -> Tensor:
    """Read a part of a parameter out of slices of safetensors files, as float32; its own bytes
    alone, but that inputs come by whole groups."""
    out = torch.empty(part.size)
    for ((e, e_end), (i, i_end), (o, o_end)), there in part.boxes():
        first, last = i // GROUP, -(-i_end // GROUP)
        held = [one[e:e_end, o:o_end, first:last] for one in (blocks, scales)]
        values = dequantised(*held)[..., i - first * GROUP : i_end - first * GROUP]
        out[as_slices(there)] = values.transpose(1, 2)
    return out

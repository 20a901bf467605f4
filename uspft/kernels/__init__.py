"""Attention on one device: (out, lse) and its backward, with one signature for every backend."""

from uspft.blocks import Block, Mask, area
from uspft.kernels.choose import believed_kernel, slower
from uspft.kernels.kernel import Grouped, Kernel, Qkv
from uspft.kernels.merge import Partial

__all__ = [
    "Block",
    "Grouped",
    "Kernel",
    "Mask",
    "Partial",
    "Qkv",
    "area",
    "believed_kernel",
    "slower",
]

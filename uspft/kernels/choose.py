"""`model.attention` → the kernel of this device."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from uspft.kernels import cuda
from uspft.kernels.kernel import Kernel
from uspft.kernels.torch_cpu import TorchCpu

PACKAGES = {"flash_attn_3": "flash_attn_interface", "flash_attn_2": "flash_attn"}
"""Kernels from packages, the fastest first."""


def kernel_name(wish: str, device: str) -> str:
    """What `auto` means here: the fastest kernel whose package is installed, else torch's own."""
    if wish != "auto":
        return wish
    names = [] if device == "cpu" else [name for name in PACKAGES if is_installed(name)]
    return names[0] if names else "torch"


def is_installed(name: str) -> bool:
    """Whether a kernel's package can be found; torch's own always is there."""
    return name not in PACKAGES or find_spec(PACKAGES[name]) is not None


def choose_kernel(name: str, device: torch.device) -> Kernel:
    """The kernel of a resolved name. Raises ImportError where its package does not load."""
    if device.type == "cpu":
        return TorchCpu()
    makers = {"flash_attn_3": cuda.flash_attn_3, "flash_attn_2": cuda.flash_attn_2}
    return makers.get(name, cuda.torch_flash)()

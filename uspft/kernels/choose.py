"""`model.attention` → the kernel of this device."""

from __future__ import annotations

import torch

from uspft.kernels import cuda
from uspft.kernels.kernel import Kernel
from uspft.kernels.torch_cpu import TorchCpu

HALF = (torch.float16, torch.bfloat16)


def choose_kernel(wish: str, dtype: torch.dtype, device: torch.device) -> Kernel:
    """The fastest installed kernel for `auto`, or the one asked for.

    Raises ValueError, naming the key and a remedy, where the wish cannot be met.
    """
    if device.type == "cpu":
        if wish in ("auto", "torch"):
            return TorchCpu()
        raise ValueError(f"model.attention: {wish} runs on GPUs only; write auto or torch")
    if dtype not in HALF:
        raise ValueError(
            f"model.dtype: {dtype} has no flash attention on a GPU; write bfloat16 or float16"
        )
    return _cuda_kernel(wish)


def _cuda_kernel(wish: str) -> Kernel:
    makers = {"flash_attn_3": cuda.flash_attn_3, "flash_attn_2": cuda.flash_attn_2}
    names = list(makers) if wish == "auto" else [wish]
    for name in names:
        if name in makers:
            try:
                return makers[name]()
            except ImportError:
                continue
    if wish in ("auto", "torch"):
        return cuda.torch_flash()
    raise ValueError(f"model.attention: {wish} is not installed; install it, or write auto")

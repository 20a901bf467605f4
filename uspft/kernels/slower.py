"""What a run on a GPU loses by its attention kernel, and how to get a faster one."""

from __future__ import annotations

import sys

import torch

from uspft.kernels.kernel import Kernel

HOPPER = (9, 0)
WHEELS = "https://download.pytorch.org/whl"


def slower(kernel: Kernel, device: torch.device) -> str | None:
    """Return a line where another kernel would be much faster on this device, else None."""
    if device.type != "cuda":
        return None
    pip = f"{sys.executable} -m pip install"
    if kernel.softcap and kernel.name == "torch":
        return (
            "scores are soft-capped, and flash-attn 2, whose kernel can do that, is not in use: "
            "attention takes plain operations of torch in float32, ten times slower or more; "
            f"{pip} flash-attn"
        )
    on_hopper = torch.cuda.get_device_capability(device) == HOPPER
    if kernel.softcap or not on_hopper or kernel.name not in ("torch", "flash_attn_2"):
        return None
    build = "cu" + (torch.version.cuda or "").replace(".", "")
    return (
        "flash-attn 3 is not in use: on this GPU its attention is 1.5 to 2 times as fast "
        f"(arXiv 2407.08608); {pip} --no-deps --index-url {WHEELS}/{build} flash-attn-3"
    )

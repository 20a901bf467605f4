"""The peak memory of this process."""

from __future__ import annotations

import resource
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak of the allocated device memory, or on CPU the largest resident set so far."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def as_size(byte_count: float) -> str:
    """Return a byte count as four digits and a binary unit, such as `1.234 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if byte_count < 1024:
            return f"{byte_count:.4g} {unit}"
        byte_count /= 1024
    return f"{byte_count:.4g} GiB"

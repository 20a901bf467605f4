"""Hardware files: the shipped ones, and one whose figures make round numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from uspft.planner.machine import Hardware, read_hardware
from uspft.prepare.known import shipped

H100 = read_hardware(shipped()["h100"])


def round_figures(**changes: Any) -> dict[str, Any]:
    """The keys of a file: 1 TFLOP/s, 1 GB/s inside and 0.1 GB/s between hosts of 4 ranks."""
    return {
        "name": "round",
        "what": "a cluster of round numbers",
        "sources": ["made up"],
        "peak_flops": 2e12,
        "ranks_per_host": 4,
        "memory": {"bytes": 1e9, "bytes_per_second": 1e10},
        "products": {"share": 0.5, "launch_seconds": 1e-3},
        "attention": {"forward_flops": 4e9, "backward_flops": 1e10, "launch_seconds": 0},
        "inside": {"launch_seconds": 1e-3, "hop_seconds": 1e-4, "bytes_per_second": 1e9},
        "between": {"launch_seconds": 2e-3, "hop_seconds": 2e-4, "bytes_per_second": 1e8},
        **changes,
    }


def made(folder: Path, **changes: Any) -> Hardware:
    """The same, written to a file and read."""
    file = folder / "round.yaml"
    file.write_text(yaml.safe_dump(round_figures(**changes)))
    return read_hardware(file)

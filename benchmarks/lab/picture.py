"""Pictures, where matplotlib is installed."""

from __future__ import annotations

from typing import Any


def blank(width: float, height: float) -> Any | None:
    """This returns an empty figure of so many inches, or None without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no picture: matplotlib is not installed")
        return None
    return Figure(figsize=(width, height), layout="constrained")

"""Byte counts written for a person."""

from __future__ import annotations


def as_size(byte_count: float) -> str:
    """Return a byte count as four digits and a binary unit, such as `1.234 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if byte_count < 1024:
            return f"{byte_count:.4g} {unit}"
        byte_count /= 1024
    return f"{byte_count:.4g} GiB"

"""The tables of what a save takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.lab.machine import measured_on
from benchmarks.lab.tables import markdown


def checksum_table(cases: Sequence[dict[str, Any]]) -> str:
    """Return a line for each size."""
    heads = (
        "checkpoint",
        "save s",
        "without checksums s",
        "by safetensors s",
        "xxh3 CPU s",
        "CRC-32 CPU s",
        "checksums add",
    )
    lines = [
        [
            f"{case['bytes'] / 1e9:.1f} GB",
            f"{case['save_seconds']:.2f}",
            f"{case['unsummed_seconds']:.2f}",
            f"{case['safetensors_seconds']:.2f}",
            f"{case['xxh3_seconds']:.3f}",
            f"{case['crc32_seconds']:.3f}",
            f"{case['cost']:.1%}",
        ]
        for case in cases
    ]
    return markdown(heads, lines)


def overlap_table(cases: Sequence[dict[str, Any]]) -> str:
    """Return a line for each size and way."""
    heads = ("checkpoint", "step s", "written", "save s", "steps wait s", "steps lose s a save")
    lines = [
        [
            f"{case['bytes'] / 1e9:.1f} GB",
            f"{case['step_seconds']:.2f}",
            way,
            f"{case[way]['save_seconds']:.2f}",
            f"{case[way]['waited_seconds']:.2f}",
            f"{case[way]['lost_seconds']:.2f}",
        ]
        for case in cases
        for way in ("in turn", "beside")
    ]
    return markdown(heads, lines)


def figures(result: dict[str, Any]) -> dict[str, str]:
    """Return what pages show of saving.json, by name, as Markdown."""
    return {
        "checksums": checksum_table(result["checksums"]),
        "overlap": overlap_table(result["overlap"]) if "overlap" in result else "Not measured yet.",
        "measured": measured_on(result[key] for key in result if key.endswith("_on")),
    }

"""What `plan` prints of memory: each layout's peak on a rank, and the longest row that fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from uspft.commands.aligned import aligned
from uspft.planner.need import USABLE_SHARE, longest_row, need_of

if TYPE_CHECKING:
    from uspft.config import Recipe
    from uspft.families import ModelShape
    from uspft.planner.alternatives import Prediction
    from uspft.planner.hardware import Hardware

GIB = 1 << 30


def memory_table(
    recipe: Recipe, shape: ModelShape, hardware: Hardware, every: Sequence[Prediction]
) -> str | None:
    """Return a line for each layout whose memory the formula knows; None where it knows none.

    every: the recipe's own layout first. All have what the recipe has under `memory`.
    """
    card = hardware.memory.bytes if hardware.device else None
    rows = []
    for one in every:
        need = need_of(recipe, shape, one.layout, row=one.row)
        if need is None:
            continue
        name = one.name + (" (the recipe's)" if one is every[0] else "")
        cells = [name, f"{need.activations.peak_bytes / GIB:.3g}", f"{need.state_bytes / GIB:.3g}"]
        if card is not None:
            fits = "" if need.bytes <= USABLE_SHARE * card else " (too much)"
            longest = longest_row(recipe, shape, one.layout, card, row=one.row)
            cells += [f"{need.bytes / card:.2f}{fits}", f"{longest:,}" if longest else "none"]
        rows.append(cells)
    head = ["GiB a rank", "activations", "state", "of the card", "longest row"]
    return aligned([head[: len(rows[0])], *rows]) if rows else None

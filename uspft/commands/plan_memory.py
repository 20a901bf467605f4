"""What `plan` knows of memory: which layouts fit, each one's peak on a rank, the longest row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from uspft.commands.aligned import aligned
from uspft.planner.need import Need, fits, longest_row, need_of, unknown

if TYPE_CHECKING:
    from uspft.config import Recipe
    from uspft.families import ModelShape
    from uspft.planner.alternatives import Prediction
    from uspft.planner.machine import Hardware

GIB = 1 << 30


class Beside(NamedTuple):
    """A layout in a table of `plan`."""

    time: Prediction
    need: Need | None
    """What a rank needs; None where the formula does not know."""
    fits: bool | None
    """Whether a card has that; None where that is not known."""
    is_own: bool

    @property
    def name(self) -> str:
        """The layout's name, with what a reader of the table must know of it."""
        said = ["the recipe's"] * self.is_own + ["does not fit"] * (self.fits is False)
        return self.time.name + (f" ({', '.join(said)})" if said else "")


def beside(
    recipe: Recipe,
    shape: ModelShape,
    hardware: Hardware,
    own: Prediction,
    others: Sequence[Prediction],
) -> list[Beside]:
    """Return the recipe's own layout, then the others in their order, those that do not fit last.

    All have what the recipe has under `memory`.
    """
    card, found = _card(hardware), []
    for one in (own, *others):
        need = need_of(recipe, shape, one.layout, row=one.row)
        there = None if card is None else fits(recipe, shape, one.layout, card, row=one.row)
        found.append(Beside(one, need, there, one is own))
    return sorted(found, key=lambda one: (not one.is_own, one.fits is False))


def memory_table(
    recipe: Recipe, shape: ModelShape, hardware: Hardware, every: Sequence[Beside]
) -> str | None:
    """Return a line for each layout; None where the formula knows the memory of none."""
    if not any(one.need for one in every):
        return None
    card, rows = _card(hardware), [["GiB a rank", "activations", "state"]]
    rows[0] += ["of the card", "longest row"] if card is not None else []
    for one in every:
        if one.need is None:
            rows.append([one.name, *["–"] * (len(rows[0]) - 1)])
            continue
        peak, state = one.need.activations.peak_bytes, one.need.state_bytes
        cells = [f"{peak / GIB:.3g}", f"{state / GIB:.3g}"]
        if card is not None:
            longest = longest_row(recipe, shape, one.time.layout, card, row=one.time.row)
            cells += [f"{one.need.bytes / card:.2f}", f"{longest:,}" if longest else "none"]
        rows.append([one.name, *cells])
    return aligned(rows)


def memory_unknown(recipe: Recipe, shape: ModelShape, every: Sequence[Beside]) -> list[str]:
    """Return a line on what keeps the formula from knowing some layout's memory, or none."""
    found = [unknown(recipe, shape, one.time.layout, row=one.time.row) for one in every]
    whats = dict.fromkeys(what for layout in found for what in layout)
    return [f"memory with {' or with '.join(whats)}"] if whats else []


def _card(hardware: Hardware) -> float | None:
    """Return the bytes of a card; None where ranks are on CPUs."""
    return hardware.memory.bytes if hardware.device else None

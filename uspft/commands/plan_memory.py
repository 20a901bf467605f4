"""What `plan` knows of memory: which layouts fit, each one's peak on a rank, the longest row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from uspft.commands.aligned import aligned
from uspft.planner.memory import (
    USABLE_SHARE,
    Memory,
    Options,
    fits,
    longest_row,
    memory_of,
    options_of,
)

if TYPE_CHECKING:
    from uspft.config import Recipe
    from uspft.families import ModelShape
    from uspft.planner.alternatives import Prediction
    from uspft.planner.hardware import Hardware

GIB = 1 << 30


class Beside(NamedTuple):
    """A layout in a table of `plan`."""

    time: Prediction
    need: Memory
    """What a rank needs: a guess with what the formula does not know."""
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
        need = memory_of(shape, one.layout, recipe.data.sequence_length, options=_of(recipe, one))
        found.append(Beside(one, need, _there(need, card), one is own))
    return sorted(found, key=lambda one: (not one.is_own, one.fits is False))


def memory_table(
    recipe: Recipe, shape: ModelShape, hardware: Hardware, every: Sequence[Beside]
) -> str | None:
    """Return a line for each layout; None where the formula knows the memory of none."""
    if all(one.need.unpredicted for one in every):
        return None
    card, rows = _card(hardware), [["GiB a rank", "activations", "state"]]
    rows[0] += ["of the card", "longest row"] if card is not None else []
    for one in every:
        if one.need.unpredicted:
            rows.append([one.name, *["–"] * (len(rows[0]) - 1)])
            continue
        peak, state = one.need.activation_bytes, one.need.state_bytes
        cells = [f"{peak / GIB:.3g}", f"{state / GIB:.3g}"]
        if card is not None:
            options = _of(recipe, one.time)
            longest = longest_row(shape, one.time.layout, card, options=options)
            cells += [f"{one.need.peak_bytes / card:.2f}", f"{longest:,}" if longest else "none"]
        rows.append([one.name, *cells])
    return aligned(rows)


def memory_unknown(every: Sequence[Beside]) -> list[str]:
    """Return a line on what keeps the formula from knowing some layout's memory, or none."""
    whats = dict.fromkeys(what for one in every for what in one.need.unpredicted)
    return [f"memory with {' or with '.join(whats)}"] if whats else []


def _of(recipe: Recipe, one: Prediction) -> Options:
    return replace(options_of(recipe, one.layout), algorithm=one.row.name)


def _there(need: Memory, card: float | None) -> bool | None:
    """Tell whether a card has what a rank needs; None where that is not known."""
    if card is None:
        return None
    if need.unpredicted:
        return False if need.weight_bytes > USABLE_SHARE * card else None
    return fits(need, card)


def _card(hardware: Hardware) -> float | None:
    """Return the bytes of a card; None where ranks are on CPUs."""
    return hardware.memory.bytes if hardware.device else None

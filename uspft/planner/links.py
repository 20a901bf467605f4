"""The lines that links have: how long they take before, between and for the bytes that move."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import PlainValidator

from uspft.config.checks import real
from uspft.config.fields import RecipeBlock, block

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "point_to_point"]
COLLECTIVES: tuple[Collective, ...] = (
    *("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "point_to_point"),
)

_NONE = (None,)
_Seconds = Annotated[float, PlainValidator(real(0))]
_Rate = Annotated[float, PlainValidator(real(above=0))]
_RateOrNone = Annotated[float | None, PlainValidator(real(above=0, also=_NONE))]


class Link(RecipeBlock):
    """The line of a transfer: launch + (messages that follow one another) × hop + bytes ÷ rate."""

    launch_seconds: _Seconds
    """Seconds before a collective moves anything, whatever it moves."""
    hop_seconds: _Seconds
    """Seconds that ranks take to come together for one step of a ring."""
    bytes_per_second: _Rate
    """Bytes that a rank sends in a second, in one direction."""

    def ring_seconds(self, ranks: int, shard_bytes: float, rate: float | None = None) -> float:
        """Return the seconds of an all-gather or reduce-scatter in a ring of P ranks.

        They are launch + (P − 1) · (hop + s ÷ rate), where s is the bytes of one rank's shard
        (MeshSlice, formula 5).
        """
        return self.launch_seconds + (ranks - 1) * (
            self.hop_seconds + shard_bytes / (rate or self.bytes_per_second)
        )


_LinkOrNone = Annotated[Link | None, PlainValidator(block(Link, also=_NONE))]


class Links(Link):
    """The links of one kind; a collective that was measured by itself has a line of its own."""

    host_bytes_per_second: _RateOrNone = None
    """Bytes that all ranks of a host together send to others; null: each has a card of its own."""
    all_gather: _LinkOrNone = None
    reduce_scatter: _LinkOrNone = None
    all_reduce: _LinkOrNone = None
    """Where it is null, an all-reduce is a reduce-scatter and an all-gather."""
    all_to_all: _LinkOrNone = None
    point_to_point: _LinkOrNone = None

    def link(self, kind: Collective) -> Link:
        """Return the line of a collective: its own, or else that of all."""
        own: Link | None = getattr(self, kind)
        return own or self

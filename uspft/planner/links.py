"""The lines that links have: how long they take before, between and for the bytes that move."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import PlainValidator

from uspft.config.allowed import shown
from uspft.config.checks import real
from uspft.config.fields import RecipeBlock, block
from uspft.config.problems import Fault, Finding, fault

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "point_to_point"]
COLLECTIVES: tuple[Collective, ...] = (
    *("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "point_to_point"),
)
SUMS: tuple[Collective, ...] = ("all_gather", "reduce_scatter", "all_reduce")
"""Those whose rate across hosts depends on how many members of a group a host has."""

LAUNCH_SECONDS, HOP_SECONDS = 15e-6, 1.5e-6
"""What stands for a link of which a file says neither: 16 GPUs of two hosts take 46 µs for 8 bytes
(github.com/NVIDIA/nccl/issues/1244), and 8 on PCIe 42 (issue 1530)."""
_NONE = (None,)
_Seconds = Annotated[float, PlainValidator(real(0))]
_Rate = Annotated[float, PlainValidator(real(above=0))]
_RateOrNone = Annotated[float | None, PlainValidator(real(above=0, also=_NONE))]


def _by_number(value: Any) -> Mapping[int, float] | None:
    """Check a mapping of numbers of ranks to rates, in rising order; null stands for none."""
    if value is None:
        return None
    if not isinstance(value, Mapping) or not value:
        raise fault(f"expected rates by a number of ranks, got {shown(value)}", "write {'2': 1e9}")
    check, found, wrong = real(above=0), dict[int, float](), list[Finding]()
    for ranks, rate in value.items():
        try:
            if not str(ranks).isdigit() or int(ranks) < 1:
                raise fault(f"expected a number of ranks, got {shown(ranks)}", "write '2': 1e9")
            found[int(ranks)] = check(rate)
        except Fault as error:
            wrong += [(str(ranks), what, remedy) for _, what, remedy in error.findings]
    if wrong:
        raise Fault(wrong)
    return dict(sorted(found.items()))


_RatesOrNone = Annotated[Mapping[int, float] | None, PlainValidator(_by_number)]


def rate_of(rates: Mapping[int, float], ranks: int) -> float:
    """Return the rate of the largest number of ranks that is not above `ranks`, or else of the
    smallest."""
    return rates[max((known for known in rates if known <= ranks), default=min(rates))]


class Link(RecipeBlock):
    """The line of a transfer: launch + (messages that follow one another) × hop + bytes ÷ rate."""

    launch_seconds: _Seconds = LAUNCH_SECONDS
    """Seconds before a collective moves anything, whatever it moves."""
    hop_seconds: _Seconds = HOP_SECONDS
    """Seconds that ranks take to come together for one step of a ring."""
    bytes_per_second: _Rate
    """Bytes that a rank sends in a second, in one direction."""
    by_ranks: _RatesOrNone = None
    """The same for groups of so many ranks, a host's groups all at once; null: one rate for all."""
    host_by_members: _RatesOrNone = None
    """Bytes that a host sends to others in a second in all-gathers and sums, by how many members of
    a group it has, all its groups at once; null: as `host_bytes_per_second` says."""

    def rate(self, ranks: int) -> float:
        """Return the bytes per second of a rank in a group of so many."""
        return rate_of(self.by_ranks, ranks) if self.by_ranks else self.bytes_per_second

    def ring_seconds(self, ranks: int, shard_bytes: float, rate: float | None = None) -> float:
        """Return the seconds of an all-gather or reduce-scatter in a ring of P ranks.

        They are launch + (P − 1) · (hop + s ÷ rate), where s is the bytes of one rank's shard
        (MeshSlice, formula 5).
        """
        return self.launch_seconds + (ranks - 1) * (
            self.hop_seconds + shard_bytes / (rate or self.rate(ranks))
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

    def of_host(self, kind: Collective, members: int) -> float | None:
        """Return the bytes per second of a host that has so many members of each group, where they
        are known."""
        known = self.link(kind).host_by_members or self.host_by_members
        return rate_of(known, members) if known else None

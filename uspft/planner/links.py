"""The lines that links have: how long they take before, between and for the bytes that move."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator

from uspft.config.messages import shown
from uspft.config.problems import Fault, fault
from uspft.config.types import As, NotNegative, Positive, RecipeBlock

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "point_to_point"]
COLLECTIVES: tuple[Collective, ...] = (
    *("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "point_to_point"),
)
SUMS: tuple[Collective, ...] = ("all_gather", "reduce_scatter", "all_reduce")
"""Those whose rate across hosts depends on how many members of a group a host has."""

LAUNCH_SECONDS, HOP_SECONDS = 15e-6, 1.5e-6
"""What stands for a link of which a file says neither: 16 GPUs of two hosts take 46 µs for 8 bytes
(github.com/NVIDIA/nccl/issues/1244), and 8 on PCIe 42 (issue 1530)."""


def _by_number(value: Any) -> Any:
    """Return a mapping of numbers of ranks to rates, whose keys are numbers in a file too."""
    if not isinstance(value, Mapping) or not value:
        raise fault(f"expected rates by a number of ranks, got {shown(value)}", "write {'2': 1e9}")
    wrong = [ranks for ranks in value if not str(ranks).isdigit() or int(ranks) < 1]
    if wrong:
        what = [(str(ranks), f"expected a number of ranks, got {shown(ranks)}") for ranks in wrong]
        raise Fault([(key, said, "write '2': 1e9") for key, said in what])
    return {str(ranks): rate for ranks, rate in value.items()}


_Rates = Annotated[
    Mapping[int, float],
    As(
        Annotated[
            dict[str, Positive],
            BeforeValidator(_by_number),
            AfterValidator(lambda found: {int(k): found[k] for k in sorted(found, key=int)}),
        ]
    ),
]


def rate_of(rates: Mapping[int, float], ranks: int) -> float:
    """Return the rate of the largest number of ranks that is not above `ranks`, or else of the
    smallest."""
    return rates[max((known for known in rates if known <= ranks), default=min(rates))]


class Link(RecipeBlock):
    """The line of a transfer: launch + (messages that follow one another) × hop + bytes ÷ rate."""

    launch_seconds: NotNegative = LAUNCH_SECONDS
    """Seconds before a collective moves anything, whatever it moves."""
    hop_seconds: NotNegative = HOP_SECONDS
    """Seconds that ranks take to come together for one step of a ring."""
    bytes_per_second: Positive
    """Bytes that a rank sends in a second, in one direction."""
    by_ranks: _Rates | None = None
    """The same for groups of so many ranks, a host's groups all at once; null: one rate for all."""
    host_by_members: _Rates | None = None
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


class Links(Link):
    """The links of one kind; a collective that was measured by itself has a line of its own."""

    host_bytes_per_second: Positive | None = None
    """Bytes that all ranks of a host together send to others; null: each has a card of its own."""
    all_gather: Link | None = None
    reduce_scatter: Link | None = None
    all_reduce: Link | None = None
    """Where it is null, an all-reduce is a reduce-scatter and an all-gather."""
    all_to_all: Link | None = None
    point_to_point: Link | None = None

    def link(self, kind: Collective) -> Link:
        """Return the line of a collective: its own, or else that of all."""
        own: Link | None = getattr(self, kind)
        return own or self

    def of_host(self, kind: Collective, members: int) -> float | None:
        """Return the bytes per second of a host that has so many members of each group, where they
        are known."""
        known = self.link(kind).host_by_members or self.host_by_members
        return rate_of(known, members) if known else None

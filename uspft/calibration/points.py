"""The points that ranks measure: one time each, with what it is a time of."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FILE = "measured.json"


@dataclass(frozen=True)
class LinkPoint:
    """The time of one collective, or of one message (point_to_point), in groups of one size."""

    kind: str
    where: str
    """`inside` a host, or `between` hosts."""
    ranks: int
    of_bytes: int
    """The bytes, as `Hardware.collective_seconds` counts them."""
    seconds: float
    senders: int = 1
    """The ranks of a host that send to another host at the same time."""
    members: int = 1
    """The ranks of each group that a host has, where the group spans hosts."""

    @property
    def causes(self) -> tuple[float, float, float]:
        """The causes of the time: 1, the steps that follow one another, and the bytes that a rank
        sends one after the other."""
        if self.kind in ("all_to_all", "point_to_point"):
            steps = self.ranks - 1 if self.kind == "all_to_all" else 0
            return 1.0, steps, self.of_bytes
        ways = 2 if self.kind == "all_reduce" else 1
        steps = ways * (self.ranks - 1)
        return 1.0, steps, steps * self.of_bytes / self.ranks


@dataclass(frozen=True)
class ProductPoint:
    """The time of a product [size, size] × [size, size] while every rank computes one."""

    size: int
    seconds: float


@dataclass(frozen=True)
class AttentionPoint:
    """The time of a causal square of so many tokens, forward alone or backward."""

    tokens: int
    heads: int
    dim: int
    backward: bool
    seconds: float


@dataclass(frozen=True)
class HidingPoint:
    """The times of a transfer to the next rank of a ring, of attention, and of both at once."""

    transfer: float
    attention: float
    both: float

    @property
    def could_hide(self) -> float:
        """The seconds that the two could have in common."""
        return min(self.transfer, self.attention)

    @property
    def hidden(self) -> float:
        """The seconds that they have in common."""
        return self.transfer + self.attention - self.both


@dataclass(frozen=True)
class Points:
    """All points of one cluster, and what it is."""

    device: str
    """The GPU's name, or cpu."""
    dtype: str
    kernel: str
    hosts: int
    ranks_per_host: int
    memory_bytes: float
    copied_bytes_per_second: float
    links: Sequence[LinkPoint] = field(default_factory=tuple)
    products: Sequence[ProductPoint] = field(default_factory=tuple)
    attention: Sequence[AttentionPoint] = field(default_factory=tuple)
    hiding: Sequence[HidingPoint] = field(default_factory=tuple)
    """There are none where one rank measures alone."""

    def leave(self, folder: Path) -> None:
        (folder / FILE).write_text(json.dumps(asdict(self)))

    @classmethod
    def found(cls, folder: Path) -> Points:
        tree: dict[str, Any] = json.loads((folder / FILE).read_text())
        kinds = {
            "links": LinkPoint,
            "products": ProductPoint,
            "attention": AttentionPoint,
            "hiding": HidingPoint,
        }
        for name, kind in kinds.items():
            tree[name] = tuple(kind(**one) for one in tree[name])
        return cls(**tree)

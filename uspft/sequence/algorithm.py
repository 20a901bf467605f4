"""The seam: what a sequence-parallel algorithm must say about itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from torch import Tensor

from uspft.batch import Segments
from uspft.comm import Group
from uspft.kernels import Kernel
from uspft.sequence.plan import Plan
from uspft.sequence.regions import Run


class Heads(NamedTuple):
    """Query heads, KV heads and head dim of one attention layer."""

    query: int
    kv: int
    dim: int


@dataclass(frozen=True)
class Rule:
    """How scores become weights: softmax(scale · q·k) over the last `window` keys of a document,
    the query's own counted; None: over all that come before.

    sinks [H]: scores of keys that every query sees and that give it nothing, one a head; float32 or
    wider.
    """

    scale: float
    window: int | None = None
    sinks: Tensor | None = None

    def of_heads(self, heads: tuple[int, int]) -> Rule:
        """The same for query heads [first, last) alone."""
        return self if self.sinks is None else replace(self, sinks=self.sinks[slice(*heads)])


@dataclass(frozen=True)
class Split:
    """What attention needs beside tensors: this rank's groups and its one-device kernel."""

    ulysses: Group
    ring: Group
    kernel: Kernel


class Traffic(NamedTuple):
    """What the busiest rank sends: bytes, and messages (one for each rank that is sent something,
    each time)."""

    bytes: int = 0
    messages: int = 0


NOTHING = Traffic()


@dataclass(frozen=True)
class Cost:
    """What one layer sends, forward and backward, by kind; each kind has its own busiest rank."""

    all_to_all: Traffic = NOTHING
    ring: Traffic = NOTHING
    gather: Traffic = NOTHING


class Algorithm(Protocol):
    """One way to split a row over ulysses × ring ranks. Dataclass fields are its options."""

    name: str
    megatron_name: str

    @property
    def ulysses(self) -> int: ...

    @property
    def ring(self) -> int: ...

    def problems(self, row_tokens: int, heads: Heads) -> list[tuple[str, str, str]]:
        """Why it cannot run here: (recipe key, what is wrong, remedy) each."""
        ...

    def token_order(self, segments: Segments) -> list[tuple[Run, ...]]:
        """The positions that each context rank holds, in its order; together the row, each once.

        Context rank = Ulysses index + ulysses × ring index.
        """
        ...

    def attend(
        self, qkv: tuple[Tensor, Tensor, Tensor], plan: Plan, rule: Rule, split: Split
    ) -> Tensor:
        """Attention out [T, H, D] of this rank's tokens, differentiable.

        q [T, H, D], k and v [T, G, D] hold all heads of the rank's own T tokens.
        """
        ...

    def cost(
        self, segments: Segments, heads: Heads, element_bytes: int, window: int | None = None
    ) -> Cost:
        """Traffic for one row with these documents, of a layer with this window."""
        ...


def rows_must_divide(row_tokens: int, parts: int, why: str) -> list[tuple[str, str, str]]:
    """The problem of a row that `parts` does not divide, naming the next length that it does."""
    if row_tokens % parts == 0:
        return []
    longer = -(-row_tokens // parts) * parts
    return [
        (
            "data.sequence_length",
            f"{row_tokens} tokens do not split into {parts} equal parts ({why})",
            f"the next length that does is {longer}",
        )
    ]

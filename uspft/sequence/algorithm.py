"""The seam: what a sequence-parallel algorithm must say about itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from uspft.comm import Group
from uspft.kernels import Kernel
from uspft.segments import Segments
from uspft.sequence.rows.share import Share
from uspft.sequence.rows.spans import Span
from uspft.sequence.rows.traffic import Cost, Heads


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


class Algorithm(Protocol):
    """One way to split a row over ulysses × ring ranks: a dataclass, whose fields are its degrees,
    its options, and what it must know of the run (`make_algorithm`)."""

    @property
    def ulysses(self) -> int: ...

    @property
    def ring(self) -> int: ...

    def problems(self, row_tokens: int, heads: Heads) -> list[tuple[str, str, str]]:
        """Why it cannot span here: (recipe key, what is wrong, remedy) each."""
        ...

    def token_order(self, segments: Segments) -> list[tuple[Span, ...]]:
        """The positions that each context rank holds, in its order; together the row, each once.

        Context rank = Ulysses index + ulysses × ring index.
        """
        ...

    def attend(
        self, qkv: tuple[Tensor, Tensor, Tensor], share: Share, rule: Rule, split: Split
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

"""The interface of a context-parallel algorithm, and the types of its arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeAlias

from uspft.segments import Segments
from uspft.sequence.rows.heads import Heads
from uspft.sequence.rows.share import RowParts, Share, everyones
from uspft.sequence.rows.spans import Span
from uspft.sequence.rows.traffic import ONCE, Cost, Forwards, heads_traffic, in_turns

if TYPE_CHECKING:
    from torch import Tensor

    from uspft.comm import Group
    from uspft.kernels import Kernel, Qkv
    from uspft.sequence.kept_keys import LayerKeys


@dataclass(frozen=True)
class Rule:
    """How attention scores become weights: by softmax(scale · q·k) over the keys that a query
    sees."""

    scale: float
    window: int | None = None
    """The sliding window: the number of keys that a query sees, its own included; None: all keys of
    its document up to its own."""
    sinks: Tensor | None = None
    """The attention sinks: for each query head a score [H] that is in the softmax's denominator and
    has no value; at least float32."""

    def of_heads(self, heads: tuple[int, int]) -> Rule:
        """Return the same rule for query heads [first, last)."""
        return self if self.sinks is None else replace(self, sinks=self.sinks[slice(*heads)])


Attend: TypeAlias = "Callable[[tuple[Tensor, ...]], Tensor]"
"""A differentiable function from (q, k, v), or (q, k, v, sinks), to the attention output."""
Inside: TypeAlias = "Callable[[Attend, tuple[Tensor, ...]], Tensor]"
"""A function that calls an `Attend` with its inputs, as activation checkpointing does."""


@dataclass(frozen=True)
class Split:
    """This rank's process groups and its kernel, which attention needs in addition to tensors."""

    ulysses: Group
    ring: Group
    kernel: Kernel
    inside: Inside | None = None
    """A wrapper that calls attention between the exchanges of heads, so that a recomputed layer can
    save the results of attention; None: it is called directly."""
    earlier: LayerKeys | None = None
    """The saved keys of earlier chunks in this layer; None: rows are not split into chunks."""


Saved: TypeAlias = "tuple[Tensor, ...]"
"""The results of `Passes.forward`, followed by the gradient of its output [t, h, D]."""
QkvGradients: TypeAlias = "tuple[Tensor, Tensor, Tensor, Tensor | None]"
"""The gradients of q, k, v and the rule's sinks."""


class Passes(Protocol):
    """The forward and backward of attention across a ring: how an algorithm brings keys and queries
    together."""

    def forward(self, qkv: Qkv, rule: Rule, ring: Group, kernel: Kernel) -> tuple[Tensor, ...]:
        """Return the output [t, h, D], the log-sum-exp [h, t], and other tensors to save for the
        backward."""
        ...

    def backward(
        self, qkv: Qkv, saved: Saved, rule: Rule, ring: Group, kernel: Kernel
    ) -> QkvGradients:
        """Return the gradients of queries, keys, values and sinks."""
        ...


class Algorithm(Protocol):
    """One way to split a row over ulysses × ring ranks.

    An implementation is a frozen dataclass, whose fields are its degrees, options and facts of the
    run such as its hosts; `make_algorithm` fills them in. It says which tokens each rank holds and
    how keys come to queries. The exchange of heads (ulysses.py) and the cost are the same for all.
    """

    @property
    def ulysses(self) -> int: ...

    @property
    def ring(self) -> int: ...

    # dataclasses provide it; costs are cached by algorithm
    def __hash__(self) -> int:
        return id(self)

    def problems(self, row_tokens: int, heads: Heads) -> list[tuple[str, str, str]]:
        """Return the reasons why the algorithm cannot split rows of this length with these heads.

        Each reason is (recipe key, what is wrong, remedy); the list is empty if it can.
        """
        per_rank = 1 if self.ring == 1 else 2
        return rows_must_divide(row_tokens, self.ulysses * self.ring, per_rank)

    def token_order(self, segments: Segments) -> list[tuple[Span, ...]]:
        """Return the positions of each context rank, in the rank's order; every position of the row
        is on exactly one rank.

        A context rank's number is its Ulysses index + ulysses × its ring index.
        """
        ...

    def passes(self, share: Share, *, keeps: bool = False) -> Passes:
        """Return the forward and backward of attention between the exchanges of heads.

        keeps: whether keys received in the forward may be saved for the backward; else the backward
        fetches the keys of other ranks again.
        """
        ...

    def cost(
        self,
        segments: Segments,
        heads: Heads,
        element_bytes: int,
        window: int | None = None,
        forwards: Forwards = ONCE,
        parts: RowParts | None = None,
    ) -> Cost:
        """Return what one layer with this window sends for one row with these documents.

        element_bytes: the size of an element of q, k and v. forwards: how often the forward's
        transfers are made. parts: the shares of all ring ranks for each chunk of the row; None: the
        row is not cut into chunks.
        """
        tokens = segments.length // (self.ulysses * self.ring)
        exchanged = heads_traffic(heads, self.ulysses, tokens, element_bytes, forwards)
        if self.ring == 1:
            return Cost(exchanged)
        parts = parts or [everyones(segments, self.token_order(segments), self.ulysses, window)]
        together, turns = in_turns(heads, self.ulysses, forwards.at_once)
        pair_bytes = 2 * together * heads.dim * element_bytes
        return replace(self.keys_cost(parts, pair_bytes, forwards, turns), all_to_all=exchanged)

    def keys_cost(self, parts: RowParts, pair_bytes: int, forwards: Forwards, turns: int) -> Cost:
        """Return the cost of moving keys, values and their gradients in a ring of several ranks.

        parts: the shares of all ring ranks for each chunk of the row. pair_bytes: the size of a
        token's key and value. turns: how many groups of heads follow one another.
        """
        ...


def rows_must_divide(row_tokens: int, ranks: int, per_rank: int = 1) -> list[tuple[str, str, str]]:
    """Return the problem of a row that cannot be cut into `per_rank` equal parts for each of the
    ranks that share it, or no problem. Its remedy names the next length that can be."""
    multiple = per_rank * ranks
    if row_tokens % multiple == 0:
        return []
    what = f"{row_tokens} tokens are not a multiple of "
    if per_rank == 1:
        what += f"context_parallel ({ranks})"
    else:
        what += f"{multiple}, {per_rank} × context_parallel ({ranks}): each rank that shares a row "
        what += f"takes {per_rank} equal parts of it"
    remedy = f"the next length that is one is {-(-row_tokens // multiple) * multiple}"
    return [("data.sequence_length", what, remedy)]

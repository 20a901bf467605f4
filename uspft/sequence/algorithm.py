"""The interface of a sequence-parallel algorithm, and the values that it is handed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeAlias

from uspft.segments import Segments
from uspft.sequence.rows.share import RowParts, Share, everyones
from uspft.sequence.rows.spans import Span
from uspft.sequence.rows.traffic import ONCE, Cost, Forwards, Heads, heads_traffic, in_turns

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
    """How many keys of its document a query sees, its own the last of them; None: all up to its
    own."""
    sinks: Tensor | None = None
    """Scores [H] of keys that every query sees and that give it nothing, one for each query head;
    float32 or wider."""

    def of_heads(self, heads: tuple[int, int]) -> Rule:
        """Return the same rule for query heads [first, last) alone."""
        return self if self.sinks is None else replace(self, sinks=self.sinks[slice(*heads)])


Attend: TypeAlias = "Callable[[tuple[Tensor, ...]], Tensor]"
"""A function of q, k, v and, where there are any, sinks → attention out, differentiable."""
Inside: TypeAlias = "Callable[[Attend, tuple[Tensor, ...]], Tensor]"
"""A function that calls such a one with its inputs, as a checkpoint does."""


@dataclass(frozen=True)
class Split:
    """What attention needs beside tensors: this rank's groups and its kernel for one device."""

    ulysses: Group
    ring: Group
    kernel: Kernel
    inside: Inside | None = None
    """What calls attention between the exchanges of heads, where a recomputed layer keeps the
    results of attention alone; None: it is called as any function is."""
    earlier: LayerKeys | None = None
    """The keys of earlier chunks in this layer, where the tokens are those of a chunk of rows."""


Saved: TypeAlias = "tuple[Tensor, ...]"
"""What a forward returned, with the gradient of its out [t, h, D] behind."""
QkvGradients: TypeAlias = "tuple[Tensor, Tensor, Tensor, Tensor | None]"
"""Of q, k, v and the rule's sinks."""


class Passes(Protocol):
    """The attention of a ring rank's queries over the keys that they see, with its gradients."""

    def forward(self, qkv: Qkv, rule: Rule, ring: Group, kernel: Kernel) -> tuple[Tensor, ...]:
        """Return out [t, h, D] and the log-sum-exp [h, t], with what else the backward needs."""
        ...

    def backward(
        self, qkv: Qkv, saved: Saved, rule: Rule, ring: Group, kernel: Kernel
    ) -> QkvGradients:
        """Return the gradients of queries, keys, values and sinks."""
        ...


class Algorithm(Protocol):
    """One way to split a row over ulysses × ring ranks.

    An implementation is a frozen dataclass whose fields are its degrees, its options and what it
    must know of the run; `make_algorithm` fills them. It says how tokens are dealt out and how keys
    come to queries; heads are exchanged and transfers are counted in one way for all.
    """

    @property
    def ulysses(self) -> int: ...

    @property
    def ring(self) -> int: ...

    def __hash__(self) -> int:  # which a dataclass has of its own: costs are kept by algorithm
        return id(self)

    def problems(self, row_tokens: int, heads: Heads) -> list[tuple[str, str, str]]:
        """Return why the algorithm cannot split rows of so many tokens with these heads.

        Each reason is (recipe key, what is wrong, remedy); the list is empty where it can.
        """
        ranks = self.ulysses * self.ring
        if self.ring == 1:
            return rows_must_divide(row_tokens, ranks, "one for each rank")
        return rows_must_divide(row_tokens, 2 * ranks, "two for each rank")

    def token_order(self, segments: Segments) -> list[tuple[Span, ...]]:
        """Return the positions that each context rank holds, in the rank's order; together they are
        the row, each position once.

        A context rank's number is its Ulysses index + ulysses × its ring index.
        """
        ...

    def passes(self, share: Share, *, keeps: bool = False) -> Passes:
        """Return the attention of a rank's queries over the keys that the algorithm brings, between
        exchanges of heads (ulysses.py).

        keeps: whether the backward may have what came in the forward; else keys come again.
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

        element_bytes: how many bytes one element of q, k and v has. forwards: how often it makes
        the transfers of its forward. parts: where the row is cut into chunks, of each of them the
        shares of all ring ranks; None: it is not.
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
        """Return what keys, values and their gradients cost, where the ring has several ranks.

        parts: of a row, each with the shares of all ring ranks. pair_bytes: of one token's key and
        value. turns: in how many all of it is done.
        """
        ...


def rows_must_divide(row_tokens: int, parts: int, why: str) -> list[tuple[str, str, str]]:
    """Return the problem of a row that cannot be cut into `parts` equal parts, or no problem.

    Its remedy names the next length that can. why: what the parts are, for the message.
    """
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

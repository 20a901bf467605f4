"""The interface of a sequence-parallel algorithm, and the values that it is handed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeAlias

from uspft.segments import Segments
from uspft.sequence.rows.share import RowParts, Share
from uspft.sequence.rows.spans import Span
from uspft.sequence.rows.traffic import ONCE, Cost, Forwards, Heads

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
    """One way in which keys come to the queries of a ring rank: its forward, and its backward."""

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
    must know of the run; `make_algorithm` fills them.
    """

    @property
    def ulysses(self) -> int: ...

    @property
    def ring(self) -> int: ...

    def __hash__(self) -> int: ...

    def problems(self, row_tokens: int, heads: Heads) -> list[tuple[str, str, str]]:
        """Return why the algorithm cannot split rows of so many tokens with these heads.

        Each reason is (recipe key, what is wrong, remedy); the list is empty where it can.
        """
        ...

    def token_order(self, segments: Segments) -> list[tuple[Span, ...]]:
        """Return the positions that each context rank holds, in the rank's order; together they are
        the row, each position once.

        A context rank's number is its Ulysses index + ulysses × its ring index.
        """
        ...

    def attend(self, qkv: Qkv, share: Share, rule: Rule, split: Split) -> Tensor:
        """Return the attention out [T, H, D] of this rank's tokens, differentiable.

        q [T, H, D], k and v [T, G, D] hold all H query heads and G KV heads of the rank's own T
        tokens; D is the head dim.
        """
        ...

    def passes(self, share: Share) -> Passes:
        """Return the forward and the backward of what `attend` does between exchanges of heads; the
        backward fetches the keys of other ranks again."""
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

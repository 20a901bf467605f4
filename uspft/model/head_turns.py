"""What attention in groups of heads attends with at once, and how it crosses a Ulysses group.

Shapes, as suffixes: t this rank's tokens, T those of its Ulysses group; N some of all heads, n this
member's of those; D head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from uspft.comm import Waited
from uspft.sequence.rows.heads import KeyGroup, key_groups
from uspft.sequence.ulysses import both_ways, start_exchange, start_exchange_back

if TYPE_CHECKING:
    from uspft.blocks import HeadRange
    from uspft.model.attention import Bound
    from uspft.sequence import Heads


@dataclass(frozen=True)
class HeadTurn:
    """What is attended with at once."""

    group: KeyGroup
    number: int
    """Among those of the group."""

    @property
    def queries(self) -> tuple[HeadRange, ...]:
        return self.group.queries[self.number]

    @property
    def parts(self) -> tuple[HeadRange, ...]:
        """By member where its query heads are among those of the turn."""
        found, at = [], 0
        for a, b in self.queries:
            found.append((at, at + b - a))
            at += b - a
        return tuple(found)

    @property
    def first(self) -> bool:
        return self.number == 0

    @property
    def last(self) -> bool:
        return self.number == len(self.group.queries) - 1


def turns_among(heads: Heads, members: int, at_once: int) -> list[HeadTurn]:
    """Return the turns of a Ulysses group, in order. at_once: query heads of a KV head."""
    groups = key_groups(heads.query, heads.kv, members, min(at_once, heads.query // heads.kv))
    return [HeadTurn(group, number) for group in groups for number in range(len(group.queries))]


class HeadExchange:
    """The exchanges of tokens for some heads and back, each of which is started and then awaited.

    Where the group is of one, nothing moves.
    """

    def __init__(self, bound: Bound) -> None:
        self._share, mesh = bound.share, bound.world.mesh
        self._group = mesh.ulysses
        first = mesh.ring.index * self._group.size
        self._tokens = bound.share.tokens[first : first + self._group.size]

    @property
    def moves(self) -> bool:
        return self._group.size > 1

    def to_heads(self, x_tND: Tensor, parts: tuple[HeadRange, ...]) -> Waited:
        """Return what waits for this member's heads of all its group's tokens [T, n, D], in the
        order of the row. parts: by member its heads among those of x."""
        if not self.moves:
            return lambda: x_tND
        wait = start_exchange((x_tND,), (parts,), self._tokens, self._group)

        def arrived() -> Tensor:
            (x_TnD,) = wait()
            index = self._index(x_TnD)
            return x_TnD if index is None else x_TnD.index_select(0, index[0])

        return arrived

    def to_tokens(self, x_TnD: Tensor, parts: tuple[HeadRange, ...]) -> Waited:
        """Return what waits for all members' heads of this rank's tokens [t, N, D]."""
        if not self.moves:
            return lambda: x_TnD
        if (index := self._index(x_TnD)) is not None:
            x_TnD = x_TnD.index_select(0, index[1])
        wait = start_exchange_back((x_TnD,), (parts,), self._tokens, self._group)
        return lambda: wait()[0]

    def _index(self, x: Tensor) -> Any:
        sorting = self._share.sorting
        if sorting is None:
            return None
        return self._share.once(("sorting", x.device), lambda: both_ways(sorting, x.device))


class UnderWay:
    """Transfers home that have been started, with what is done when each has arrived."""

    def __init__(self, exchange: HeadExchange) -> None:
        self._moves = exchange.moves
        self._every: list[Callable[[], None]] = []

    def add(self, wait: Waited, then: Callable[[Tensor], None]) -> None:
        """Do something with what arrives: at once where nothing moves."""
        if self._moves:
            self._every.append(lambda: then(wait()))
        else:
            then(wait())

    def finish(self) -> None:
        """Wait for all of them, in their order."""
        while self._every:
            self._every.pop(0)()


def arrived(coming: list[Waited]) -> list[Tensor]:
    """Wait for all that comes; the list is empty afterwards, and holds nothing."""
    return [coming.pop(0)() for _ in range(len(coming))]


def put(whole_tND: Tensor, heads: Sequence[HeadRange], part_tND: Tensor) -> None:
    """Put some heads where they are among all."""
    at = 0
    for a, b in heads:
        whole_tND[:, a:b] = part_tND[:, at : at + b - a]
        at += b - a


def pick(whole_tND: Tensor, heads: Sequence[HeadRange]) -> Tensor:
    """Return some heads of all, contiguous."""
    parts = [whole_tND[:, a:b] for a, b in heads if a < b]
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim=1)

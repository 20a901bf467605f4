"""Which heads each member of a Ulysses group attends with, all at once or a group at a time.

A group is one KV head of each member, with some of that head's query heads (UPipe, arXiv
2602.21196).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, pairwise
from typing import TYPE_CHECKING, NamedTuple

from uspft.blocks import HeadRange

if TYPE_CHECKING:
    from uspft.layout import Layout


class Heads(NamedTuple):
    """The number of query heads, that of KV heads, and the head dim of one attention layer."""

    query: int
    kv: int
    dim: int

    def on(self, ranks: int) -> Heads:
        """Return the heads of one of `ranks` tensor ranks, which may replicate KV heads."""
        return Heads(self.query // ranks, max(self.kv // ranks, 1), self.dim)


@dataclass(frozen=True)
class HeadSplit:
    """The query heads and KV heads of each member of a Ulysses group."""

    query: tuple[HeadRange, ...]
    """Each member's query heads: consecutive ones, as even as their number allows."""
    kv: tuple[HeadRange, ...]
    """The KV heads that each member's query heads need. A KV head may be replicated on several
    members, whose gradients are then summed."""

    @property
    def widest(self) -> tuple[int, int]:
        """The most query heads and the most KV heads of a member."""
        query, kv = (max(last - first for first, last in part) for part in (self.query, self.kv))
        return query, kv

    def groups(self, member: int, per_kv: int) -> list[tuple[HeadRange, HeadRange]]:
        """Return a member's heads as (query, KV) ranges, relative to its first ones.

        In a range every KV head has equally many query heads, as one grouped-query kernel call
        requires. per_kv: how many query heads share a KV head in the model.
        """
        (q0, q1), (k0, k1) = self.query[member], self.kv[member]
        found: list[tuple[HeadRange, HeadRange]] = []
        for kv in range(k0, k1):
            first, last = max(q0, kv * per_kv) - q0, min(q1, (kv + 1) * per_kv) - q0
            if found:
                (a, b), (c, d) = found[-1]
                if (b - a) // (d - c) == last - first:
                    found[-1] = (a, last), (c, d + 1)
                    continue
            found.append(((first, last), (kv - k0, kv - k0 + 1)))
        return found

    def calls(self, per_kv: int) -> set[tuple[int, int]]:
        """Return the (query, KV) head counts of all members' kernel calls."""
        members = range(len(self.query))
        ranges = chain.from_iterable(self.groups(member, per_kv) for member in members)
        return {(b - a, d - c) for (a, b), (c, d) in ranges}


@lru_cache(maxsize=256)
def split_heads(query: int, kv: int, members: int) -> HeadSplit:
    """Spread query heads over members, with the KV heads they need.

    With more members than query heads, some members have none.
    """
    per_kv = query // kv
    cuts = [i * query // members for i in range(members + 1)]
    queries = tuple(pairwise(cuts))
    keys = tuple((a // per_kv, -(-b // per_kv)) if a < b else (0, 0) for a, b in queries)
    return HeadSplit(queries, keys)


NO_HEADS: HeadRange = (0, 0)


@dataclass(frozen=True)
class KeyGroup:
    """One KV head for each member of a Ulysses group, and the turns in which its query heads are
    computed."""

    keys: tuple[int | None, ...]
    """Each member's KV head; None where a member has no more. Members may have the same one, whose
    gradients are summed."""
    queries: tuple[tuple[HeadRange, ...], ...]
    """By turn and member, the query heads to compute at once; a range may be empty."""

    @property
    def heads(self) -> tuple[int, ...]:
        """The KV heads, each once, rising."""
        return tuple(sorted({head for head in self.keys if head is not None}))

    @property
    def parts(self) -> tuple[HeadRange, ...]:
        """By member, the index of its KV head in `heads`."""
        places = {head: (at, at + 1) for at, head in enumerate(self.heads)}
        return tuple(NO_HEADS if head is None else places[head] for head in self.keys)

    def widths(self, turn: int) -> tuple[int, ...]:
        """Return each member's number of query heads in a turn."""
        return tuple(b - a for a, b in self.queries[turn])


@lru_cache(maxsize=256)
def key_groups(query: int, kv: int, members: int, at_once: int) -> tuple[KeyGroup, ...]:
    """Return the groups of query heads and KV heads over the members of a Ulysses group, in order.

    at_once: how many query heads of a KV head are computed at once.
    """
    per_kv, split = query // kv, split_heads(query, kv, members)
    found = []
    for slot in range(max(last - first for first, last in split.kv)):
        keys: list[int | None] = []
        mine: list[HeadRange] = []
        for (q0, q1), (k0, k1) in zip(split.query, split.kv, strict=True):
            head = k0 + slot if k0 + slot < k1 else None
            keys.append(head)
            if head is None:
                mine.append(NO_HEADS)
            else:
                mine.append((max(q0, head * per_kv), min(q1, (head + 1) * per_kv)))
        most = max(b - a for a, b in mine)
        turns = [
            tuple((min(a + first, b), min(a + first + at_once, b)) for a, b in mine)
            for first in range(0, most, at_once)
        ]
        found.append(KeyGroup(tuple(keys), tuple(turns)))
    return tuple(found)


def key_ranges(keys: int, members: int) -> list[HeadRange]:
    """Return the key heads that a layer with a state works on at a time: one for each member of a
    Ulysses group, or, with fewer key heads than members, all of them."""
    return [(first, min(first + members, keys)) for first in range(0, keys, members)]


def turns_of(query: int, kv: int, members: int, at_once: int) -> int:
    """Return in how many turns the busiest member of a Ulysses group computes attention."""
    groups = key_groups(query, kv, members, at_once)
    turns = [one.widths(turn) for one in groups for turn in range(len(one.queries))]
    return max(sum(width > 0 for width in of_member) for of_member in zip(*turns, strict=True))


def head_shapes(heads: Heads, layout: Layout, at_once: int | None = None) -> list[Heads]:
    """Return the heads of the attention calls that ranks make, each combination once.

    heads: the model's. at_once: query heads of a KV head in one call; None: all heads are.
    """
    query, kv, dim = heads.on(layout.mesh_columns)
    if at_once:
        groups = key_groups(query, kv, layout.ulysses, min(at_once, query // kv))
        turns = (one.widths(turn) for one in groups for turn in range(len(one.queries)))
        return [Heads(width, 1, dim) for width in sorted({*chain(*turns)} - {0})]
    calls = split_heads(query, kv, layout.ulysses).calls(query // kv)
    return [Heads(query, kv, dim) for query, kv in sorted(calls)]

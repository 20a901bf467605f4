"""Which heads each member of a Ulysses group attends with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, pairwise

from uspft.blocks import HeadRange


@dataclass(frozen=True)
class HeadSplit:
    """Which heads each member of a Ulysses group attends with.

    query: consecutive query heads, as even as their number allows. kv: the KV heads those need, so
    a KV head stands with several members where its query heads do, and their gradients add up.
    """

    query: tuple[HeadRange, ...]
    kv: tuple[HeadRange, ...]

    def groups(self, member: int, per_kv: int) -> list[tuple[HeadRange, HeadRange]]:
        """A member's heads as (query, KV) ranges, counted from its own first, in which every KV
        head has equally many query heads: what one grouped-query kernel call can take."""
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
        """How many (query, KV) heads kernel calls have, of any member."""
        members = range(len(self.query))
        ranges = chain.from_iterable(self.groups(member, per_kv) for member in members)
        return {(b - a, d - c) for (a, b), (c, d) in ranges}


@lru_cache(maxsize=256)
def split_heads(query: int, kv: int, members: int) -> HeadSplit:
    """Spread query heads over members; with more members than heads, some have none."""
    per_kv = query // kv
    cuts = [i * query // members for i in range(members + 1)]
    queries = tuple(pairwise(cuts))
    keys = tuple((a // per_kv, -(-b // per_kv)) if a < b else (0, 0) for a, b in queries)
    return HeadSplit(queries, keys)

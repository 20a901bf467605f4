"""Which heads each member of a Ulysses group attends with."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, pairwise

from uspft.blocks import HeadRange


@dataclass(frozen=True)
class HeadSplit:
    """The query heads and KV heads of each member of a Ulysses group."""

    query: tuple[HeadRange, ...]
    """Each member's query heads: consecutive ones, as even as their number allows."""
    kv: tuple[HeadRange, ...]
    """The KV heads that each member's query heads need. A KV head stands with several members where
    its query heads do, and their gradients add up."""

    def groups(self, member: int, per_kv: int) -> list[tuple[HeadRange, HeadRange]]:
        """Return a member's heads as (query, KV) ranges, counted from its own first ones.

        In a range every KV head has equally many query heads, which is what one grouped-query
        kernel call can take. per_kv: how many query heads share a KV head in the model.
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
        """Return the numbers of (query, KV) heads that the kernel calls of all members have."""
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

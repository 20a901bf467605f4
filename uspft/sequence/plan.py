"""What one rank computes for one micro-batch, worked out on the host from document bounds alone."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from uspft.batch import Segments
from uspft.kernels import Block, Mask, area

Run = tuple[int, int]
Order = list[tuple[Run, ...]]


@dataclass(frozen=True)
class Plan:
    """One rank's share of a micro-batch's attention.

    tokens: how many tokens each context rank holds. sorting: for each token of the ring rank in
    sequence order, where the Ulysses exchange put it (None: already in order). blocks[j]: queries
    of this ring rank against keys of ring rank j. areas: work of each ring rank, in pairs.
    """

    tokens: tuple[int, ...]
    sorting: tuple[int, ...] | None
    blocks: tuple[tuple[Block, ...], ...]
    areas: tuple[int, ...]


def make_plan(
    rows: Sequence[Segments], orders: Sequence[Order], ulysses: int, ring_index: int
) -> Plan:
    """Plan the attention of a micro-batch: rows[i] is split as orders[i] says.

    The rows are laid end to end: their documents never meet, so a micro-batch is one packed row.
    """
    held = _lay_end_to_end(rows, orders)
    received = [
        [run for runs in held[first : first + ulysses] for run in runs]
        for first in range(0, len(held), ulysses)
    ]
    shares = [sorted(runs) for runs in received]
    documents, offset = [], 0
    for row in rows:
        documents += [(offset + start, offset + stop) for start, stop in row]
        offset += row.length
    table = [
        [tuple(_blocks(mine, theirs, documents, mine is theirs)) for theirs in shares]
        for mine in shares
    ]
    return Plan(
        tokens=tuple(sum(stop - start for start, stop in runs) for runs in held),
        sorting=_sorting(received[ring_index]),
        blocks=tuple(table[ring_index]),
        areas=tuple(sum(map(area, line)) for line in table),
    )


def _lay_end_to_end(rows: Sequence[Segments], orders: Sequence[Order]) -> list[list[Run]]:
    """The runs of each context rank, positions counted through all rows."""
    held: list[list[Run]] = [[] for _ in orders[0]]
    offset = 0
    for row, order in zip(rows, orders, strict=True):
        for runs, mine in zip(order, held, strict=True):
            mine += [(offset + start, offset + stop) for start, stop in runs]
        offset += row.length
    return held


def _sorting(received: list[Run]) -> tuple[int, ...] | None:
    starts = [start for start, _ in received]
    if starts == sorted(starts):
        return None
    places, at = {}, 0
    for start, stop in received:
        places[start, stop] = at
        at += stop - start
    return tuple(
        place
        for start, stop in sorted(received)
        for place in range(places[start, stop], places[start, stop] + stop - start)
    )


class _Share:
    """Sorted runs of one ring rank, with the local index of each position."""

    def __init__(self, runs: list[Run]) -> None:
        self.runs = runs
        self.starts = [start for start, _ in runs]
        self.local = [0]
        for start, stop in runs:
            self.local.append(self.local[-1] + stop - start)

    def before(self, position: int) -> int:
        """Number of held tokens before a position = local index of the first one at or after it."""
        i = bisect_left(self.starts, position)
        if i == 0:
            return 0
        return self.local[i - 1] + min(position, self.runs[i - 1][1]) - self.starts[i - 1]

    def within(self, start: int, stop: int) -> list[Run]:
        """Runs cut to [start, stop), empty ones left out."""
        i = max(bisect_left(self.starts, start) - 1, 0)
        cut = []
        while i < len(self.runs) and self.starts[i] < stop:
            a, b = max(start, self.starts[i]), min(stop, self.runs[i][1])
            if a < b:
                cut.append((a, b))
            i += 1
        return cut


def _blocks(
    mine: list[Run], theirs: list[Run], documents: Sequence[Run], same: bool
) -> list[Block]:
    """Blocks of my queries against their keys; queries never overlap, none is empty.

    A document's tokens on one rank are in order, so its own part is one causal square; of another
    rank's part a run of queries sees the keys before its first position: a prefix, all of it.
    """
    queries, keys = _Share(mine), _Share(theirs)
    blocks: list[Block] = []
    for start, stop in documents:
        first = keys.before(start)
        if same:
            last = queries.before(stop)
            if first < last:
                blocks.append(Block(first, last, first, last, Mask.CAUSAL))
            continue
        for a, b in queries.within(start, stop):
            last = keys.before(a)
            if first == last:
                continue
            q0, q1 = queries.before(a), queries.before(b)
            previous = blocks[-1] if blocks else None
            if previous and (previous.q1, previous.k0, previous.k1) == (q0, first, last):
                blocks[-1] = previous._replace(q1=q1)
            else:
                blocks.append(Block(q0, q1, first, last, Mask.FULL))
    return blocks

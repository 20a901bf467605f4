"""Which positions of a row each rank holds."""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from uspft.segments import Segments
from uspft.sequence.rows.balance import assign
from uspft.sequence.rows.share import Share
from uspft.sequence.rows.spans import Span, cut, tokens_in

Shares = tuple[tuple[Span, ...], ...]
"""The positions that each ring rank holds, those of its Ulysses members together."""


def balanced(
    segments: Segments,
    ulysses: int,
    ring: int,
    *,
    fetches: int = 1,
    window: int | None = None,
    per_host: int | None = None,
) -> list[tuple[Span, ...]]:
    """Return the positions of each context rank, with equal work for every ring rank whatever the
    row's documents and the sliding window.

    One document of which all is seen is split in zigzag: ring rank i holds chunks i and 2R − 1 − i
    of 2R equal ones (USP, algorithm 2); work then grows evenly along it, whatever lies before
    it. Otherwise chunks are dealt out by their work. The Ulysses
    members of a ring rank hold equal consecutive parts of its tokens. fetches: how often keys
    travel. per_host: ring ranks of a host, where more than one host shares the row and keys go
    straight to the ranks that need them. The row's length must be a multiple of 2 · ring · ulysses
    where ring > 1, of ulysses otherwise.
    """
    part = segments.length // (ring * ulysses)
    shares = _shares(segments, ring, ulysses, (fetches, window, per_host))
    return [cut(spans, u * part, (u + 1) * part) for spans in shares for u in range(ulysses)]


@lru_cache(maxsize=4096)  # the rows of a step and of the next
def _shares(
    segments: Segments, ring: int, ulysses: int, how: tuple[int, int | None, int | None]
) -> Shares:
    """Return the positions of each ring rank. how: fetches, window and per_host of `balanced`."""
    fetches, window, per_host = how
    length = segments.length
    if ring == 1:
        return (((0, length),),)
    if segments.bounds[1:] == (length,) and (window is None or window >= length + segments.before):
        chunk, mirror = length // (2 * ring), 2 * ring - 1
        shares: Shares = tuple(
            ((i * chunk, (i + 1) * chunk), ((mirror - i) * chunk, (mirror - i + 1) * chunk))
            for i in range(ring)
        )
    else:
        assignment = assign(segments, ring, ulysses, fetches, window)
        shares = tuple(assignment.spans(rank) for rank in range(ring))
    return shares if per_host is None else _by_hosts(shares, segments, window, per_host)


def _by_hosts(shares: Shares, segments: Segments, window: int | None, per_host: int) -> Shares:
    """Return the shares after swaps between ranks that lower what the busiest host's link carries
    one way."""
    share = Share([segments], [list(shares)], (1, 0), window)
    ranks = range(len(shares))
    sent = np.array(
        [[tokens_in(share.parcel(i, j)) if i != j else 0 for i in ranks] for j in ranks]
    )
    order = list(ranks)
    best = _busiest_link(sent, order, per_host)
    better = True
    while better:
        better = False
        for a, b in combinations(ranks, 2):
            trial = order.copy()
            trial[a], trial[b] = trial[b], trial[a]
            found = _busiest_link(sent, trial, per_host)
            if found < best:
                best, order, better = found, trial, True
    return tuple(shares[share] for share in order)


def _busiest_link(sent: NDArray[np.int64], order: list[int], per_host: int) -> tuple[int, int]:
    """Return the tokens in or out of the busiest host, and those between all hosts.

    sent[j, i]: tokens that share j sends to share i. order: the share that each ring rank has.
    """
    hosts = len(order) // per_host
    placed = sent[np.ix_(order, order)].reshape(hosts, per_host, hosts, per_host).sum((1, 3))
    np.fill_diagonal(placed, 0)
    return max(int(placed.sum(axis).max()) for axis in (0, 1)), int(placed.sum())

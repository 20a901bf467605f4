"""Which positions of a row each rank holds."""

from __future__ import annotations

from collections.abc import Sequence

from uspft.batch import Segments
from uspft.sequence.balance import assign
from uspft.sequence.regions import Run


def balanced(
    segments: Segments, ulysses: int, ring: int, fetches: int = 1, window: int | None = None
) -> list[tuple[Run, ...]]:
    """Equal work for every ring rank, whatever the row's documents and the sliding window.

    One document, all of it seen: zigzag, ring rank i holds chunks i and 2R − 1 − i of 2R equal ones
    (USP, algorithm 2). Else chunks are dealt out by their work. The Ulysses members of a ring rank
    hold equal consecutive parts of its tokens. length must be a multiple of 2 · ring · ulysses
    where ring > 1, of ulysses otherwise.
    """
    length = segments.length
    if ring == 1:
        shares: list[Sequence[Run]] = [((0, length),)]
    elif segments.bounds[1:] == (length,) and (window is None or window >= length):
        chunk = length // (2 * ring)
        mirror = 2 * ring - 1
        shares = [
            [(i * chunk, (i + 1) * chunk), ((mirror - i) * chunk, (mirror - i + 1) * chunk)]
            for i in range(ring)
        ]
    else:
        assignment = assign(segments, ring, ulysses, fetches, window)
        shares = [assignment.runs(rank) for rank in range(ring)]
    part = length // (ring * ulysses)
    return [_cut(runs, u * part, (u + 1) * part) for runs in shares for u in range(ulysses)]


def _cut(runs: Sequence[Run], first: int, last: int) -> tuple[Run, ...]:
    """Tokens [first, last) of runs laid end to end, neighbours joined."""
    cut: list[Run] = []
    at = 0
    for start, stop in runs:
        a, b = max(first, at), min(last, at + stop - start)
        if a < b:
            piece = (start + a - at, start + b - at)
            if cut and cut[-1][1] == piece[0]:
                piece = (cut.pop()[0], piece[1])
            cut.append(piece)
        at += stop - start
    return tuple(cut)

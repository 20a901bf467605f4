"""Which positions of a row each rank holds."""

from __future__ import annotations

Run = tuple[int, int]


def zigzag(length: int, ulysses: int, ring: int) -> list[tuple[Run, ...]]:
    """Causally balanced order: ring rank i holds chunks i and 2R − 1 − i of 2R equal ones.

    Its Ulysses members hold equal consecutive parts of that (USP, algorithm 2). length must be a
    multiple of 2 · ring · ulysses where ring > 1, of ulysses otherwise.
    """
    order = []
    for i in range(ring):
        chunk = length // (2 * ring)
        mirrored = 2 * ring - 1 - i
        runs = [(i * chunk, (i + 1) * chunk), (mirrored * chunk, (mirrored + 1) * chunk)]
        if ring == 1:
            runs = [(0, length)]
        part = length // (ring * ulysses)
        order += [_cut(runs, u * part, (u + 1) * part) for u in range(ulysses)]
    return order


def _cut(runs: list[Run], first: int, last: int) -> tuple[Run, ...]:
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

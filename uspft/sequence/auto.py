"""`context_parallel_algo: auto`: the split that spends least time on the wire, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from uspft.batch import Segments
from uspft.sequence.algorithm import Algorithm, Heads
from uspft.sequence.planned import Planned
from uspft.sequence.ulysses import Ulysses

INSIDE, BETWEEN = 450e9, 50e9
"""Bytes a second that a GPU can send, inside its host (NVLink 4) and to another (400 Gbit/s)."""
SIMPLER = 1.5
"""Ulysses computes a head's row in one call, without merging: it may take so many times as long."""
ELEMENT_BYTES = 2


class Choice(NamedTuple):
    """A recipe's `context_parallel_algo` and `ulysses_degree_in_cp`, and why."""

    algorithm: str
    ulysses: int | None
    why: str


class Work(NamedTuple):
    """What costs depend on beside heads: documents of some rows of the run, the sliding window of
    each attention layer (None: it sees all), and whether received keys stay for the backward."""

    rows: Sequence[Segments]
    windows: Sequence[int | None] = (None,)
    keep: bool = True


def recommend(ranks: int, per_host: int, heads: Heads | None, work: Work | None) -> Choice:
    """The algorithm for `ranks` that share a row.

    per_host: how many of them are on one host, where links are fast. heads: None where the model is
    not known yet. work: None where the data has not been read.
    """
    inside = min(ranks, per_host)
    fits = [
        u
        for u in range(1, inside + 1)
        if inside % u == ranks % u == 0 and heads and heads.query % u == heads.kv % u == 0
    ]
    if heads is None or work is None:
        ulysses = max(fits, default=1) if ranks > inside else 1
        unknown = "the model's heads" if heads is None else "the documents' lengths"
        why = f"only keys that attention needs travel; {unknown}, not known yet, may change this"
        return Choice(Planned.name, ulysses, why)
    window = work.windows[0] if len(set(work.windows)) == 1 else None
    splits: list[Algorithm] = [
        Planned(
            ranks // u,
            u,
            keep=work.keep,
            window=window,
            per_host=ring_ranks_of_a_host(inside, u, ranks // u),
        )
        for u in fits
        if u < ranks
    ]
    if ranks in fits:
        splits.append(Ulysses(ranks))
    splits = [s for s in splits if not s.problems(work.rows[0].length, heads)] or splits
    seconds = {split: _seconds(split, inside, heads, work) for split in splits}
    best = min(splits, key=lambda split: seconds[split])
    simple = splits[-1]
    if simple.ring == 1 and seconds[simple] <= SIMPLER * seconds[best]:
        best = simple
    if best.ring == 1:
        return Choice(Ulysses.name, None, _why_heads(best, seconds))
    return Choice(Planned.name, best.ulysses, _why_tokens(best, seconds, inside, heads))


def ring_ranks_of_a_host(processes: int, divisor: int, ring: int) -> int | None:
    """Neighbours in the ring that one host of so many processes holds; None where it holds all of
    them, or where hosts would hold unequal parts. divisor: processes of one ring rank."""
    here, left = divmod(processes, divisor)
    return here if not left and 1 < here < ring and ring % here == 0 else None


def _seconds(split: Algorithm, inside: int, heads: Heads, work: Work) -> float:
    """On the wire for a layer of one row, forward and backward: heads stay inside a host."""
    across = BETWEEN if split.ulysses * split.ring > inside else INSIDE
    layers = Counter(work.windows)
    total = 0.0
    for row in work.rows:
        for window, count in layers.items():
            cost = split.cost(row, heads, ELEMENT_BYTES, window)
            total += count * (cost.all_to_all.bytes / INSIDE + cost.gather.bytes / across)
    return total / (len(work.rows) * len(work.windows))


def _why_heads(best: Algorithm, seconds: dict[Algorithm, float]) -> str:
    others = [seconds[split] for split in seconds if split is not best]
    if not others:
        return "no other split fits the row's length"
    ratio = seconds[best] / min(others)
    return f"heads divide on one host, at {ratio:.2g} × the time on the wire of splitting tokens"


def _why_tokens(best: Algorithm, seconds: dict[Algorithm, float], inside: int, heads: Heads) -> str:
    ranks = best.ulysses * best.ring
    where = f"heads {best.ulysses} × tokens {best.ring}" if best.ulysses > 1 else "tokens alone"
    why = f"split over {where}, these documents take the least time on the wire"
    if ranks > inside:
        return f"{why}, {ranks // inside} hosts sharing a row"
    if heads.kv % ranks:
        return f"{why}; {heads.kv} KV heads do not divide by {ranks}"
    return why

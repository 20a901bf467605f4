"""The choice of `context_parallel_algo: auto`: the split with least time on the wire, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple, cast

from uspft.config.algorithms import CONTEXT, AlgorithmRow, Splits
from uspft.layout import Layout, ring_ranks_of_a_host
from uspft.planner.attention_work import attention_of_row
from uspft.planner.machine import Hardware
from uspft.planner.wire import wire_of
from uspft.segments import Segments
from uspft.sequence import ONCE, Algorithm, Forwards, Heads, make_algorithm

MAX_TIMES_SLOWER = 1.5
"""How many times the least time on the wire a split of heads alone may take and still be chosen.

The reason is that it computes a head's row in one call, without merging.
"""
ELEMENT_BYTES = 2


class Choice(NamedTuple):
    """A choice of `context_parallel_algo` and `ulysses_degree_in_cp`, and the reason for it."""

    algorithm: str
    ulysses: int | None
    why: str


class Work(NamedTuple):
    """The facts of a run, beside its heads, on which costs depend."""

    rows: Sequence[Segments]
    """The documents of some rows of the run."""
    windows: Sequence[int | None] = (None,)
    """The sliding window of each attention layer; None where the layer sees all keys."""
    keep: bool = True
    """Whether received keys stay for the backward."""
    forwards: Forwards = ONCE
    """How often a layer makes the transfers of its forward."""


class Way(NamedTuple):
    """An algorithm of the table that `auto` may choose, at degrees that fit."""

    row: AlgorithmRow
    algorithm: Algorithm


def recommend(
    ranks: int,
    per_host: int,
    heads: Heads | None,
    work: Work | None,
    hardware: Hardware | None,
) -> Choice:
    """Return the choice of an algorithm for `ranks` that share a row.

    per_host: how many of them are on one host, where links are fast. heads: None where the model is
    not known yet. work: None where the data has not been read. hardware: None where nobody has said
    what the links are.
    """
    inside = min(ranks, per_host)
    fits = [
        u
        for u in range(1, inside + 1)
        if inside % u == ranks % u == 0 and heads and heads.query % u == heads.kv % u == 0
    ]
    if heads is None or work is None or hardware is None:
        likely = next(row for row in _automatic() if row.splits is Splits.BOTH)
        ulysses = max(fits, default=1) if ranks > inside else 1
        unknown = "the documents' lengths" if heads else "the model's heads"
        why = f"only keys that attention needs travel; {unknown}, not known yet, may change this"
        return Choice(likely.name, ulysses, why)
    ways = [way for row in _automatic() for way in _ways(row, ranks, inside, fits, work)]
    length = work.rows[0].length
    ways = [way for way in ways if not way.algorithm.problems(length, heads)] or ways
    links = hardware.model_copy(update={"ranks_per_host": inside})
    seconds = {way: _seconds(way.algorithm, links, heads, work) for way in ways}
    best = min(ways, key=lambda way: seconds[way])
    simple = next((way for way in ways if way.algorithm.ring == 1), None)
    if simple and seconds[simple] <= MAX_TIMES_SLOWER * seconds[best]:
        best = simple
    if best.algorithm.ring == 1:
        return Choice(best.row.name, None, _why_heads(best, seconds))
    why = _why_tokens(best.algorithm, inside, heads)
    return Choice(best.row.name, best.algorithm.ulysses, why)


def _automatic() -> list[AlgorithmRow]:
    return [row for row in CONTEXT.values() if row.automatic]


def _ways(row: AlgorithmRow, ranks: int, inside: int, fits: Sequence[int], work: Work) -> list[Way]:
    """Return a row of the table at each Ulysses degree that fits.

    A split of heads alone is left to the algorithms that only split heads. inside: ranks that one
    host holds. fits: the Ulysses degrees that divide heads and hosts' ranks.
    """
    degrees = {
        Splits.HEADS: [u for u in fits if u == ranks],
        Splits.TOKENS: [1],
        Splits.BOTH: [u for u in fits if u < ranks],
    }[row.splits]
    window = work.windows[0] if len(set(work.windows)) == 1 else None
    found = []
    for ulysses in degrees:
        layout = Layout(ulysses=ulysses, ring=ranks // ulysses)
        per_host = ring_ranks_of_a_host(inside, layout)
        algorithm = make_algorithm(
            row, ulysses, layout.ring, keep=work.keep, window=window, per_host=per_host
        )
        found.append(Way(row, algorithm))
    return found


def _seconds(split: Algorithm, links: Hardware, heads: Heads, work: Work) -> float:
    """Return the seconds on the wire for a layer of one row, forward and backward.

    They are a mean over the rows and layers of `work`; heads are exchanged inside a host.
    """
    layout = Layout(ulysses=split.ulysses, ring=split.ring)
    layers = Counter(work.windows)
    total = 0.0
    for row in work.rows:
        for window, count in layers.items():
            found = attention_of_row(cast("Hashable", split), row, heads, ELEMENT_BYTES, window)
            again = wire_of(found.forward, layout, links)
            back = wire_of(found.backward, layout, links)
            there = work.forwards.heads * again.all_to_all
            there += work.forwards.keys * (again.ring + again.gather)
            total += count * (there + back.seconds)
    return total / (len(work.rows) * len(work.windows))


def _why_heads(best: Way, seconds: dict[Way, float]) -> str:
    others = [seconds[way] for way in seconds if way is not best]
    if not others:
        return "no other split fits the row's length"
    ratio = seconds[best] / min(others)
    return f"heads divide on one host, at {ratio:.2g} × the time on the wire of splitting tokens"


def _why_tokens(best: Algorithm, inside: int, heads: Heads) -> str:
    ranks = best.ulysses * best.ring
    where = f"heads {best.ulysses} × tokens {best.ring}" if best.ulysses > 1 else "tokens alone"
    why = f"split over {where}, these documents take the least time on the wire"
    if ranks > inside:
        return f"{why}, {ranks // inside} hosts sharing a row"
    if heads.kv % ranks:
        return f"{why}; {heads.kv} KV heads do not divide by {ranks}"
    return why

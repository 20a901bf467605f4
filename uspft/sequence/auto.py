"""`context_parallel_algo: auto`: an algorithm by rules, and the reason in one sentence."""

from __future__ import annotations

from typing import NamedTuple

from uspft.sequence.algorithm import Heads


class Choice(NamedTuple):
    """A recipe's `context_parallel_algo` and `ulysses_degree_in_cp`, and why."""

    algorithm: str
    ulysses: int | None
    why: str


def recommend(ranks: int, per_host: int, heads: Heads | None, *, packed: bool) -> Choice:
    """The algorithm for `ranks` that share a row.

    per_host: how many of them are on one host, where links are fast. heads: None where the model is
    not known yet. packed: rows hold documents of many lengths, so most keys need not travel.
    """
    inside = min(ranks, per_host)
    fits = [
        u
        for u in range(1, inside + 1)
        if ranks % u == 0 and inside % u == 0 and heads and heads.query % u == heads.kv % u == 0
    ]
    ulysses = max(fits, default=1)
    if not packed and ulysses == ranks:
        why = "rows are one document and heads divide on one host, so heads are the cheapest split"
        return Choice("ulysses_cp", None, why)
    if ranks <= per_host and packed:
        why = "rows are packed on one host: only keys that attention needs travel"
        return Choice("planned_cp", 1, why)
    if ranks <= per_host:
        why = f"{heads.kv} KV heads do not divide by {ranks}" if heads else "heads are not known"
        return Choice("planned_cp", ulysses, f"{why}, so tokens are split too")
    where = f"heads inside a host ({ulysses} ways), needed keys between hosts"
    return Choice("planned_cp", ulysses, where)

"""The README's table names every algorithm, and what it says beside it is so."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest

from uspft.batch import Segments
from uspft.sequence import ALGORITHMS, Heads, choose

README = (Path(__file__).parents[2] / "README.md").read_text()


class Line(NamedTuple):
    """A line of the table, without the algorithm's name."""

    split: str
    legal: str
    megatron: str


def table() -> dict[str, Line]:
    pattern = r"^\| (?:`(\w+)`|– \(`context_parallel: 1`\)) \| (.*) \| (.*) \| (\S+) \|$"
    rows = re.findall(pattern, README, re.M)
    return {name or "whole": Line(*rest) for name, *rest in rows if name != "auto"}


def test_the_table_is_the_registry() -> None:
    found = {name: line.megatron for name, line in table().items()}
    assert found == {name: cls.megatron_name for name, cls in ALGORITHMS.items()}
    assert len(found) == 6


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_is_split_shows_in_what_is_sent(name: str) -> None:
    degrees = {"ulysses_cp": (4, 1), "ring_cp": (1, 4), "allgather_cp": (1, 4), "whole": (1, 1)}
    algorithm = choose(name, *degrees.get(name, (2, 2)))
    assert algorithm.name == name
    cost = algorithm.cost(Segments.single(64), Heads(8, 4, 16), 2)
    split = table()[name].split
    assert split.startswith("heads") == (cost.all_to_all > 0)
    assert ("tokens" in split) == (cost.ring + cost.gather > 0)
    assert ("keys and values travel" in split) == (name in ("ring_cp", "planned_cp"))
    assert split.startswith("nothing") == (name == "whole")


def heads_fit(ulysses: int, heads: Heads) -> bool:
    return heads.query % ulysses == 0 and heads.kv % ulysses == 0


# What each phrase of the column means, for a row and heads at Ulysses × ring degrees.
LEGAL: dict[str, Callable[[int, Heads, int, int], bool]] = {
    "`context_parallel` divides query and KV heads": lambda row, heads, u, r: heads_fit(u, heads),
    "2 · `context_parallel` divides the row": lambda row, heads, u, r: row % (2 * r) == 0,
    "both of the above, each for its part": lambda row, heads, u, r: (
        heads_fit(u, heads) and row % (2 * u * r) == 0
    ),
    "always": lambda row, heads, u, r: True,
}
SAME = {"as `ring_cp`": "ring_cp", "as `hybrid_cp`": "hybrid_cp"}
DEGREES = {
    "whole": [(1, 1)],
    "ulysses_cp": [(2, 1), (3, 1), (4, 1), (8, 1)],
    "ring_cp": [(1, 2), (1, 3), (1, 4)],
    "allgather_cp": [(1, 2), (1, 3), (1, 4)],
    "hybrid_cp": [(2, 2), (3, 2), (2, 3), (4, 4)],
    "planned_cp": [(2, 2), (3, 2), (2, 3), (4, 4)],
}
ROWS = (48, 64, 72, 96, 240)
HEADS = (Heads(8, 2, 16), Heads(8, 8, 16), Heads(6, 3, 16), Heads(16, 4, 16))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_it_is_legal_where_the_table_says(name: str) -> None:
    lines = table()
    phrase = lines[name].legal
    allowed = LEGAL[lines[SAME[phrase]].legal if phrase in SAME else phrase]
    seen = set()
    for row, heads, (ulysses, ring) in product(ROWS, HEADS, DEGREES[name]):
        if name == "ulysses_cp" and row % ulysses:
            continue  # a row that its ranks cannot share equally is no matter of heads
        legal = not choose(name, ulysses, ring).problems(row, heads)
        assert legal == allowed(row, heads, ulysses, ring), (row, heads, ulysses, ring)
        seen.add(legal)
    assert seen == ({True} if name == "whole" else {True, False}), "both must have come up"

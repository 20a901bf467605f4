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
    assert split.startswith("heads") == (cost.all_to_all.bytes > 0)
    assert ("tokens" in split) == (cost.ring.bytes + cost.gather.bytes > 0)
    assert ("keys and values travel" in split) == (name in ("ring_cp", "planned_cp"))
    assert split.startswith("nothing") == (name == "whole")


# What each phrase of the column means, for a row at Ulysses × ring degrees.
LEGAL: dict[str, Callable[[int, int, int], bool]] = {
    "`context_parallel` divides the row": lambda row, u, r: row % (u * r) == 0,
    "2 · `context_parallel` divides the row": lambda row, u, r: row % (2 * u * r) == 0,
    "`context_parallel` divides the row, twice where tokens are split": lambda row, u, r: (
        row % (u * r * (2 if r > 1 else 1)) == 0
    ),
    "always": lambda row, u, r: True,
}
SAME = {"as `ring_cp`": "ring_cp", "as `hybrid_cp`": "hybrid_cp"}
DEGREES = {
    "whole": [(1, 1)],
    "ulysses_cp": [(2, 1), (3, 1), (5, 1), (8, 1)],
    "ring_cp": [(1, 2), (1, 3), (1, 4)],
    "allgather_cp": [(1, 2), (1, 3), (1, 4)],
    "hybrid_cp": [(2, 2), (3, 2), (2, 3), (4, 4), (16, 1)],
    "planned_cp": [(2, 2), (3, 2), (2, 3), (4, 4), (16, 1)],
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
        legal = not choose(name, ulysses, ring).problems(row, heads)
        assert legal == allowed(row, ulysses, ring), (row, heads, ulysses, ring)
        seen.add(legal)
    assert seen == ({True} if name == "whole" else {True, False}), "both must have come up"

"""Whether what rows use of a parameter lies inside what ranks hold, and who is told where not."""

from __future__ import annotations

import pytest

from uspft.config.degrees import Strategy
from uspft.layout import Layout
from uspft.parameters.shards import MatrixSplit, Shards
from uspft.parameters.used import outside
from uspft.prepare.model import inside_findings


def held(ways: int, heads: int) -> Shards:
    """A projection of so many heads of 4 features, and a matrix that any degree divides."""
    splits = {"k": MatrixSplit(0, (4 * heads,), (heads,)), "up": MatrixSplit(0, (96,))}
    return Shards(Layout(ways), splits)


@pytest.mark.parametrize(
    ("ways", "heads", "degree"),
    [(1, 2, 8), (2, 2, 8), (2, 4, 4), (3, 6, 6), (3, 12, 12), (4, 2, 8), (2, 2, 2)],
)
def test_parts_of_degrees_that_divide_heads_lie_inside(ways: int, heads: int, degree: int) -> None:
    """Also where several ranks share a head, and where a degree is no power of two."""
    assert outside(held(ways, heads), degree) is None


def test_heads_that_a_degree_does_not_divide_lie_in_two_parts() -> None:
    """Of three heads on two ranks the first rank holds one, and at 8 ways its fourth part is of the
    second head."""
    assert outside(held(2, 3), 8) == "k"
    assert outside(held(2, 4), 8) is None


def test_the_strategies_are_named_with_what_can_be_done() -> None:
    every = [Strategy(max_length=64, model_parallel=degree) for degree in (2, 2, 8)]
    ((key, what, remedy),) = inside_findings(every, held(2, 3))
    assert key == "parallel_config.strategies[2].model_parallel"
    assert what.startswith(
        "is 8, and its parts of k do not lie inside those of parallel_config.str"
    )
    assert what.endswith("strategies[0], 2 ways") and remedy.startswith("write switching: move")
    assert inside_findings(every, held(2, 4)) == []

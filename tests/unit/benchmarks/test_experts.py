"""Tables of experts, what is wrong in them, and what is counted where it is quickly."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from benchmarks.experts.counted import (
    DEGREES,
    ZERO_BYTES,
    Point,
    crossing,
    expert_parameters,
    formula,
    token_cost,
)
from benchmarks.experts.figures import (
    bytes_table,
    crossing_table,
    disagreements,
    figures,
    memory_table,
    problems,
)
from benchmarks.experts.measured import HostsCase
from benchmarks.lab.results import RESULTS, read
from tests.support.shapes import hub

MODEL = "Qwen/Qwen3-30B-A3B"


def points() -> list[Point]:
    """What the formula says, as if it had been counted."""
    shape, found = hub(MODEL), []
    for tokens in (4096, 65_536):
        for degree in DEGREES:
            sent = round(tokens * token_cost(shape, 2, degree, 2)) if degree > 1 else 0
            copies = 8 // degree
            matrices = expert_parameters(shape) / degree
            zero = ZERO_BYTES * matrices * (copies - 1) / copies
            found.append(Point(MODEL, tokens, degree, sent, zero, 1 << 30, 1 << 30, 1 << 29))
    return found


def test_lines_cross_where_the_formula_says() -> None:
    every = points()
    assert problems(every) == []
    for degree in DEGREES[1:]:
        own = [one for one in every if one.experts in (1, degree)]
        assert crossing(own) == pytest.approx(formula(MODEL, degree), rel=1e-3)
    dear = [replace(one, dispatch_bytes=2 * one.dispatch_bytes) for one in every]
    assert len(problems(dear)) == 3
    full = [replace(one, live_bytes=2 * one.live_bytes) for one in every]
    assert len(problems(full)) == len(every)


def test_tables_mark_what_sends_least() -> None:
    few, many = bytes_table(points()).splitlines()[2:]
    assert few.startswith("| Qwen3-30B-A3B | 4k | 3.94 | ") and few.endswith("** |")
    assert "| 3.94 | **2.94** |" in many
    assert memory_table(points()).splitlines()[2].count("1.00 + 0.50") == 4
    assert crossing_table(points()).count(" / ") == 4


def hosts(*pairs: tuple[float, float]) -> dict[str, Any]:
    degrees = {
        name: {"rounds": [[measured, measured]], "predicted": predicted}
        for name, (measured, predicted) in zip(("a", "b", "c"), pairs, strict=True)
    }
    return {"case": asdict(HostsCase()), "degrees": degrees}


def test_an_order_that_is_apart_and_another_is_told() -> None:
    assert disagreements(hosts((1.0, 1.0), (2.0, 3.0), (2.1, 2.0))) == []
    assert disagreements(hosts((1.0, 1.0), (2.0, 0.5), (3.0, 4.0))) == ["a and b"]


def test_what_is_kept_is_as_predicted() -> None:
    result = read(RESULTS, "experts")
    kept = [Point(**one) for one in result["counted"]]
    assert len({(one.model, one.tokens, one.experts) for one in kept}) == 3 * 6 * 4
    assert problems(kept) == []
    shown = figures(result)
    assert "tokens for E 2, 4 and 8" in shown["choice"]
    if "hosts" in result:
        assert disagreements(result["hosts"]) == []

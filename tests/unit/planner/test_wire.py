"""Seconds on the wire follow from an algorithm's own count of bytes and messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.algorithms import named
from tests.support.hardware import made
from uspft.layout import Layout
from uspft.planner.wire import wire_of
from uspft.segments import Segments
from uspft.sequence import Cost, Heads, Traffic

HEADS = Heads(8, 4, 16)
ROW = Segments.single(1 << 12)


def test_each_kind_has_its_seconds(tmp_path: Path) -> None:
    cost = Cost(Traffic(4 * 10**9, 12), Traffic(10**9, 6), Traffic(10**9, 6))
    inside = wire_of(cost, Layout(ulysses=2, ring=2), made(tmp_path))
    assert inside["all_to_all"].seconds == pytest.approx(2 * (1e-3 + 1e-4) + 4.0)
    assert inside["ring"].seconds == pytest.approx(6 * 1.1e-3 + 1.0)
    assert inside["gather"].seconds == pytest.approx(2e-3 + 6e-4 + 1.0)
    three = wire_of(cost, Layout(ulysses=2, ring=2), made(tmp_path), rows=3)["ring"]
    assert (three.seconds, three.bytes) == (pytest.approx(6 * 1.1e-3 + 3.0), 3 * 10**9)
    across = wire_of(cost, Layout(ulysses=4, ring=2), made(tmp_path))
    # Heads stay on the host, keys do not.
    assert across["ring"].seconds == pytest.approx(6 * 2.2e-3 + 10.0)
    assert across["all_to_all"].seconds == pytest.approx(2 * (1e-3 + 3e-4) + 4.0)


@pytest.mark.parametrize(
    ("name", "ulysses", "ring", "kinds"),
    [
        ("ulysses_cp", 4, 1, {"all_to_all"}),
        ("ring_cp", 1, 4, {"ring"}),
        ("hybrid_cp", 2, 2, {"all_to_all", "ring"}),
        ("allgather_cp", 1, 4, {"gather"}),
        ("planned_cp", 2, 2, {"all_to_all", "gather"}),
        ("whole", 1, 1, set()),
    ],
)
def test_what_an_algorithm_sends_takes_time(
    name: str, ulysses: int, ring: int, kinds: set[str], tmp_path: Path
) -> None:
    cost = named(name, ulysses, ring).cost(ROW, HEADS, 2)
    found = wire_of(cost, Layout(ulysses=ulysses, ring=ring), made(tmp_path))
    assert {kind for kind, part in found.items() if part.seconds} == kinds


@pytest.mark.parametrize(
    ("name", "ring", "arrivals"),
    [("ring_cp", 4, 3), ("allgather_cp", 4, 1), ("planned_cp", 8, 7), ("planned_cp", 2, 4)],
)
def test_in_how_many_steps_keys_come(name: str, ring: int, arrivals: int) -> None:
    assert named(name, 1, ring).cost(ROW, HEADS, 2).arrivals == arrivals

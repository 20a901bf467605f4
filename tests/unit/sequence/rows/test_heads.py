"""Groups of heads: each query head is attended with once, beside its own KV head."""

from __future__ import annotations

import pytest

from tests.support.algorithms import named
from uspft.segments import Segments
from uspft.sequence import FORWARDS, Heads
from uspft.sequence.rows.heads import key_groups, split_heads, turns_of

KINDS = [(32, 8, 8, 1), (32, 8, 8, 4), (32, 8, 2, 3), (9, 3, 2, 2), (4, 1, 4, 1), (6, 3, 4, 1)]
KINDS += [(28, 4, 8, 2), (2, 1, 4, 1), (8, 8, 1, 1)]


@pytest.mark.parametrize(("query", "kv", "members", "at_once"), KINDS)
def test_each_query_head_is_attended_with_once(
    query: int, kv: int, members: int, at_once: int
) -> None:
    whole, met = split_heads(query, kv, members), list[int]()
    for group in key_groups(query, kv, members, at_once):
        for turn, ranges in enumerate(group.queries):
            assert max(group.widths(turn)) <= at_once
            for member, (a, b) in enumerate(ranges):
                met += range(a, b)
                first, last = whole.query[member]
                assert a == b or first <= a < b <= last
                if a < b:
                    place, _ = group.parts[member]
                    assert {head * kv // query for head in range(a, b)} == {group.heads[place]}
    assert sorted(met) == [*range(query)]


def test_turns_are_those_of_the_busiest_member() -> None:
    assert turns_of(32, 8, 8, 1) == 4 and turns_of(32, 8, 8, 4) == 1
    assert turns_of(32, 8, 1, 4) == 8 and turns_of(9, 3, 2, 3) == 2


ROW, UNIT = 1 << 14, (1 << 14) * 4096 * 2
LLAMA = Heads(32, 8, 128)


@pytest.mark.parametrize(("at_once", "keys"), [(4, 1), (2, 2), (1, 4)])
def test_keys_travel_once_for_each_turn(at_once: int, keys: int) -> None:
    """Without groups a ring sends what it sends with all query heads of a KV head at once, in an
    eighth of the messages; an exchange of heads 10 tensors of a rank in place of 7½, each less its
    own part, with groups of any number."""
    row, again = Segments.single(ROW), FORWARDS["attention"]
    for name, kind, ulysses in (("ring_cp", "ring", 1), ("planned_cp", "gather", 1)):
        plain = getattr(named(name, ulysses, 8).cost(row, LLAMA, 2, None, again), kind)
        groups = again._replace(at_once=at_once)
        found = getattr(named(name, ulysses, 8).cost(row, LLAMA, 2, None, groups), kind)
        if name == "ring_cp":  # planned keeps what it fetched, where nothing asks it not to
            assert found == (keys * plain.bytes, 8 * keys * plain.messages)
        assert found.bytes >= keys * plain.bytes and found.messages % (8 * keys) == 0
    both = [
        named("ulysses_cp", 8, 1).cost(row, LLAMA, 2, None, one).all_to_all.bytes
        for one in (again, again._replace(at_once=at_once))
    ]
    assert both == [7.5 * 7 / 8 * UNIT / 8, 10 * 7 / 8 * UNIT / 8]

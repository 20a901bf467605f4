"""What is drawn out from a short ring is what dealing to the whole ring gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from tests.support.algorithms import named
from uspft.planner.attention_work import FEW, AttentionWork, attention_of_row
from uspft.segments import Segments
from uspft.sequence import Heads
from uspft.sequence.rows.share import everyones

HEADS = Heads(16, 8, 64)
WAYS = [("ring_cp", 1), ("allgather_cp", 1), ("planned_cp", 1), ("hybrid_cp", 4), ("planned_cp", 4)]


def work(name: str, ulysses: int, ring: int, row: Segments, **changes: Any) -> AttentionWork:
    algorithm = replace(cast("Any", named(name, ulysses, ring)), **changes)
    return attention_of_row(algorithm, row, HEADS, 2, None)


@pytest.mark.parametrize(("name", "ulysses"), WAYS)
@pytest.mark.parametrize("ring", [16, 24, 40])
def test_a_document_on_a_long_ring(name: str, ulysses: int, ring: int) -> None:
    row = Segments.single(2 * ulysses * ring * 64)
    found, algorithm = work(name, ulysses, ring, row), named(name, ulysses, ring)
    assert ring > FEW
    shares = everyones(row, algorithm.token_order(row), ulysses, None)
    assert found.pairs == pytest.approx(max(share.area for share in shares), rel=2e-3)
    whole = algorithm.cost(row, HEADS, 2)
    for kind in ("all_to_all", "ring", "gather"):
        sent = [getattr(cost, kind) for cost in (found.forward, found.backward)]
        want = getattr(whole, kind)
        assert sum(one.bytes for one in sent) == pytest.approx(want.bytes, rel=1e-3)
        assert sum(one.messages for one in sent) == pytest.approx(want.messages, abs=1)
    assert found.forward.arrivals == whole.arrivals


def test_several_documents_are_dealt_out() -> None:
    row = Segments(tuple(range(0, 16 * 128 + 1, 128)), 16 * 128)
    found = work("planned_cp", 1, 16, row)
    whole = named("planned_cp", 1, 16).cost(row, HEADS, 2)
    assert found.forward.gather.bytes + found.backward.gather.bytes == whole.gather.bytes
    assert found.forward.gather.bytes < work("planned_cp", 1, 16, Segments.single(2048)).pairs


def test_gradients_go_home() -> None:
    row = Segments.single(1 << 14)
    assert work("ring_cp", 1, 8, row).home_share == 0.5
    assert work("planned_cp", 1, 8, row, keep=True).home_share == 1.0
    assert work("ulysses_cp", 8, 1, row).home_share == 0.0

"""What the loop counts of a rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from uspft.layout import Layout
from uspft.sequence import Heads
from uspft.training.meter import features_here


@pytest.mark.parametrize(
    ("layout", "share"),
    [
        (Layout(), 1),
        (Layout(4), 1 / 4),
        (Layout(2, ring=2, mesh_rows=2), 1 / 2),
        (Layout(1, ring=16, mesh_rows=16), 1),
        (Layout(2, ulysses=2, ring=2, mesh_rows=4), 1 / 4),
    ],
)
def test_mesh_rows_do_not_divide_heads(layout: Layout, share: float) -> None:
    """Tensor ranks, mesh columns and Ulysses do; 8 query heads with 2 key-value heads."""
    place = SimpleNamespace(size=layout.ulysses, index=0)
    world: Any = SimpleNamespace(layout=layout, mesh=SimpleNamespace(ulysses=place))
    assert features_here(Heads(8, 2, 16), world) == share * 8 * 16

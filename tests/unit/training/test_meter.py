"""What the meter counts of a rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from uspft.layout import Layout
from uspft.training.loop import Meter


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
    heads: Any = SimpleNamespace(num_attention_heads=8, num_key_value_heads=2)
    meter: Any = object.__new__(Meter)
    meter._run = SimpleNamespace(config=heads)
    place = SimpleNamespace(size=layout.ulysses, index=0)
    world = SimpleNamespace(layout=layout, mesh=SimpleNamespace(ulysses=place))
    assert meter._heads_here(world) == share

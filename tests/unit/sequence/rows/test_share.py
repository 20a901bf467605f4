"""What a rank's share says of its own tokens: which document each is in."""

from __future__ import annotations

import numpy as np
import pytest

from uspft.segments import Segments
from uspft.sequence.rows.share import Order, Share

ROWS = [Segments((0, 3, 8), 10), Segments((0,), 4), Segments((0, 1, 6), 6)]
"""The second has padding alone."""
WHOLE = [0, 0, 0, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, 2, 3, 3, 3, 3, 3]


@pytest.mark.parametrize(
    "orders",
    [
        [[((0, 10),)], [((0, 4),)], [((0, 6),)]],
        [[((8, 10), (0, 2)), ((2, 8),)], [((0, 4),), ()], [(), ((3, 6), (0, 3))]],
    ],
)
def test_each_token_knows_its_document(orders: list[Order]) -> None:
    found = np.full(len(WHOLE), -7)
    for index in range(len(orders[0])):
        share = Share(ROWS, orders, (1, index))
        places = [place for start, stop in share.held for place in range(start, stop)]
        found[places] = share.document_of
    assert found.tolist() == WHOLE


def test_rows_of_padding_have_no_document() -> None:
    share = Share([Segments((0,), 4)], [[((0, 4),)]], (1, 0))
    assert share.documents == [] and share.document_of.tolist() == [-1] * 4

"""The next step's token orders are worked out while a step runs."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from uspft.data.loader import StepLoader
from uspft.data.stream import Row
from uspft.layout import Layout
from uspft.segments import Segments


class Stream:
    """Row i is one document of i + 1 tokens; row 4 is broken."""

    def row(self, index: int) -> Row:
        if index == 4:
            raise OSError("the disk is gone")
        zeros = np.zeros(8, np.int64)
        return Row(zeros, zeros, zeros, Segments((0, index + 1), 8), ())


class World:
    """One rank, and which thread asked for the order of which row."""

    layout, replica, device = Layout(), 0, torch.device("cpu")

    def __init__(self) -> None:
        self.algorithm = self
        self.asked: list[tuple[int, str]] = []

    def token_order(self, segments: Segments) -> list[Any]:
        self.asked.append((segments.bounds[-1] - 1, threading.current_thread().name))
        return [((0, 8),)]

    def share(self, rows: Any) -> Any:
        for row in rows:
            self.token_order(row)
        return SimpleNamespace(held=[(0, 8)])


def test_the_next_rows_are_dealt_out_in_another_thread() -> None:
    world: Any = World()
    stream: Any = Stream()
    loader = StepLoader(stream, world, row_tokens=8, rows_per_step=2, rows_per_batch=1)
    assert [batch.rows for batch in loader.batches(1)] == [(0,), (1,)]
    assert [batch.rows for batch in loader.batches(2)] == [(2,), (3,)]
    here = threading.current_thread().name
    assert world.asked[:6] == [
        (0, here),
        (1, here),
        (2, "rows ahead_0"),
        (3, "rows ahead_0"),
        (2, here),
        (3, here),
    ]
    with pytest.raises(OSError, match="the disk is gone"):
        loader.batches(3)

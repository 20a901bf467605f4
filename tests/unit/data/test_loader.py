"""Which tokens of a batch are targets: worked out once, on the host, whatever moves them later."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from uspft.batch import Batch
from uspft.data.loader import EMPTY, StepLoader
from uspft.data.stream import Row
from uspft.layout import Layout
from uspft.segments import Segments
from uspft.verify.inject import label, order

LABELS = np.array([[3, -100, 5, 6, -100, -100, 2, 0], [-100, -100, 9, -100, 8, 7, -100, 1]])


class Stream:
    """Two rows of eight tokens."""

    def row(self, index: int) -> Row:
        zeros = np.zeros(8, np.int64)
        return Row(zeros, LABELS[index], zeros, Segments.single(8), ())


class World:
    """A rank that holds some runs of its rows, laid end to end."""

    layout, replica, device = Layout(), 0, torch.device("cpu")

    def __init__(self, held: list[tuple[int, int]]) -> None:
        self.held = held

    def share(self, rows: Any) -> Any:
        return SimpleNamespace(held=self.held)


def batch(held: list[tuple[int, int]], indices: list[int]) -> Batch:
    stream: Any = Stream()
    world: Any = World(held)
    loader = StepLoader(stream, world, row_tokens=8, rows_per_step=2, rows_per_batch=2)
    return loader.batch(indices)


def targets_of(found: Batch) -> list[int]:
    """The labels that its loss is over, which must be all of them."""
    trained = found.labels[found.chosen].tolist()
    assert trained == [x for x in found.labels.tolist() if x != -100]
    assert found.targets == len(trained)
    return trained


def test_a_rank_s_targets_are_those_of_its_tokens() -> None:
    assert targets_of(batch([(0, 16)], [0, 1])) == [3, 5, 6, 2, 0, 9, 8, 7, 1]
    assert targets_of(batch([(12, 16), (2, 4)], [0, 1])) == [8, 7, 1, 5, 6]
    assert targets_of(batch([(4, 6)], [0, 1])) == targets_of(batch([], [0, 1])) == []
    assert targets_of(batch([(0, 16)], [EMPTY, EMPTY])) == []


def test_faults_that_move_labels_move_the_targets_too() -> None:
    rows, world = [Segments.single(8)] * 2, None
    moved: Any = order(batch([(0, 16)], [0, 1]), world, rows)  # type: ignore[arg-type]
    assert sorted(targets_of(moved)) == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    assert targets_of(moved) != targets_of(batch([(0, 16)], [0, 1]))
    shifted: Any = label(batch([(0, 16)], [0, 1]), world, rows)  # type: ignore[arg-type]
    assert targets_of(shifted) == [5, 6, 2, 0, 9, 8, 7, 1]

"""Batches of a step: which of their tokens are targets, the next step's token orders worked out
while one runs, and the digest of what ranks hold."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from uspft.batch import Batch
from uspft.data.loader import DIGEST, EMPTY, StepLoader, digest, in_documents
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
        self.held, self.algorithm = held, self

    def token_order(self, segments: Segments) -> Any:
        return [self.held]

    def share(self, rows: Any, orders: Any) -> Any:
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


class BrokenStream:
    """Row i is one document of i + 1 tokens; row 4 is broken."""

    def row(self, index: int) -> Row:
        if index == 4:
            raise OSError("the disk is gone")
        zeros = np.zeros(8, np.int64)
        return Row(zeros, zeros, zeros, Segments((0, index + 1), 8), ())


class Asked:
    """One rank, and which thread asked for the order of which row."""

    layout, replica, device = Layout(), 0, torch.device("cpu")

    def __init__(self) -> None:
        self.algorithm = self
        self.asked: list[tuple[int, str]] = []

    def token_order(self, segments: Segments) -> list[Any]:
        self.asked.append((segments.bounds[-1] - 1, threading.current_thread().name))
        return [((0, 8),)]

    def share(self, rows: Any, orders: Any) -> Any:
        assert orders == [[((0, 8),)] for _ in rows]
        return SimpleNamespace(held=[(0, 8)])


def test_the_next_rows_are_dealt_out_in_another_thread() -> None:
    world: Any = Asked()
    stream: Any = BrokenStream()
    loader = StepLoader(stream, world, row_tokens=8, rows_per_step=2, rows_per_batch=1)
    assert [batch.rows for batch in loader.batches(1)] == [(0,), (1,)]
    assert [batch.rows for batch in loader.batches(2)] == [(2,), (3,)]
    here = threading.current_thread().name
    assert world.asked == [(0, here), (1, here), (2, "rows ahead_0"), (3, "rows ahead_0")]
    with pytest.raises(OSError, match="the disk is gone"):
        loader.batches(3)


def test_the_first_rows_are_dealt_out_while_the_model_is_built() -> None:
    world: Any = Asked()
    stream: Any = BrokenStream()
    loader = StepLoader(stream, world, row_tokens=8, rows_per_step=2, rows_per_batch=1)
    loader.begin(1)
    loader.batches(1)
    assert world.asked[:2] == [(0, "rows ahead_0"), (1, "rows ahead_0")]


def test_the_digest_is_of_tokens_at_positions() -> None:
    dice = np.random.default_rng(0)
    held = list(dice.integers(0, 50_000, (3, 1000)))  # ids, labels, positions
    held[1][::3] = -100
    places = np.arange(1000)
    whole = digest(places, held)
    mixed = dice.permutation(1000)
    assert digest(mixed, [x[mixed] for x in held]) == whole
    halves = [digest(part, [x[part] for x in held]) for part in (mixed[:300], mixed[300:])]
    assert sum(halves) % DIGEST == whole
    for broken in held:
        broken[[3, 4]] = broken[[4, 3]]  # two tokens change places
        assert digest(places, held) != whole
        broken[[3, 4]] = broken[[4, 3]]
    assert digest(places, held) == whole


def test_positions_are_counted_in_documents() -> None:
    assert in_documents(Segments((0, 3, 5), 7)).tolist() == [0, 1, 2, 0, 1, 0, 0]

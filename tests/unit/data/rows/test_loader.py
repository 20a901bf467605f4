"""Batches of a step: which of their tokens are targets, the next step's made while one runs, the
digest of what ranks hold; token orders found in a process beside: the same, and none lost."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.support.algorithms import named
from tests.support.hangs import HANG_SECONDS
from tests.support.rows import packed
from uspft.batch import Batch
from uspft.data.rows.loader import (
    DIGEST,
    EMPTY,
    Orders,
    StepLoader,
    digest,
    in_documents,
    searching_beside,
)
from uspft.data.rows.stream import Row
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
        return SimpleNamespace(held=self.held, chunks=None)


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


class Moved(TorchDispatchMode):
    """The elements of the largest tensor that comes to the device, which is not the host."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.is_meta:
                self.most = max(self.most, x.untyped_storage().nbytes() // x.element_size())
        return out


@pytest.mark.parametrize("held", [[(0, 3)], [(2, 4), (12, 16)], [(0, 16)]])
def test_no_more_than_a_rank_s_own_tokens_come_to_the_device(
    held: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(World, "device", torch.device("meta"))
    with Moved() as moved:
        found = batch(held, [0, 1])
    assert moved.most == sum(b - a for a, b in held) == found.tokens.numel()
    assert found.input_ids.is_meta


def test_faults_that_move_labels_move_the_targets_too() -> None:
    rows, world = [Segments.single(8)] * 2, None
    moved: Any = order(batch([(0, 16)], [0, 1]), world, rows)  # type: ignore[arg-type]
    assert sorted(targets_of(moved)) == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    assert targets_of(moved) != targets_of(batch([(0, 16)], [0, 1]))
    shifted: Any = label(batch([(0, 16)], [0, 1]), world, rows)  # type: ignore[arg-type]
    assert targets_of(shifted) == [5, 6, 2, 0, 9, 8, 7, 1]


class Slow:
    """Row i is one document of i + 1 tokens; row 8 is broken. Rows from `held` on wait for a sign.

    It knows which thread read which row.
    """

    def __init__(self, held: int = 99) -> None:
        self.held, self.sign = held, threading.Event()
        self.reached = [threading.Event() for _ in range(16)]
        self.read: list[tuple[int, str]] = []

    def row(self, index: int) -> Row:
        self.read.append((index, threading.current_thread().name))
        self.reached[index].set()
        if index >= self.held:
            assert self.sign.wait(HANG_SECONDS)
        if index == 8:
            raise OSError("the disk is gone")
        zeros = np.zeros(8, np.int64)
        return Row(zeros + index, zeros, zeros, Segments((0, index + 1), 8), ())

    def epochs_after(self, index: int) -> float:
        return (index + 1) / 8


class Rank:
    """One that holds two of a row's eight tokens."""

    layout, replica = Layout(), 0

    def __init__(self, device: str = "cpu") -> None:
        self.algorithm, self.device = self, torch.device(device)

    def token_order(self, segments: Segments) -> list[Any]:
        return [((2, 4),)]

    def share(self, rows: Any, orders: Any) -> Any:
        assert orders == [[((2, 4),)] for _ in rows]
        return SimpleNamespace(held=[(2, 4)], chunks=None)


def loader_of(stream: Any, last: int | None = None, device: str = "cpu") -> StepLoader:
    world: Any = Rank(device)
    sizes = {"row_tokens": 8, "rows_per_step": 2, "rows_per_batch": 1}
    return StepLoader(stream, world, **sizes, last_row=last)


AHEAD = "rows ahead_0"
HERE = threading.current_thread().name


def test_a_step_does_not_wait_for_the_rows_of_the_next() -> None:
    """Whose reading ends only after the step has its own."""
    stream = Slow(held=2)
    loader = loader_of(stream)
    assert [batch.rows for batch in loader.batches(1)] == [(0,), (1,)]
    assert loader.epochs == 2 / 8, "told without a look at the stream, which the thread may be in"
    stream.sign.set()
    assert [batch.rows for batch in loader.batches(2)] == [(2,), (3,)]
    assert stream.read[:4] == [(0, HERE), (1, HERE), (2, AHEAD), (3, AHEAD)]
    assert loader.epochs == 4 / 8


@pytest.mark.parametrize("steps", [1, 2])
def test_one_step_is_made_ahead(steps: int) -> None:
    stream = Slow()
    loader = loader_of(stream)
    loader.begin(1)
    for step in range(1, steps + 1):
        found = loader.batches(step)
    assert stream.reached[2 * steps + 1].wait(HANG_SECONDS)
    loader.close()
    assert [row for row, _ in stream.read] == list(range(2 * steps + 2))
    assert {thread for _, thread in stream.read} == {AHEAD}
    gone = [weakref.ref(batch.input_ids) for batch in found]
    del found
    assert [one() for one in gone] == [None, None], "nothing keeps what a step has had"


def test_nothing_is_made_after_the_last_step() -> None:
    stream = Slow()
    loader = loader_of(stream, last=5)
    rows = [[batch.rows for batch in loader.batches(step)] for step in (1, 2, 3)]
    assert rows == [[(0,), (1,)], [(2,), (3,)], [(4,), (EMPTY,)]]
    loader.begin(4)
    loader.close()
    assert [row for row, _ in stream.read] == [0, 1, 2, 3, 4]


def test_a_fault_is_raised_where_its_step_is_asked_for() -> None:
    loader = loader_of(Slow())
    for step in (3, 4):
        loader.batches(step)
    with pytest.raises(OSError, match="the disk is gone"):
        loader.batches(5)
    with pytest.raises(OSError, match="the disk is gone"):
        loader.batches(5)  # asked again, it is tried again
    loader.batches(4)
    assert [batch.rows for batch in loader.batches(1)] == [(0,), (1,)], "5 was not asked for"


def test_any_order_of_steps_gives_the_same_batches() -> None:
    """As where a run goes on, or an evaluation was stopped and another begins."""
    ahead = loader_of(Slow())
    for step in (1, 2, 3, 1, 1, 4, 2):
        alone = loader_of(Slow())
        for got, want in zip(ahead.batches(step), alone.batches(step), strict=True):
            tensors = {key: x for key, x in vars(want).items() if isinstance(x, torch.Tensor)}
            assert len(tensors) == 6
            assert all(torch.equal(x, getattr(got, key)) for key, x in tensors.items())
            assert (got.rows, got.targets) == (want.rows, want.targets)
        assert ahead.epochs == alone.epochs


def test_a_rank_s_tokens_alone_are_pinned_by_the_thread_and_on_its_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With doubles of what torch does for GPUs."""
    current, pinned, copied = ["none"], [], []

    @contextmanager
    def device(one: torch.device) -> Iterator[None]:
        current.append(str(one))
        yield
        current.pop()

    def pin_memory(x: torch.Tensor) -> torch.Tensor:
        pinned.append((x.numel(), current[-1], threading.current_thread().name))
        return x

    def to(x: torch.Tensor, device: torch.device, non_blocking: bool) -> torch.Tensor:
        copied.append((str(device), non_blocking, threading.current_thread().name))
        return x

    monkeypatch.setattr("torch.cuda.device", device)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    monkeypatch.setattr(torch.Tensor, "to", to)
    loader = loader_of(Slow(), last=2, device="cuda:3")
    loader.begin(1)
    loader.batches(1)
    assert len(pinned) == len(copied) == 2 * 6
    assert set(pinned) == {(2, "cuda:3", AHEAD)}
    assert set(copied) == {("cuda:3", True, HERE)}


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


ROWS = [packed([40, 7, 17, 64]), packed([128]), Segments((0, 9, 50), 128)]


@dataclass(frozen=True)
class Teller:
    """An algorithm whose order tells the process that found it."""

    broken: int = 0

    def token_order(self, segments: Segments) -> Any:
        if segments.length == self.broken:
            raise ValueError("this row cannot be dealt out")
        return os.getpid()


def test_orders_are_those_of_the_algorithm() -> None:
    planned = named("planned_cp", 2, 4)
    with searching_beside() as beside:
        for orders in (beside, Orders()):
            for row in ROWS:
                assert orders.of(planned, row) == planned.token_order(row)


def test_they_are_found_beside_and_remembered() -> None:
    teller: Any = Teller()
    with searching_beside() as beside:
        process = beside.of(teller, ROWS[0])
        assert process != os.getpid() == Orders().of(teller, ROWS[0])
        assert beside.of(teller, ROWS[1]) == process
        os.kill(process, signal.SIGKILL)
        assert beside.of(teller, ROWS[0]) == process, "it is asked twice"
        assert beside.of(teller, ROWS[2]) == os.getpid(), "what was killed is not replaced"
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_an_error_is_raised_here() -> None:
    teller: Any = Teller(broken=128)
    with searching_beside() as beside:
        with pytest.raises(ValueError, match="cannot be dealt out"):
            beside.of(teller, ROWS[0])
        assert beside.of(teller, packed([64])) != os.getpid()


def test_the_process_ends_with_the_one_that_it_searches_for() -> None:
    """Though that one was killed and could say nothing."""
    reader, writer = os.pipe()
    owner = os.fork()
    if owner == 0:
        teller: Any = Teller()
        with searching_beside() as beside:
            os.write(writer, b"%d" % beside.of(teller, ROWS[0]))
            os.kill(os.getpid(), signal.SIGKILL)
    os.close(writer)
    os.waitpid(owner, 0)
    with os.fdopen(reader, "rb") as told:
        assert int(told.read()) > 0  # and its end of the pipe is closed: it has ended

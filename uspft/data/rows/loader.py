"""A step's micro-batches: which rows this rank's replica takes, and this rank's share of their
tokens."""

from __future__ import annotations

import math
import os
import signal
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from uspft.batch import Batch
from uspft.comm import largest, total
from uspft.config.problems import RunFailed
from uspft.data.corpus.corpus import Corpus
from uspft.data.rows.stream import Row, RowStream, empty_row
from uspft.data.samples import NOT_TRAINED
from uspft.kernels.varlen import copied, pinned
from uspft.launcher.process_pool import end_with_parent
from uspft.segments import Segments

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from uspft.job import Job
    from uspft.sequence import Algorithm, Share
    from uspft.sequence.rows.share import Order
    from uspft.world import World

DIGEST = 1 << 40
"""Modulus of digests, so that their sums over ranks are exact in float64."""


def in_documents(segments: Segments) -> NDArray[np.int64]:
    """Return each token's position in its document, and 0 for padding.

    It is derived from the same document bounds that attention uses.
    """
    places = np.zeros(segments.length, np.int64)
    for start, stop in segments:
        places[start:stop] = np.arange(stop - start)
    return places


def digest(places: NDArray[np.int64], held: Sequence[NDArray[Any]]) -> float:
    """Return the sum over tokens of a 64-bit hash (splitmix64) of position and content, modulo
    DIGEST.

    It does not depend on the order of the tokens.
    """
    mixed = np.zeros(len(places), np.uint64)
    for part in (places, *held):
        mixed = (mixed + part.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
    return float(int(mixed.sum(dtype=np.uint64)) % DIGEST)


def _digest_of(rows: Sequence[tuple[NDArray[np.int64], ...]]) -> float:
    """Return the digest of whole rows, given by the same arrays of their tokens."""
    arrays = [np.concatenate(parts) for parts in zip(*rows, strict=True)]
    return digest(np.arange(len(arrays[0])), arrays)


REMEMBERED = 4096
"""How many orders are cached: those of the rows of two steps."""


class Orders:
    """The token orders of rows by algorithm, each computed once; threads may share it.

    A search takes up to a second of a core. In a thread of the rank it would hold the GIL and delay
    kernel launches, so it runs in a separate process.
    """

    def __init__(self, beside: ProcessPoolExecutor | None = None) -> None:
        """beside: the process that searches; None: this one."""
        self._beside, self._searching = beside, threading.Lock()
        self._found: OrderedDict[tuple[Algorithm, Segments], Order] = OrderedDict()

    def of(self, algorithm: Algorithm, segments: Segments) -> Order:
        """Return the positions of a row that each context rank holds."""
        with self._searching:
            key = algorithm, segments
            if key not in self._found:
                self._found[key] = self._search(algorithm, segments)
                if len(self._found) > REMEMBERED:
                    self._found.popitem(last=False)
            return self._found[key]

    def _search(self, algorithm: Algorithm, segments: Segments) -> Order:
        if self._beside:
            try:
                return self._beside.submit(algorithm.token_order, segments).result()
            except BrokenProcessPool:
                self._beside = None  # it was killed: search in this process
        return algorithm.token_order(segments)


@contextmanager
def searching_beside() -> Iterator[Orders]:
    """Yield token orders that a separate process computes, which ends with the `with` block.

    The process is forked, which saves the imports, and before devices and process groups exist. The
    console thread holds no lock that it needs.
    """
    with ProcessPoolExecutor(1, get_context("fork"), _begin) as beside:
        beside.submit(os.getpid).result()
        yield Orders(beside)


def _begin() -> None:
    """Start the process; it ignores signals, since the rank ends it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()


EMPTY = -1
"""Index of a row of padding, which keeps ranks in step when a step has no more rows."""


class Size(NamedTuple):
    """How much of a step runs under one layout; tokens count padding, once for each row."""

    rows: int
    tokens: int


class RowLoader(ABC):
    """A loader that makes a rank's micro-batches from rows, and lets ranks check them together.

    Its batches depend only on the step's number, so that a checkpoint needs no position in the
    data. During a step, a thread prepares the next one's micro-batches on the host, with only this
    rank's tokens.
    """

    counts = "rows"
    """The unit of what a step takes from the data, in messages."""
    worlds: Sequence[World] = ()
    """The live layout of each strategy, if the recipe has several."""
    passes: int
    """The most micro-batches that a rank has in a step."""

    def __init__(
        self,
        stream: RowStream,
        row_tokens: int,
        rows_per_step: int,
        last_row: int | None,
        orders: Orders | None,
    ) -> None:
        """row_tokens: of the longest row. rows_per_step: how many rows of the stream a step takes,
        up to `last_row`, if any, at which the run ends. orders: the cache of token orders; None:
        one in this process."""
        self.stream, self._row_tokens = stream, row_tokens
        self._rows_per_step, self._last_row = rows_per_step, last_row
        self._reading, self._orders = threading.Lock(), orders or Orders()
        self._thread = ThreadPoolExecutor(1, "rows ahead")
        self._ahead: tuple[int, Future[tuple[list[Batch], float]]] | None = None
        self.epochs = 0.0
        """How many epochs of the data are used up after the step last asked for."""

    def begin(self, step: int) -> None:
        """Start to prepare a step's micro-batches in a thread; there are none after the
        last step."""
        if self.rows_of(step):
            self._drop()
            self._ahead = step, self._thread.submit(self._made, step)

    def close(self) -> None:
        """End the thread, and free its micro-batches."""
        self._drop()
        self._thread.shutdown()

    def _drop(self) -> None:
        """Drop the prepared step, and any error of its preparation."""
        if self._ahead and not self._ahead[1].cancel():
            wait([self._ahead[1]])
        self._ahead = None

    def batches(self, step: int) -> list[Batch]:
        """Return this rank's micro-batches of a step, as many as on every rank, and start to
        prepare the next step's. Raises errors of this one's preparation."""
        if self._ahead and self._ahead[0] == step:
            (_, making), self._ahead = self._ahead, None
            made, self.epochs = making.result()
        else:
            self._drop()  # the thread must not be working at the same time
            made, self.epochs = self._made(step)
        found = [_on_device(batch) for batch in made]
        self.begin(step + 1)
        return found

    def _made(self, step: int) -> tuple[list[Batch], float]:
        """Return a step's micro-batches on the host, and the epochs used up after it."""
        batches = self.on_host(step)
        with self._reading:
            return batches, self.stream.epochs_after(self.rows_of(step).stop - 1)

    @abstractmethod
    def on_host(self, step: int) -> list[Batch]:
        """Return this rank's micro-batches of a step on the host; for a GPU, in pinned memory."""

    def _share(self, world: World, rows: Sequence[Segments]) -> Share:
        return world.share(rows, [self._orders.of(world.algorithm, row) for row in rows])

    def rows_of(self, step: int) -> range:
        """Return the indices in the stream of a step's rows (or samples); steps count from 1, and
        the last one may have fewer."""
        first = (step - 1) * self._rows_per_step
        stop = first + self._rows_per_step
        return range(first, stop if self._last_row is None else min(stop, self._last_row))

    @abstractmethod
    def sizes(self, step: int) -> list[Size]:
        """Return the size of a step under each of its layouts."""

    @abstractmethod
    def empty(self) -> Batch:
        """Return a micro-batch without tokens to train on."""

    @abstractmethod
    def row(self, index: int) -> Row:
        """Return the row with an index of a batch, which may be EMPTY."""

    def batch_of(self, world: World, indices: Sequence[int]) -> Batch:
        """Return the micro-batch with this rank's share of the rows with these indices."""
        return _on_device(self._cut(world, indices))

    def _cut(self, world: World, indices: Sequence[int]) -> Batch:
        """Return the same micro-batch on the host, ready to be copied to the device."""
        rows = [self.row(i) for i in indices]
        share = self._share(world, [row.segments for row in rows])

        def mine(arrays: Iterable[NDArray[np.int64]]) -> torch.Tensor:
            whole = np.concatenate(list(arrays))
            held = [whole[start:stop] for start, stop in share.held] or [whole[:0]]
            return pinned(torch.from_numpy(np.concatenate(held)), world.device)

        def row_of(number: int, row: Row) -> NDArray[np.int64]:
            return np.where(np.arange(len(row.labels)) < row.segments.bounds[-1], number, -1)

        labels, stride = mine(row.labels for row in rows), self._row_tokens
        chosen = (labels != NOT_TRAINED).nonzero().squeeze(1)
        numbers = zip(indices, rows, strict=True)
        found = Batch(
            world=world,
            share=share,
            input_ids=mine(row.input_ids for row in rows)[None],
            position_ids=mine(row.positions for row in rows)[None],
            labels=labels,
            chosen=pinned(chosen, world.device),
            tokens=mine(index * stride + np.arange(len(row.labels)) for index, row in numbers),
            targets=len(chosen),
            rows=tuple(indices),
            row_of=mine(row_of(number, row) for number, row in enumerate(rows)),
        )
        return in_chunks(found) if share.chunks else found

    def documents(self, batch: Batch) -> list[Segments]:
        """Return the documents of each row of a batch."""
        return [self.row(index).segments for index in batch.rows]

    def require_same_rows(self, batches: Sequence[Batch]) -> None:
        """Check that all ranks that share a row have read the same row; collective.

        Raises RunFailed otherwise.
        """
        for batch in batches:
            mesh = batch.world.mesh
            rows = [self.row(index) for index in batch.rows]
            seen = _digest_of([(row.input_ids, row.labels, row.positions) for row in rows])
            highest, lowest = seen, -seen
            for group in (mesh.columns, mesh.context, mesh.pipeline):
                highest, lowest = largest([highest, lowest], group, batch.world.device)
            if highest != -lowest:
                here = f"{mesh.who}: {int(seen):x}"
                raise RunFailed(
                    f"the ranks that share rows {batch.rows} read different rows ({here}): "
                    "do all hosts see the same data files?"
                )

    def require_shares(self, batches: Sequence[Batch]) -> None:
        """Check that the ranks that share a row have each of its tokens once; collective.

        Each rank must have the tokens that the algorithm assigns to it, each at its position in its
        document, and all ranks together the whole row. Raises RuntimeError otherwise.
        """
        for batch in batches:
            world = batch.world
            rows = [self.row(index) for index in batch.rows]
            expected = self._share(world, self.documents(batch)).held
            places = [np.arange(a, b) for a, b in expected]
            tensors = (batch.input_ids[0], batch.labels, batch.position_ids[0])
            arrays = [x.cpu().numpy() for x in tensors]
            here = digest(np.concatenate(places or [arrays[0][:0]]), arrays)
            whole = _digest_of(
                [(row.input_ids, row.labels, in_documents(row.segments)) for row in rows]
            )
            held, wrong = total(
                [here, float(expected != batch.share.held)], world.mesh.context, world.device
            )
            if wrong or held % DIGEST != whole:
                raise RuntimeError(
                    f"the ranks that share rows {batch.rows} do not hold each of their tokens once "
                    f"({world.row.name}, seen by {world.mesh.who}): "
                    "this is an error in uspft"
                )


class StepLoader(RowLoader):
    """A loader of rows of one length, under one layout.

    Step i (from 1) takes rows [(i − 1)·B, i·B) of the stream, where B is rows_per_step, or those of
    them before row `last_row`. Every rank that shares a row reads the same row and keeps its own
    tokens.
    """

    def __init__(
        self,
        stream: RowStream,
        world: World,
        *,
        row_tokens: int,
        rows_per_step: int,
        rows_per_batch: int,
        last_row: int | None = None,
        orders: Orders | None = None,
    ) -> None:
        super().__init__(stream, row_tokens, rows_per_step, last_row, orders)
        self._world, self._rows_per_batch = world, rows_per_batch
        self.passes = -(-rows_per_step // (rows_per_batch * world.layout.data))

    def on_host(self, step: int) -> list[Batch]:
        return [self._cut(self._world, indices) for indices in self._indices(step)]

    def _indices(self, step: int) -> list[list[int]]:
        """Return the rows of this replica's micro-batches, EMPTY where the step has no more."""
        rows, each = self.rows_of(step), self._rows_per_batch
        per_pass = each * self._world.layout.data
        firsts = [number * per_pass + self._world.replica * each for number in range(self.passes)]
        return [
            [rows[i] if i < len(rows) else EMPTY for i in range(first, first + each)]
            for first in firsts
        ]

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the micro-batch with this rank's share of the rows with these indices."""
        return self.batch_of(self._world, indices)

    def sizes(self, step: int) -> list[Size]:
        rows = len(self.rows_of(step))
        return [Size(rows, rows * self._row_tokens)]

    def empty(self) -> Batch:
        return self.batch([EMPTY] * self._rows_per_batch)

    def row(self, index: int) -> Row:
        if index == EMPTY:
            return empty_row(self._row_tokens)
        with self._reading:
            return self.stream.row(index)


def in_chunks(batch: Batch) -> Batch:
    """Return a micro-batch with its tokens sorted by chunk, as in its share; unchanged without
    chunks."""
    chunks = batch.share.chunks
    if chunks is None:
        return batch
    found = []
    for share, places in zip(chunks.every, chunks.places(batch.share.held), strict=True):
        index = torch.from_numpy(places).to(batch.labels.device)
        by_token = {name: x for name, x in _tensors(batch).items() if name != "chosen"}
        own: dict[str, Any] = {name: x.index_select(-1, index) for name, x in by_token.items()}
        own["chosen"] = (own["labels"] != NOT_TRAINED).nonzero().squeeze(1)
        own = {name: pinned(x, batch.world.device) for name, x in own.items()}
        count = len(own["chosen"])
        found.append(replace(batch, **own, share=share, targets=count, chunks=()))
    return replace(batch, chunks=tuple(found))


def _tensors(batch: Batch) -> dict[str, torch.Tensor]:
    return {name: x for name, x in vars(batch).items() if isinstance(x, torch.Tensor)}


def _on_device(batch: Batch) -> Batch:
    """Return a micro-batch on its device, without waiting for the copy."""
    device = batch.world.device
    there: dict[str, Any] = {name: copied(x, device) for name, x in _tensors(batch).items()}
    return replace(batch, **there, chunks=tuple(map(_on_device, batch.chunks)))


@dataclass(frozen=True)
class EvalSet:
    """One source of `data.eval`, packed into rows."""

    title: str
    loader: StepLoader
    """Its step i is forward pass i, in which each replica takes one micro-batch."""
    passes: int
    """The number of forward passes for all rows."""


def evaluation_sets(job: Job, world: World) -> list[EvalSet]:
    """Return the evaluation sets of a job. world: the live layout that splits their rows."""
    data, training = job.recipe.data, job.recipe.training
    each = training.eval_micro_batch_size or training.micro_batch_size
    at_once = each * world.layout.data
    found = []
    for title, folder in job.evaluation.items():
        stream = RowStream(
            Corpus.open(folder), data.sequence_length, data.packing, False, job.recipe.seed
        )
        rows = stream.rows_in(1)
        loader = StepLoader(
            stream,
            world,
            row_tokens=data.sequence_length,
            rows_per_step=at_once,
            rows_per_batch=each,
            last_row=rows,
        )
        found.append(EvalSet(title, loader, math.ceil(rows / at_once)))
    return found

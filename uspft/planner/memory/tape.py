"""What is alive while torch runs a graph forward and backward, told by sizes alone.

An operation makes tensors and says what its backward needs; the tape keeps that as torch's autograd
does, runs the backward in torch's order, and knows the most bytes that were alive at once. Python
frees a storage with its last holder, here as in torch: what code holds while it runs, its copy on a
tape holds too. Sizes are bytes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


class Storage:
    """Bytes that are alive as long as something holds this."""

    __slots__ = ("_tape", "size")

    def __init__(self, tape: Tape, size: float) -> None:
        self._tape, self.size = tape, size
        tape.live += size
        tape.most = max(tape.most, tape.live)

    def __del__(self) -> None:
        self._tape.live -= self.size


@dataclass(slots=True, eq=False)
class Tensor:
    """A tensor of so many bytes, and the operation that made it; None: it needs no gradient."""

    size: float
    storage: Storage | None = None
    node: TapeNode | None = None
    slot: int = 0


GradientStorages = list[Storage | None]
RunBackward = Callable[[GradientStorages], Sequence[Storage | None]]
"""A function from the gradients of what an operation made to those of what it took."""


@dataclass(slots=True, eq=False)
class TapeNode:
    """An operation whose backward is still to run; without one it is a leaf."""

    number: int
    edges: list[tuple[TapeNode | None, int]]
    backward: RunBackward | None
    outputs: int = 1
    saves: bool = False
    """Whether its backward needs what was kept."""
    collects: bool = False
    """Whether a leaf keeps its gradient."""
    gradient: Storage | None = None
    held: tuple[object, ...] = ()

    def __lt__(self, other: TapeNode) -> bool:
        return self.number > other.number


class Tape:
    """The bytes alive, the most there were, and how operations are recorded."""

    def __init__(self) -> None:
        self.live = self.most = 0.0
        self.recomputed = False
        """Whether what a backward needs has been made again, and is let go of as soon as it is
        used."""
        self.stays: list[Storage] = []
        """What the graph of a first run holds by itself, as no checkpoint keeps it from."""
        self._numbers = 0
        self.keeps = self._grows = True
        """Whether anything is kept for a backward: not in a checkpoint's first run."""
        self._saves, self._last_save = 0, -1
        self._sizeless = False
        self._parameters: list[TapeNode] | None = None
        self._nodes: dict[int, TapeNode] | None = None

    def new(self, size: float) -> Storage:
        """Return a new storage; one without bytes where a second run has already ended."""
        ended = self._sizeless or self._saves == self._last_save
        return Storage(self, 0.0 if ended else size)

    def hold(self, *storages: Storage) -> None:
        """Let the graph of a first run hold storages that its functions have as attributes."""
        self.stays += [] if self.keeps else storages

    def leaf(self, size: float, storage: Storage | None = None) -> Tensor:
        """Return a tensor whose gradient is kept: new, or in a storage."""
        return Tensor(size, storage or self.new(size), self._node([], None, collects=True), 0)

    def parameter(self, trains: bool) -> Tensor:
        """Return a parameter, whose bytes are not counted; where it trains, its gradient is let go
        of when it has come, but for those that `apart` collects."""
        node = None
        if trains and self._grows:
            node = self._node([], None, collects=self._parameters is not None)
            if self._parameters is not None:
                self._parameters.append(node)
        return Tensor(0.0, None, node, 0)

    def record(
        self,
        inputs: Sequence[Tensor],
        sizes: Sequence[float],
        backward: RunBackward,
        *,
        saves: bool = False,
        keeps: Sequence[object] = (),
        made: Sequence[Storage] | None = None,
    ) -> list[Tensor]:
        """Return what an operation makes of its inputs.

        saves: whether its backward needs any of what it took or made. keeps: what is held for it,
        until it has run. made: what it made by itself.
        """
        needed = any(one.node for one in inputs)
        self._saves += saves and needed
        storages = list(made) if made is not None else [self.new(size) for size in sizes]
        if not needed:
            return [Tensor(*each) for each in zip(sizes, storages, strict=True)]
        edges = [(one.node, one.slot) for one in inputs] if self.keeps else []
        run = backward if self.keeps else None
        node = self._node(edges, run, outputs=len(storages), saves=saves)
        node.held = tuple(keeps) if self.keeps else ()
        each = zip(sizes, storages, range(len(storages)), strict=True)
        return [Tensor(size, storage, node, slot) for size, storage, slot in each]

    def _node(
        self,
        edges: list[tuple[TapeNode | None, int]],
        backward: RunBackward | None,
        outputs: int = 1,
        *,
        saves: bool = False,
        collects: bool = False,
    ) -> TapeNode:
        node = TapeNode(self._numbers, edges, backward, outputs, saves, collects)
        self._numbers += 1
        if self._nodes is not None:
            self._nodes[node.number] = node
        return node

    @contextmanager
    def first_run(self) -> Iterator[None]:
        """Keep nothing for the backward within the `with` block, as a checkpoint's first run."""
        self._saves, self.keeps = 0, False
        try:
            yield
        finally:
            self.keeps = True

    def second_run(
        self, run: Callable[[], Tensor], gradient: float, then: Callable[[], None]
    ) -> None:
        """Run what has had its first run again, until what that would have kept is there, and then
        its backward: what of this needs nothing that was kept goes before.

        gradient: the bytes of that of what it makes. then: is called between.
        """
        last, begin, self._sizeless = self._saves, self._numbers, True
        self._saves = 0
        out = run()
        self._sizeless = False
        pending = _Pending(self)
        assert out.node
        pending.arrives(out.node, out.slot, self.new(gradient))
        pending.run(until_saved=True)
        early = pending.left()
        del out, pending
        again, self._nodes = self._numbers - begin, {}
        self._last_save, self._saves = last, 0
        out = run()
        nodes, self._nodes, self._last_save = self._nodes, None, -1
        then()
        pending = _Pending(self)
        while early:
            number, gradients = early.pop()
            pending.waits(nodes[number + again], gradients)
            del gradients
        del out, nodes
        self.recomputed = True
        pending.run()
        self.recomputed = False

    @contextmanager
    def no_gradient(self) -> Iterator[None]:
        """Let no parameter ask for a gradient within the `with` block."""
        before, self._grows = self._grows, False
        try:
            yield
        finally:
            self._grows = before

    @contextmanager
    def apart(self, *, collects: bool = False) -> Iterator[list[TapeNode]]:
        """Keep what a graph of its own needs within the `with` block, also in a first run.

        collects: whether the gradients of its parameters stay, at what is yielded.
        """
        before = self.keeps, self._saves, self._last_save, self._parameters, self.recomputed
        self.keeps, self._last_save, self.recomputed = True, -1, False
        found: list[TapeNode] = []
        self._parameters = found if collects else None
        try:
            yield found
        finally:
            self.keeps, self._saves, self._last_save, self._parameters, self.recomputed = before

    def backward(self, made: Tensor, gradient: Storage) -> None:
        """Run the backward of all that led to a tensor, and leave gradients at the leaves."""
        pending = _Pending(self)
        assert made.node
        pending.arrives(made.node, made.slot, gradient)
        del gradient, made
        pending.run()


class _Pending:
    """The gradients that have come to operations whose backward is still to run."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._waiting: dict[TapeNode, GradientStorages] = {}
        self._ready: list[TapeNode] = []

    def waits(self, node: TapeNode, gradients: GradientStorages) -> None:
        self._waiting[node] = gradients
        heapq.heappush(self._ready, node)

    def arrives(self, node: TapeNode, slot: int, gradient: Storage) -> None:
        """Hand a gradient to an operation; a sum takes the place of two. (Without anybody to count
        it torch may sum in the memory of the first.)"""
        if node not in self._waiting:
            self.waits(node, [None] * node.outputs)
        here = self._waiting[node]
        here[slot] = gradient if here[slot] is None else self._tape.new(gradient.size)

    def left(self) -> list[tuple[int, GradientStorages]]:
        """Return what still waits, by the numbers of operations."""
        return [(node.number, gradients) for node, gradients in self._waiting.items()]

    def run(self, *, until_saved: bool = False) -> None:
        """Run backwards, the last operation's first. until_saved: whether to end before the first
        that needs what was kept."""
        while self._ready and not (until_saved and self._ready[0].saves):
            node = heapq.heappop(self._ready)
            given = self._waiting.pop(node)
            if node.backward is None:
                node.gradient = given[0] if node.collects else None
                del given
                continue
            found = list(node.backward(given))
            node.backward, node.held = None, ()
            del given
            for edge, slot in node.edges:
                one = found.pop(0)
                if edge is not None and one is not None:
                    self.arrives(edge, slot, one)
                del one

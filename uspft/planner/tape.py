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
from itertools import count


class Storage:
    """Bytes that are alive as long as something holds this."""

    __slots__ = ("_tape", "size")

    def __init__(self, tape: Tape, size: float) -> None:
        self._tape, self.size = tape, size
        tape.live += size
        tape.most = max(tape.most, tape.live)

    def __del__(self) -> None:
        self._tape.live -= self.size


class Tensor:
    """A tensor of so many bytes, and the operation that made it; None: it needs no gradient."""

    __slots__ = ("node", "size", "slot", "storage")

    def __init__(self, size: float, storage: Storage | None, node: Node | None, slot: int) -> None:
        self.size, self.storage, self.node, self.slot = size, storage, node, slot


Gradients = list[Storage | None]
Backward = Callable[[Gradients], Sequence[Storage | None]]
"""A function from the gradients of what an operation made to those of what it took."""


class Node:
    """An operation whose backward is still to run; without one it is a leaf, which keeps its
    gradient."""

    __slots__ = ("backward", "collects", "edges", "gradient", "number", "outputs")

    def __init__(
        self,
        number: int,
        edges: list[tuple[Node | None, int]],
        backward: Backward | None,
        outputs: int = 1,
    ) -> None:
        self.number, self.edges, self.backward = number, edges, backward
        self.gradient: Storage | None = None
        self.outputs, self.collects = outputs, False

    def __lt__(self, other: Node) -> bool:
        return self.number > other.number


class Tape:
    """The bytes alive, the most there were, and how operations are recorded."""

    def __init__(self) -> None:
        self.live = self.most = 0.0
        self._numbers = count()
        self._keeps = self._grows = True
        self._saves = 0
        self._last_save = -1
        self._parameters: list[Node] | None = None

    def new(self, size: float) -> Storage:
        """Return a new storage; one without bytes where a second run has already ended."""
        return Storage(self, 0.0 if self._saves == self._last_save else size)

    def leaf(self, size: float, storage: Storage | None = None) -> Tensor:
        """Return a tensor whose gradient is kept: new, or in a storage."""
        node = Node(next(self._numbers), [], None)
        node.collects = True
        return Tensor(size, storage or self.new(size), node, 0)

    def parameter(self, trains: bool) -> Tensor:
        """Return a parameter, whose bytes are not counted; where it trains, its gradient is let go
        of when it has come, but for those that `apart` collects."""
        trains = trains and self._grows
        node = Node(next(self._numbers), [], None) if trains else None
        if node and self._parameters is not None:
            node.collects = True
            self._parameters.append(node)
        return Tensor(0.0, None, node, 0)

    def record(
        self,
        inputs: Sequence[Tensor],
        sizes: Sequence[float],
        backward: Callable[[], Backward],
        *,
        saves: bool = False,
        made: Sequence[Storage] | None = None,
    ) -> list[Tensor]:
        """Return what an operation makes of its inputs.

        backward: makes the backward, which holds what it needs. saves: whether it keeps any of its
        inputs, before it makes anything. made: what it made by itself, before it keeps anything.
        """
        needed = any(one.node for one in inputs)
        self._saves += saves and needed
        storages = list(made) if made is not None else [self.new(size) for size in sizes]
        if not needed:
            return [Tensor(*each, None, 0) for each in zip(sizes, storages, strict=True)]
        edges = [(one.node, one.slot) for one in inputs] if self._keeps else []
        node = Node(next(self._numbers), edges, backward() if self._keeps else None, len(storages))
        each = zip(sizes, storages, range(len(storages)), strict=True)
        return [Tensor(size, storage, node, slot) for size, storage, slot in each]

    @contextmanager
    def first_run(self) -> Iterator[None]:
        """Keep nothing for the backward within the `with` block, as a checkpoint's first run."""
        self._saves, self._keeps = 0, False
        try:
            yield
        finally:
            self._keeps = True

    @contextmanager
    def second_run(self) -> Iterator[None]:
        """End where what the first run would have kept is there again."""
        self._last_save, self._saves = self._saves, 0
        try:
            yield
        finally:
            self._last_save = -1

    @contextmanager
    def no_gradient(self) -> Iterator[None]:
        """Let no parameter ask for a gradient within the `with` block."""
        self._grows = False
        try:
            yield
        finally:
            self._grows = True

    @contextmanager
    def apart(self, *, collects: bool = False) -> Iterator[list[Node]]:
        """Keep what a graph of its own needs within the `with` block, also in a first run.

        collects: whether the gradients of its parameters stay, at what is yielded.
        """
        before = self._keeps, self._saves, self._last_save, self._parameters
        self._keeps, self._last_save = True, -1
        found: list[Node] = []
        self._parameters = found if collects else None
        try:
            yield found
        finally:
            self._keeps, self._saves, self._last_save, self._parameters = before

    def backward(self, made: Tensor, gradient: Storage) -> None:
        """Run the backward of all that led to a tensor, and leave gradients at the leaves."""
        assert made.node
        waiting: dict[Node, Gradients] = {}
        ready: list[Node] = []
        self._arrives(made.node, made.slot, gradient, waiting, ready)
        del gradient, made
        while ready:
            node = heapq.heappop(ready)
            given = waiting.pop(node)
            if node.backward is None:
                if node.collects:
                    node.gradient = given[0]
                del given
                continue
            found = list(node.backward(given))
            node.backward = None
            del given
            for edge, slot in node.edges:
                one = found.pop(0)
                if edge is not None and one is not None:
                    self._arrives(edge, slot, one, waiting, ready)
                del one

    def _arrives(
        self,
        node: Node,
        slot: int,
        gradient: Storage,
        waiting: dict[Node, Gradients],
        ready: list[Node],
    ) -> None:
        """Hand a gradient to a node; a sum takes the place of two."""
        if node not in waiting:
            waiting[node] = [None] * node.outputs
            heapq.heappush(ready, node)
        here = waiting[node]
        here[slot] = gradient if here[slot] is None else self.new(gradient.size)

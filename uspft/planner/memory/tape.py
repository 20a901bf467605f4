"""A simulation of an autograd graph's forward and backward, which knows only sizes: of the memory
that it takes, and of the bytes that its operations read and write.

An operation allocates tensors and declares what its backward saves. The tape keeps saved tensors
alive as torch's autograd does, runs the backward in torch's order, and records the peak of the
bytes that are alive. A storage is freed with its last Python reference, as in torch, so that code
on a tape must hold the same references as the code that it simulates. Sizes are bytes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


class Storage:
    """Bytes that are alive as long as something references this object."""

    __slots__ = ("_tape", "size")

    def __init__(self, tape: Tape, size: float) -> None:
        self._tape, self.size = tape, size
        tape.live += size
        tape.most = max(tape.most, tape.live)

    def __del__(self) -> None:
        self._tape.live -= self.size


@dataclass(slots=True, eq=False)
class Tensor:
    """A tensor of `size` bytes, and the operation that made it; node None: it needs no gradient."""

    size: float
    storage: Storage | None = None
    node: TapeNode | None = None
    slot: int = 0


GradientStorages = list[Storage | None]
RunBackward = Callable[[GradientStorages], Sequence[Storage | None]]
"""A function from the gradients of an operation's outputs to those of its inputs."""


@dataclass(slots=True, eq=False)
class TapeNode:
    """An operation whose backward has not run yet; a leaf has no backward."""

    number: int
    edges: list[tuple[TapeNode | None, int]]
    backward: RunBackward | None
    outputs: int = 1
    saves: bool = False
    """Whether its backward uses saved tensors."""
    collects: bool = False
    """Whether a leaf stores its gradient."""
    gradient: Storage | None = None
    held: tuple[object, ...] = ()
    moves: float = 0.0
    """The bytes that its backward reads and writes."""

    def __lt__(self, other: TapeNode) -> bool:
        return self.number > other.number


class Tape:
    """A recorder of operations, with the bytes that are alive, their peak, and the bytes that
    operations have read and written."""

    def __init__(self) -> None:
        self.live = self.most = self.moved = 0.0
        self._alike = 1.0
        """The number of equal runs, such as those of tiles, for which the current one stands."""
        self.recomputed = False
        """Whether saved tensors were recomputed, and so are freed as soon as they are used."""
        self.stays: list[Storage] = []
        """The tensors that a checkpointed layer's first run keeps alive nevertheless."""
        self._numbers = 0
        self.keeps = self._grows = True
        """Whether tensors are saved for a backward: not in a checkpointed layer's first run."""
        self._saves, self._last_save, self._begin = 0, -1, 0
        self._parameters: list[TapeNode] | None = None
        self._nodes: dict[int, TapeNode] | None = None

    def new(self, size: float) -> Storage:
        """Return a new storage; of 0 bytes if recomputation has already stopped."""
        return Storage(self, 0.0 if self._ended else size)

    @property
    def _ended(self) -> bool:
        """Whether recomputation has already stopped."""
        return self._saves == self._last_save

    def moves(self, size: float) -> None:
        """Count bytes that an operation reads and writes."""
        if not self._ended:
            self.moved += self._alike * size

    @contextmanager
    def alike(self, number: float) -> Iterator[None]:
        """Count what runs within the `with` block as `number` equal runs."""
        before, self._alike = self._alike, number * self._alike
        try:
            yield
        finally:
            self._alike = before

    def hold(self, storage: Storage) -> None:
        """Keep alive a storage that autograd functions have as an attribute, even in a first
        run."""
        self.stays += [] if self.keeps else [storage]

    def leaf(self, size: float, storage: Storage | None = None) -> Tensor:
        """Return a leaf whose gradient is stored. storage: None: a new one."""
        return Tensor(size, storage or self.new(size), self._node([], None, collects=True), 0)

    def parameter(self, trains: bool) -> Tensor:
        """Return a parameter, whose bytes are not counted. If it trains, its gradient is freed when
        it is computed, except within `apart(collects=True)`."""
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
        moves: tuple[float, float] = (0.0, 0.0),
    ) -> list[Tensor]:
        """Return the outputs of an operation.

        saves: whether its backward uses saved inputs or outputs. keeps: objects that stay alive
        until its backward has run. made: the outputs' storages, if they are already allocated.
        moves: the bytes that it reads and writes, forward and backward; none for views, and for
        products, attention and transfers, which are priced apart.
        """
        needed = any(one.node for one in inputs)
        self._saves += saves and needed
        self.moves(moves[0])
        storages = list(made) if made is not None else [self.new(size) for size in sizes]
        if not needed:
            return [Tensor(*each) for each in zip(sizes, storages, strict=True)]
        edges = [(one.node, one.slot) for one in inputs]
        run = backward if self.keeps or not saves else None
        node = self._node(edges, run, outputs=len(storages), saves=saves)
        node.held, node.moves = tuple(keeps) if self.keeps else (), moves[1]
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
        """Save nothing for the backward within the `with` block, as in a checkpoint's first run."""
        self._saves, self._begin, self.keeps = 0, self._numbers, False
        try:
            yield
        finally:
            self.keeps = True

    def second_run(
        self, made: list[Tensor], run: Callable[[], Tensor], then: Callable[[], None]
    ) -> None:
        """Recompute what ran within `first_run` until the last tensor is saved, and then run its
        backward; operations whose backward uses no saved tensors run before the recomputation.

        made: the first run's tensors whose gradients are there; the list is emptied. run: runs it
        again. then: called between the two.
        """
        pending = _Pending(self, made)
        made.clear()
        pending.run(until_saved=True)
        early = pending.left()
        del pending
        begin, again, self._nodes = self._begin, self._numbers - self._begin, {}
        self._last_save, self._saves = self._saves, 0
        out = run()
        nodes, self._nodes, self._last_save = self._nodes, None, -1
        then()
        pending = _Pending(self)
        while early:
            node, gradients = early.pop()
            pending.waits(node if node.number < begin else nodes[node.number + again], gradients)
            del node, gradients
        del out, nodes
        self.recomputed = True
        pending.run()
        self.recomputed = False

    @contextmanager
    def no_gradient(self) -> Iterator[None]:
        """Let no parameter require a gradient within the `with` block."""
        before, self._grows = self._grows, False
        try:
            yield
        finally:
            self._grows = before

    @contextmanager
    def apart(self, *, collects: bool = False) -> Iterator[list[TapeNode]]:
        """Record a separate graph within the `with` block, which saves tensors even in a first run.

        collects: whether the gradients of its parameters are stored, in the yielded nodes.
        """
        # Its nodes have numbers of their own: a graph of a first run is not made in the second.
        before = self.keeps, self._saves, self._last_save, self._parameters, self.recomputed
        number = self._numbers
        self.keeps, self._last_save, self.recomputed = True, -1, False
        found: list[TapeNode] = []
        self._parameters = found if collects else None
        try:
            yield found
        finally:
            self.keeps, self._saves, self._last_save, self._parameters, self.recomputed = before
            self._numbers = number

    def backward(self, made: Tensor, gradient: Storage, others: Sequence[Tensor] = ()) -> None:
        """Run the backward from a tensor, which leaves gradients at the leaves. others: tensors
        that have received gradients already."""
        pending = _Pending(self, others)
        assert made.node
        pending.arrives(made.node, made.slot, gradient)
        del gradient, made
        pending.run()


class _Pending:
    """The gradients that operations have received whose backward has not run yet."""

    def __init__(self, tape: Tape, made: Sequence[Tensor] = ()) -> None:
        """made: tensors whose gradients are there."""
        self._tape = tape
        self._waiting: dict[TapeNode, GradientStorages] = {}
        self._ready: list[TapeNode] = []
        for one in made:
            if one.node:
                self.arrives(one.node, one.slot, tape.new(one.size))

    def waits(self, node: TapeNode, gradients: GradientStorages) -> None:
        self._waiting[node] = gradients
        heapq.heappush(self._ready, node)

    def arrives(self, node: TapeNode, slot: int, gradient: Storage) -> None:
        """Add a gradient to those of an operation; a sum is a new storage, although torch may
        sometimes sum in the first one's memory."""
        if node not in self._waiting:
            self.waits(node, [None] * node.outputs)
        here = self._waiting[node]
        if here[slot] is None:
            here[slot] = gradient
            return
        here[slot] = self._tape.new(gradient.size)
        self._tape.moves(3 * gradient.size)

    def left(self) -> list[tuple[TapeNode, GradientStorages]]:
        """Return the operations that are left, and their gradients."""
        return [*self._waiting.items()]

    def run(self, *, until_saved: bool = False) -> None:
        """Run the backwards in reverse order. until_saved: whether to stop before the first that
        uses saved tensors."""
        while self._ready and not (until_saved and self._ready[0].saves):
            node = heapq.heappop(self._ready)
            given = self._waiting.pop(node)
            if node.backward is None:
                node.gradient = given[0] if node.collects else None
                del given
                continue
            self._tape.moves(node.moves)
            found = list(node.backward(given))
            node.backward, node.held = None, ()
            del given
            for edge, slot in node.edges:
                one = found.pop(0)
                if edge is not None and one is not None:
                    self.arrives(edge, slot, one)
                del one

"""The memory of a layer with `fine_grain_interleave`, which splits its tokens into interleaved
groups (copies), by replaying on a tape what model/copies.py and tensor/interleaved.py allocate.
Sizes are bytes."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from uspft.families.projections import ROWS
from uspft.planner.memory.layer import Layer
from uspft.planner.memory.operations import LayerTape
from uspft.planner.memory.sizes import LayerSizes
from uspft.planner.memory.tape import GradientStorages, Storage, Tensor


class OneCopy(Layer):
    """The token-by-token modules of a layer for one copy. Products that compute weights' gradients
    are delayed until a transfer is awaited."""

    def begin(self) -> None:
        """Begin a run of the layer."""
        self._sums: dict[str, Storage] = {}
        """The sums of weights' gradients over their delayed products."""
        self._delayed: deque[tuple[str, float, tuple[Storage | None, ...]]] = deque()
        """The name and bytes of a weight, and what its product keeps alive."""
        given = [self.tape.parameter(self.sizes.trains and self.sizes.puts_off)]
        (self._weights,) = self.tape.record(given, (0.0,), self._summed)

    def catch_up(self) -> None:
        """Compute a delayed product, if there is one."""
        if self._delayed:
            name, size, held = self._delayed.popleft()
            if name not in self._sums:
                self._sums[name] = self.tape.new(size)
            del held

    def _summed(self, grads: GradientStorages) -> GradientStorages:
        while self._delayed:
            self.catch_up()
        self._sums.clear()
        return [None]

    def _product(self, x: Tensor, name: str, takes: int, gives: int) -> Tensor:
        if not (self.sizes.puts_off and self._trains(name)):
            return super()._product(x, name, takes, gives)
        weight = float(self.sizes.element * takes * gives)
        return self._put_off(x, name, x.size / takes * gives, weight)

    def _factor(self, x: Tensor, name: str, size: float, weight: float) -> Tensor:
        projection, _, factor = name.rpartition(".lora_")
        split = factor == ("A" if self.sizes.table[projection].dim == ROWS else "B")
        run = self._put_off if self.sizes.puts_off and split else super()._factor
        return run(x, name, size, weight)

    def _put_off(self, x: Tensor, name: str, size: float, weight: float) -> Tensor:
        """Return a product of x of this size, with a delayed gradient of its weight."""
        tape, before, held, wants = self.tape, x.size, x.storage, bool(x.node)

        def backward(grads: GradientStorages) -> GradientStorages:
            self._delayed.append((name, weight, (grads[0], held)))
            return [tape.new(before) if wants else None, tape.new(0.0)]

        return tape.record((x, self._weights), (size,), backward, saves=True, keeps=[held])[0]


class CopiesUnderWay:
    """The transfers of copies into a block, or out of it."""

    def __init__(self, one: OneCopy, *, into: bool) -> None:
        self._tape, self._one, self._into = one.tape, one, into
        self._there: dict[int, list[Storage | None]] = {}
        self._back: dict[int, list[Storage | None]] = {}
        """Gradients in transfer, by copy; a backward that begins before recomputation starts them
        too."""
        self._begun: dict[int, Tensor] = {}

    def begin(self, copy: int, x: Tensor, *, sends: bool = True) -> None:
        """Record a copy's transfer. sends: whether to start it now rather than in `send`; a
        recomputation's graph has the order of the first run's."""
        x = self._tape.viewed(x)
        self._there[copy] = self._start(x.storage, self._into) if sends else [x.storage]

        def backward(grads: GradientStorages) -> GradientStorages:
            self._one.catch_up()
            return [self._back.pop(copy)[-1]]

        self._begun[copy] = self._tape.record((x,), (0.0,), backward)[0]

    def send(self, copy: int) -> None:
        self._there[copy] = self._start(self._there[copy][-1], self._into)

    def arrived(self, copy: int) -> Tensor:
        """Return a copy after its transfer."""
        out = self._there.pop(copy)[-1]
        assert out

        def backward(grads: GradientStorages) -> GradientStorages:
            self._back[copy] = self._start(grads[0], not self._into)
            return [self._tape.new(0.0)]

        return self._tape.record(
            (self._begun[copy],), (self._size(self._into),), backward, made=[out]
        )[0]

    def _size(self, into: bool) -> float:
        """Return the bytes of a copy inside of the block, or between blocks."""
        sizes = self._one.sizes
        return sizes.inside_bytes() if into else sizes.between_bytes()

    def _start(self, x: Storage | None, into: bool) -> list[Storage | None]:
        """Start the transfer of all of a block's tokens, or of this rank's part of their sum."""
        if self._one.sizes.splits_tokens:
            return [x, self._tape.new(self._size(into))]
        return [x if into else self._tape.new(self._size(True))]


class LayerOfCopies(Layer):
    """A layer on a tape that runs its tokens in copies."""

    def __init__(self, tape: LayerTape, sizes: LayerSizes) -> None:
        super().__init__(tape, sizes)
        tokens = -(-sizes.sharing.tokens // sizes.copies)
        of = replace(sizes.sharing, tokens=tokens)
        self._one = OneCopy(tape, replace(sizes, sharing=of, copies=1, recompute=None))
        self._ways = [CopiesUnderWay(self._one, into=way) for way in (True, False, True, False)]
        self._whole: dict[str, Tensor] = {}
        """The projections' outputs for all copies, by name."""
        self._again = False

    def __call__(self, hidden: Tensor) -> Tensor:
        s, one, norms = self.sizes, self._one, self.sizes.kind.norms
        numbers = range(s.copies)
        one.begin()
        residual = self._cut(self.tape.viewed(hidden))
        del hidden
        entering, leaving, into_mlp, out_of_mlp = self._ways
        for copy in numbers:
            entering.begin(copy, one.norm(residual[copy], norms.before_attention))
        attended = self._attended_each(entering)
        for copy in numbers:
            leaving.begin(copy, one.project(attended[copy], s.out))
        for copy in numbers:
            made = one.norm(leaving.arrived(copy), norms.behind_attention)
            residual[copy] = self.plus(residual[copy], made)
            del made
            into_mlp.begin(copy, one.norm(residual[copy], norms.before_mlp))
        held: list[Tensor] = []
        for copy in numbers:
            made = one.in_tiles(into_mlp.arrived(copy))
            out_of_mlp.begin(copy, made, sends=not self._again)
            held += [made] if self._again else []
            del made
        for copy, _ in enumerate(held):
            out_of_mlp.send(copy)
        self._again = s.recompute is not None
        ends = []
        for copy in numbers:
            base = self.tape.copied(residual[copy])
            ends.append(self.plus(base, one.norm(out_of_mlp.arrived(copy), norms.behind_mlp)))
            del base
        return self.tape.joined(ends)

    def project(self, x: Tensor, name: str) -> Tensor:
        """Return the output of a projection for all copies if it exists, else a projection of x."""
        return self._whole[name] if name in self._whole else super().project(x, name)

    def _cut(self, x: Tensor) -> list[Tensor]:
        return self.tape.parted(x, [x.size / self.sizes.copies] * self.sizes.copies)

    def _attended_each(self, entering: CopiesUnderWay) -> list[Tensor]:
        """Return, for each copy, the input of attention's output projection."""
        tape, s = self.tape, self.sizes
        parts: dict[str, list[Tensor]] = {name: [] for name in s.into("self_attn")}
        for copy in range(s.copies):
            arrived = entering.arrived(copy)
            for name, made in parts.items():
                made.append(tape.viewed(self._one.project(arrived, name)))
        self._whole = {name: self._together(made) for name, made in parts.items()}
        out = super()._attended(Tensor(0.0))
        del arrived, made
        out = tape.viewed(out)
        if s.splits_tokens:
            whole = tape.remade(out)  # padded for all ranks
            found = [tape.copied(one) for one in self._cut(whole)]
        else:
            found = self._cut(out)
        self._whole = {}
        del parts
        return found

    def _together(self, made: list[Tensor]) -> Tensor:
        if self.sizes.splits_tokens:  # some tokens of each rank
            made = [self.tape.viewed(one) for one in made]
        return self.tape.joined(made)

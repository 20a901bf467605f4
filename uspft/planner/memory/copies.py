"""The memory of a layer with `fine_grain_interleave`, which splits its tokens into interleaved
groups (copies), by replaying on a tape what model/copies.py and tensor/interleaved.py allocate.
Sizes are bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from uspft.planner.memory.layer import Layer
from uspft.planner.memory.operations import LayerTape
from uspft.planner.memory.sizes import OUT, OUTWARD, LayerSizes
from uspft.planner.memory.tape import GradientStorages, Storage, Tensor

PutOffProducts = deque[Callable[[], None]]
"""A queue of products that compute weights' gradients while a transfer is awaited."""


class PutOffGradient:
    """The running sum of a weight's gradient over its delayed products."""

    def __init__(self, tape: LayerTape, waiting: PutOffProducts, size: float) -> None:
        self._tape, self._waiting, self._size = tape, waiting, size
        self._sum: Storage | None = None
        given = [tape.parameter(True)]
        self.stand = tape.record(given, (0.0,), self._whole)[0]
        """The stand-in for the weight in the graph."""

    def add(self, *held: Storage | None) -> None:
        """Queue a product; `held` stays alive until it runs."""
        of = [held]

        def make() -> None:
            self._sum = self._sum or self._tape.new(self._size)
            of.clear()

        self._waiting.append(make)

    def _whole(self, grads: GradientStorages) -> GradientStorages:
        while self._waiting:
            self._waiting.popleft()()
        found, self._sum = self._sum, None
        return [found]


class CopiesUnderWay:
    """The transfers of copies into a block, or out of it."""

    def __init__(
        self, tape: LayerTape, one: LayerSizes, waiting: PutOffProducts, *, into: bool
    ) -> None:
        """one: the bytes of a copy."""
        self._tape, self._waiting, self._into, self._one = tape, waiting, into, one
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
            if self._waiting:
                self._waiting.popleft()()
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

        size = self._one.inside_bytes() if self._into else self._one.between_bytes()
        return self._tape.record((self._begun[copy],), (size,), backward, made=[out])[0]

    def _start(self, x: Storage | None, into: bool) -> list[Storage | None]:
        """Start the transfer of all of a block's tokens, or of this rank's part of their sum."""
        if self._one.splits_tokens:
            size = self._one.inside_bytes() if into else self._one.between_bytes()
            return [x, self._tape.new(size)]
        return [x if into else self._tape.new(self._one.inside_bytes())]


class OneCopy(Layer):
    """The token-by-token modules of a layer for one copy; their weights' gradients are delayed."""

    def __init__(self, tape: LayerTape, sizes: LayerSizes) -> None:
        super().__init__(tape, sizes)
        self._plain = Layer(tape, sizes)
        self.put_off: dict[str, PutOffGradient] = {}
        self._sums: list[Storage] = []

    def mlp_of(self, x: Tensor, copy: int) -> Tensor:
        """Return the MLP's output for a copy; with tiles no product is delayed, and weights'
        gradients wait until all copies' are summed."""
        s, tape = self.sizes, self.tape
        if not s.tile:
            return self.in_tiles(x)
        weights = sum(self.weight(name) for name in self.sizes.trained if name.startswith("mlp."))

        def backward(grads: GradientStorages) -> GradientStorages:
            self._sums[:] = [tape.new(weights)] if copy else []
            return grads

        assert x.storage
        given = tape.record((x,), (x.size,), backward, made=[x.storage])[0]
        return self._plain.in_tiles(given)

    def weight(self, name: str) -> float:
        """Return the bytes of a projection's weight."""
        s, block = self.sizes, name.partition(".")[0]
        inside = s.outputs(block)
        return float(s.element * s.features * (inside.get(name) or s.inside(block)))

    def puts_off(self) -> dict[str, float]:
        """Return the bytes of weights with delayed gradients: those of split projections, and the
        split factors of their adapters."""
        s = self.sizes
        found = {name: self.weight(name) for name in s.trained if name.endswith("_proj")}
        for name in s.adapted:
            out = name in OUTWARD.values()
            factor = f"{name}.lora_{'A' if out else 'B'}"
            found[factor] = self.weight(name) / s.features * s.rank
        return found

    def _product(self, x: Tensor, name: str, takes: int, gives: int) -> Tensor:
        if name not in self.put_off:
            return super()._product(x, name, takes, gives)
        return self._put_off(x, name, x.size / takes * gives)

    def _factor(self, x: Tensor, name: str, size: float, weight: float) -> Tensor:
        if name not in self.put_off:
            return super()._factor(x, name, size, weight)
        return self._put_off(x, name, size)

    def _put_off(self, x: Tensor, name: str, size: float) -> Tensor:
        """Return a product of x of this size, with a delayed gradient of its weight."""
        tape, put_off, before = self.tape, self.put_off[name], x.size
        held, wants = x.storage, bool(x.node)

        def backward(grads: GradientStorages) -> GradientStorages:
            put_off.add(grads[0], held)
            return [tape.new(before) if wants else None, tape.new(0.0)]

        return tape.record((x, put_off.stand), (size,), backward, saves=True, keeps=[held])[0]


class LayerOfCopies(Layer):
    """A layer on a tape that runs its tokens in copies."""

    def __init__(self, tape: LayerTape, sizes: LayerSizes) -> None:
        super().__init__(tape, sizes)
        tokens = -(-sizes.sharing.tokens // sizes.copies)
        of = replace(sizes.sharing, tokens=tokens)
        self._one = OneCopy(tape, replace(sizes, sharing=of, copies=1, recompute=None))
        self._waiting = PutOffProducts()
        ways = (True, False, True, False)
        self._ways = [
            CopiesUnderWay(tape, self._one.sizes, self._waiting, into=way) for way in ways
        ]
        self._whole: dict[str, Tensor] = {}
        """The projections' outputs for all copies, by name."""
        self._again = False

    def __call__(self, hidden: Tensor) -> Tensor:
        tape, s, one, norms = self.tape, self.sizes, self._one, self.sizes.kind.norms
        numbers = range(s.copies)
        self._waiting.clear()
        sizes = one.puts_off() if s.puts_off else {}
        one.put_off = {n: PutOffGradient(tape, self._waiting, size) for n, size in sizes.items()}
        residual = self._cut(tape.viewed(hidden))
        del hidden
        entering, leaving, into_mlp, out_of_mlp = self._ways
        for copy in numbers:
            entering.begin(copy, one.norm(residual[copy], norms.before_attention))
        attended = self._attended_each(entering)
        for copy in numbers:
            leaving.begin(copy, one.project(attended[copy], OUT))
        for copy in numbers:
            made = one.norm(leaving.arrived(copy), norms.behind_attention)
            residual[copy] = self._plus(residual[copy], made)
            del made
            into_mlp.begin(copy, one.norm(residual[copy], norms.before_mlp))
        held: list[Tensor] = []
        for copy in numbers:
            made = one.mlp_of(into_mlp.arrived(copy), copy)
            out_of_mlp.begin(copy, made, sends=not self._again)
            held += [made] if self._again else []
            del made
        for copy, _ in enumerate(held):
            out_of_mlp.send(copy)
        self._again = s.recompute is not None
        ends = []
        for copy in numbers:
            base = tape.copied(residual[copy])
            ends.append(self._plus(base, one.norm(out_of_mlp.arrived(copy), norms.behind_mlp)))
            del base
        return tape.joined(ends)

    def project(self, x: Tensor, name: str) -> Tensor:
        """Return the output of a projection for all copies if it exists, else a projection of x."""
        return self._whole[name] if name in self._whole else super().project(x, name)

    def _plus(self, residual: Tensor, made: Tensor) -> Tensor:
        return self.tape.added(residual, self.tape.remade(made) if self.sizes.kind.scaled else made)

    def _cut(self, x: Tensor) -> list[Tensor]:
        return self.tape.parted(x, [x.size / self.sizes.copies] * self.sizes.copies)

    def _attended_each(self, entering: CopiesUnderWay) -> list[Tensor]:
        """Return, for each copy, the input of attention's output projection."""
        tape, s = self.tape, self.sizes
        parts: dict[str, list[Tensor]] = {name: [] for name in s.outputs("self_attn")}
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

"""An engine whose weights go straight from layout to layout, as HotSPa's do: gradients are reduced
among the ranks that hold the same, and then follow the weights to the layout that is the last.

Bytes that a rank sends in a step on average, for each parameter of matrices that the degrees
divide, with b bytes of the compute type, n ranks, and layouts of tensor degrees t (c = n ÷ t copies
of each part) whose parts lie inside one another, from the least to the most sharded, T:

    by owners   Σ_t (1/t − 1/n) · (b + 4)
    straight    (1/t₁ − 1/T) · b  +  Σ_(t < T) 2 · (c − 1)/c · 1/t · 4  +  (1/T − 1/n) · (4 + b)

Of four ranks and tensor 1, 2 and 4 that is 6 and 9.5 in bfloat16, 8 and 11 in float32. It keeps b·h
of the most sharded layout between steps, and from the second layout on another 4·h, the reduced
sums, beside what the project's own engine has.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from benchmarks.switching.hotspa_moves import plan_moves, switch_of
from uspft.switching.move.moving import MovingEngine
from uspft.switching.move.switch import Switch, held_stock, owned_stock

if TYPE_CHECKING:
    from uspft.batch import Batch
    from uspft.engine.step import StepResult
    from uspft.parameters.shards import Shards


class StraightEngine(MovingEngine):
    """Weights and reduced gradients go from layout to layout, the last of which is their home."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._home = self.holders.shards
        self._moves: dict[tuple[object, ...], Switch] = {}
        self._gather = self._between(self._home, self._home, trained=False)
        self._at = self._home
        self._reduced: Tensor | None = None
        self._weights = self.weights().new_empty(self._gather.count_after)
        self._gather.copy(self.weights(), self._weights)

    def step(
        self,
        batches: Sequence[Batch],
        learning_rate: float,
        stop: bool,
        look: Callable[[], None] | None = None,
        **named: Any,
    ) -> StepResult:
        self._reduced = None  # of a step that failed

        def complete() -> None:
            self.bring_home()
            if look:
                look()

        result = super().step(batches, learning_rate, stop, complete, **named)
        began = time.perf_counter()
        self._gather.copy(self.weights(), self._weights)
        moved = result.switch_seconds + time.perf_counter() - began
        return replace(result, switch_seconds=moved)

    def fetch(self, shards: Shards) -> Tensor:
        if shards.layout.stored_as != self._at.layout.stored_as:
            self._weights = self._moved(self._weights, shards, trained=False)
            if self._reduced is not None:
                self._reduced = self._moved(self._reduced, shards, trained=True)
            self._at = shards
        return self._weights

    def _between(
        self,
        before: Shards,
        after: Shards,
        *,
        trained: bool,
        owned: tuple[bool, bool] = (True, False),
    ) -> Switch:
        """Return the switch from what ranks have under one layout to what they have under another.

        trained: whether of what trains alone. owned: whether it is what they own, before and after,
        and not all that they hold.
        """
        key = before.layout.stored_as, after.layout.stored_as, trained, owned
        if key not in self._moves:
            shapes = {n: self.shapes[n] for n in (self.trains if trained else self.shapes)}
            one, other = (
                owned_stock(shards, shapes) if own else held_stock(shards, shapes)
                for shards, own in zip((before, after), owned, strict=True)
            )
            moves = plan_moves(one, other, self._hosts, once_into_hosts=True)
            self._moves[key] = switch_of(moves, one, other, self.holders.everyone)
        return self._moves[key]

    def _moved(self, flat: Tensor, shards: Shards, *, trained: bool) -> Tensor:
        switch = self._between(self._at, shards, trained=trained, owned=(False, False))
        found = flat.new_empty(switch.count_after)
        switch.copy(flat, found)
        return found

    def give(self, shards: Shards, sums: Tensor) -> None:
        reduce = self._between(shards, shards, trained=True)
        pieces = sums.new_zeros(reduce.count_before)
        reduce.add(sums, pieces)
        if shards.layout.stored_as == self._home.layout.stored_as:
            self.gradients.add_(pieces)
            return
        reduce.copy(pieces, sums)
        self._reduced = sums if self._reduced is None else self._reduced.add_(sums)

    def bring_home(self) -> None:
        """Have owners' gradients complete, after the last layout of a step."""
        self.fetch(self._home)
        if self._reduced is not None:
            switch = self._between(self._home, self._home, trained=True, owned=(False, True))
            own = self._reduced.new_empty(switch.count_after)
            switch.copy(self._reduced, own)
            self.gradients.add_(own)
            self._reduced = None

"""The two ways of weights from one layout to the next, and of gradients back to their owners.

By owners: a layout gathers its parts from those who own them, and each owner gets the sum of what
all ranks have made of its piece: reduced, switched and accumulated in one. Straight, as HotSPa does
it: from layout to layout, weights as they are, gradients after they are reduced.

Bytes that a rank sends in a step on average, for each parameter of matrices that the degrees
divide, with b bytes of the compute type, n ranks, and layouts of tensor degrees t (c = n ÷ t copies
of each part) whose parts lie inside one another, from the least to the most sharded, T:

    by owners   Σ_t (1/t − 1/n) · (b + 4)
    straight    (1/t₁ − 1/T) · b  +  Σ_(t < T) 2 · (c − 1)/c · 1/t · 4  +  (1/T − 1/n) · (4 + b)

Of four ranks and tensor 1, 2 and 4 that is 6 and 9.5 in bfloat16, 8 and 11 in float32. Once into
hosts changes which links carry it, not how much.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from uspft.parameters.shards import owned_parts
from uspft.switching.move.moves import Stock, plan_moves, stock_of
from uspft.switching.move.switch import Switch

if TYPE_CHECKING:
    from uspft.comm import Group
    from uspft.layout import HeldAs
    from uspft.parameters.shards import Shards
    from uspft.switching.move.owners import Owners


class Switches:
    """The switches among what ranks own and hold under several layouts; each is planned once."""

    def __init__(
        self,
        owners: Owners,
        everyone: Group,
        hosts: Sequence[int] | None = None,
        *,
        once_into_hosts: bool = True,
    ) -> None:
        """hosts: a number of each rank's host; None for one host."""
        self._owners, self._everyone = owners, everyone
        self._hosts = tuple(hosts or (0,) * everyone.size)
        self._once = once_into_hosts
        self._stocks: dict[tuple[HeldAs, bool, bool], Stock] = {}
        self._made: dict[tuple[tuple[HeldAs, bool, bool], ...], Switch] = {}

    def from_owners(self, home: Shards, shards: Shards, *, trained: bool) -> Switch:
        """Return the switch to what ranks hold from what they own of what `home` gives them.

        trained: whether of what trains alone.
        """
        return self._between(home, shards, trained, owned=(True, False))

    def to_pieces(self, shards: Shards) -> Switch:
        """Return the switch from what ranks hold of what trains to what they own of it."""
        return self._between(shards, shards, True, owned=(False, True))

    def straight(self, before: Shards, after: Shards, *, trained: bool) -> Switch:
        """Return the switch from what ranks hold under one layout to another's."""
        return self._between(before, after, trained, owned=(False, False))

    def _between(
        self, before: Shards, after: Shards, trained: bool, owned: tuple[bool, bool]
    ) -> Switch:
        (one, other) = (
            (s.layout.held, trained, o) for s, o in zip((before, after), owned, strict=True)
        )
        if (one, other) not in self._made:
            stocks = self._stock(before, one), self._stock(after, other)
            moves = plan_moves(*stocks, self._hosts, once_into_hosts=self._once)
            self._made[one, other] = Switch(moves, *stocks, self._everyone)
        return self._made[one, other]

    def _stock(self, shards: Shards, key: tuple[HeldAs, bool, bool]) -> Stock:
        _, trained, owned = key
        if key not in self._stocks:
            names = self._owners.trained if trained else self._owners.shapes
            shapes = {name: self._owners.shapes[name] for name in names}
            parts = {name: owned_parts(shards, name, shape) for name, shape in shapes.items()}
            self._stocks[key] = parts if owned else stock_of(shards, shapes)
        return self._stocks[key]


class Route(Protocol):
    """A way of weights and gradients through the layouts of a step; all of it is collective."""

    def begin(self) -> None:
        """Forget what is left of a step that failed."""
        ...

    def fetch(self, shards: Shards) -> Tensor:
        """Return what this rank holds of all parameters under a layout, flat."""
        ...

    def give(self, shards: Shards, sums: Tensor) -> None:
        """Take what this rank has made of the gradients of what it holds, flat, which may change.

        Over all ranks each gradient is in it once.
        """
        ...

    def finish(self) -> None:
        """Have owners' gradients complete, after the last layout of a step."""
        ...

    def updated(self) -> None:
        """Take notice that owners' weights have changed."""
        ...


class ByOwners:
    """Each layout gathers from the owners, and its sums go back to them at once."""

    def __init__(self, owners: Owners, switches: Switches, home: Shards) -> None:
        self._owners, self._switches, self._home = owners, switches, home

    def begin(self) -> None:
        return

    def fetch(self, shards: Shards) -> Tensor:
        switch = self._switches.from_owners(self._home, shards, trained=False)
        weights = self._owners.weights()
        found = weights.new_empty(switch.count_after)
        switch.copy(weights, found)
        return found

    def give(self, shards: Shards, sums: Tensor) -> None:
        switch = self._switches.from_owners(self._home, shards, trained=True)
        switch.add(sums, self._owners.gradients)

    def finish(self) -> None:
        return

    def updated(self) -> None:
        return


class Straight:
    """Weights and reduced gradients go from layout to layout, the last of which is their home."""

    def __init__(self, owners: Owners, switches: Switches, home: Shards) -> None:
        self._owners, self._switches, self._home = owners, switches, home
        self._gather = switches.from_owners(home, home, trained=False)
        self._at, self._weights = home, owners.weights().new_empty(self._gather.count_after)
        self._sums: Tensor | None = None
        self.updated()

    def begin(self) -> None:
        self._sums = None

    def fetch(self, shards: Shards) -> Tensor:
        if shards.layout.held != self._at.layout.held:
            self._weights = self._moved(self._weights, shards, trained=False)
            if self._sums is not None:
                self._sums = self._moved(self._sums, shards, trained=True)
            self._at = shards
        return self._weights

    def _moved(self, flat: Tensor, shards: Shards, *, trained: bool) -> Tensor:
        switch = self._switches.straight(self._at, shards, trained=trained)
        found = flat.new_empty(switch.count_after)
        switch.copy(flat, found)
        return found

    def give(self, shards: Shards, sums: Tensor) -> None:
        reduce = self._switches.from_owners(shards, shards, trained=True)
        pieces = sums.new_zeros(reduce.count_before)
        reduce.add(sums, pieces)
        if shards.layout.held == self._home.layout.held:
            self._owners.gradients.add_(pieces)
            return
        reduce.copy(pieces, sums)
        self._sums = sums if self._sums is None else self._sums.add_(sums)

    def finish(self) -> None:
        self.fetch(self._home)
        if self._sums is None:
            return
        switch = self._switches.to_pieces(self._home)
        own = self._sums.new_empty(switch.count_after)
        switch.copy(self._sums, own)
        self._owners.gradients.add_(own)
        self._sums = None

    def updated(self) -> None:
        self._gather.copy(self._owners.weights(), self._weights)

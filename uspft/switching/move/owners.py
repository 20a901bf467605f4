"""What a rank owns of a model: float32 masters, Adam's moments and gradients, once in the world;
and the switches between what ranks own and what they hold under a layout.

DeepSpeed's ZeRO is not used. Its gradients come from its own hooks on parameters of one shape;
those that another puts into its buffers it ignores silently (stage 1 in bfloat16, 0.19.8).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from uspft.comm import total
from uspft.engine.state import GRADIENT, adamw, start_moments
from uspft.parameters.shards import owned, owned_parts
from uspft.switching.move.moves import Stock, plan_moves, stock_of
from uspft.switching.move.switch import Switch

if TYPE_CHECKING:
    from uspft.comm import Group
    from uspft.config import Recipe
    from uspft.layout import StoredAs
    from uspft.parameters.part import Shape
    from uspft.parameters.shards import Holders, Shards


class _Place(NamedTuple):
    """Where what this rank owns of a parameter lies: in its part, and among all that it owns."""

    start: int
    at: int
    elements: int


class Owners:
    """This rank's piece of every parameter, flat, and AdamW over those that train.

    Those that train come first, and of them those that are decayed.
    """

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        holders: Holders,
        recipe: Recipe,
        device: torch.device,
    ) -> None:
        """Take what the ranks own of a module that is filled with what they hold; collective."""
        shards = holders.shards
        self._everyone, self._device = holders.everyone, device
        self._dtype = getattr(torch, recipe.model.dtype)
        self._max_norm = recipe.training.max_grad_norm
        self.shapes: dict[str, Shape] = {name: holders.shapes[name] for name in _in_order(named)}
        """The whole shape of every parameter, in the order in which they lie."""
        self.trained = {name: None for name in self.shapes if named[name].requires_grad}
        """The names of those that train, in order."""
        self._places: dict[str, _Place] = {}
        pieces, at = [], 0
        for name, shape in self.shapes.items():
            values = named[name].detach().to(device)
            if holders.zero.size > 1:  # it is filled on one of them
                dist.broadcast(values, src=holders.zero.ranks[0], group=holders.zero.handle)
            _, (start, stop) = owned(shards, name, shape, holders.rank)
            self._places[name] = _Place(start, at, stop - start)
            pieces.append(values.flatten()[start:stop].clone())
            at += stop - start
        flat = torch.cat(pieces)
        trained = sum(self._places[name].elements for name in self.trained)
        self.masters = flat[:trained].to(torch.float32, copy=True)
        self._frozen = flat[trained:].clone()
        self.gradients = torch.zeros_like(self.masters)
        """The sum of what all ranks have made of this rank's piece of the gradient."""
        decayed = [name for name in self.trained if len(self.shapes[name]) > 1]
        self._decayed = sum(self._places[name].elements for name in decayed)
        self._groups = [
            _with_gradient(self.masters[among], self.gradients[among])
            for among in (slice(0, self._decayed), slice(self._decayed, trained))
        ]
        self.adam = adamw(self._groups[:1], self._groups[1:], recipe.optimizer)
        start_moments(self.adam)

    def weights(self) -> Tensor:
        """Return all that this rank owns, flat, in the compute type."""
        trained, frozen = len(self.masters), len(self._frozen)
        found = torch.empty(trained + frozen, dtype=self._dtype, device=self._device)
        found[:trained].copy_(self.masters)
        found[trained:].copy_(self._frozen)
        return found

    def fragment(self, name: str, kind: str) -> tuple[int, Tensor]:
        """Return (start in the part that the rank holds, flat values), as an engine does."""
        start, at, count = self._places[name]
        held = self.masters
        if name not in self.trained:
            if kind != "weight":
                raise RuntimeError(f"{name} is frozen and has no {kind}")
            held, at = self._frozen, at - len(self.masters)
        elif kind == GRADIENT:
            held = self.gradients
        elif kind != "weight":
            plain = len(self.shapes[name]) <= 1
            held = self.adam.state[self._groups[plain]][kind]
            at -= self._decayed if plain else 0
        return start, held[at : at + count]

    def update(self, most: float) -> float:
        """Clip the gradient and update, unless its norm is larger than most or not finite; return
        the norm before; collective."""
        own = float(torch.linalg.vector_norm(self.gradients, dtype=torch.float64))
        (squares,) = total([own * own], self._everyone, self._device)
        norm = math.sqrt(squares)
        if math.isfinite(norm) and norm <= most:
            if self._max_norm is not None:
                self.gradients.mul_(min(1.0, self._max_norm / (norm + 1e-6)))
            self.adam.step()
        return norm


def _with_gradient(values: Tensor, gradient: Tensor) -> nn.Parameter:
    found = nn.Parameter(values)
    found.grad = gradient
    return found


def _in_order(named: Mapping[str, nn.Parameter]) -> list[str]:
    """Return the names of what is decayed, of what else trains, and of what is frozen."""

    def kind(name: str) -> int:
        parameter = named[name]
        return 2 if not parameter.requires_grad else int(parameter.dim() <= 1)

    return sorted(named, key=kind)


class Switches:
    """The switches among what ranks own and hold under several layouts; each is planned once."""

    def __init__(self, owners: Owners, everyone: Group, hosts: Sequence[int] | None = None) -> None:
        """hosts: a number of each rank's host; None for one host."""
        self._owners, self._everyone = owners, everyone
        self._hosts = tuple(hosts or (0,) * everyone.size)
        self._stocks: dict[tuple[StoredAs, bool, bool], Stock] = {}
        self._made: dict[tuple[tuple[StoredAs, bool, bool], ...], Switch] = {}

    def from_owners(self, home: Shards, shards: Shards, *, trained: bool) -> Switch:
        """Return the switch to what ranks hold from what they own of what `home` gives them.

        trained: whether of what trains alone.
        """
        return self.between(home, shards, trained, owned=(True, False))

    def between(
        self, before: Shards, after: Shards, trained: bool, owned: tuple[bool, bool]
    ) -> Switch:
        """Return the switch from what ranks have under one layout to what they have under another.

        trained: whether of what trains alone. owned: whether it is what they own, before and after,
        and not all that they hold.
        """
        (one, other) = (
            (s.layout.stored_as, trained, o) for s, o in zip((before, after), owned, strict=True)
        )
        if (one, other) not in self._made:
            stocks = self._stock(before, one), self._stock(after, other)
            moves = plan_moves(*stocks, self._hosts, once_into_hosts=True)
            self._made[one, other] = Switch(moves, *stocks, self._everyone)
        return self._made[one, other]

    def _stock(self, shards: Shards, key: tuple[StoredAs, bool, bool]) -> Stock:
        _, trained, owned = key
        if key not in self._stocks:
            names = self._owners.trained if trained else self._owners.shapes
            shapes = {name: self._owners.shapes[name] for name in names}
            parts = {name: owned_parts(shards, name, shape) for name, shape in shapes.items()}
            self._stocks[key] = parts if owned else stock_of(shards, shapes)
        return self._stocks[key]

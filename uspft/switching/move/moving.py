"""An engine whose weights move between layouts inside a step, as a ZeRO-1 engine otherwise.

Every element of the float32 masters, Adam's moments and gradients is owned by one rank. The layouts
of a step run one after another, from the least to the most sharded. Each gathers from the owners
the parts that its ranks hold: the module's parameters are views of one flat tensor, which is freed
when the layout has run. The gradients of its micro-batches are summed in float32 in another flat
tensor, and then go to the owners: reduced, switched and accumulated in one.

Bytes on a rank, for p parameters that train, of which it holds h under a layout, with b bytes of
the compute type and n ranks: 16·p/n always, and (b + 4)·h while the layout runs; of frozen ones
b·p/n and b·h. What is under way comes on top, of at most BATCH_ELEMENTS of the parameters at a
time. Bytes that a rank sends in a step on average, for each parameter of matrices that the tensor
degrees t of the layouts divide: Σ_t (1/t − 1/n) · (b + 4), whichever links carry it. HotSPa's own
way, from layout to layout, sends more (benchmarks/switching/straight.py).

DeepSpeed's ZeRO is not used. Its gradients come from its own hooks on parameters of one shape;
those that another puts into its buffers it ignores silently (stage 1 in bfloat16, 0.19.8).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from uspft.engine.state import GRADIENT, adamw, start_moments
from uspft.engine.step import (
    Engine,
    LossModule,
    StageRunner,
    in_turn,
)
from uspft.parameters import counting
from uspft.parameters.shards import owned
from uspft.switching.move.switch import Switch, deliveries, held_stock, owned_stock

if TYPE_CHECKING:
    from uspft.batch import Batch
    from uspft.config import Recipe
    from uspft.layout import StoredAs
    from uspft.objective import Scales
    from uspft.parameters.part import Shape
    from uspft.parameters.shards import Holders, Shards


class MovingEngine(Engine):
    """An engine of owners, whose steps take micro-batches of several layouts."""

    stage = 1

    def __init__(
        self,
        module: LossModule,
        recipe: Recipe,
        holders: Holders,
        every: Sequence[Shards],
        device: torch.device,
        *,
        staged: Mapping[int, tuple[nn.Module, StageRunner]] | None = None,
        hosts: Sequence[int] | None = None,
    ) -> None:
        """Take over a module that is filled with what ranks hold under the most sharded layout;
        collective.

        holders: of that layout. every: who holds what under each of the layouts. staged: by how
        many stages there are, those of this rank as a module, and what runs them; where there is
        one, the module itself is. hosts: a number of each rank's host; None for one host. Raises
        ValueError for meshes, on which a model computes with the blocks of one, for divided
        experts, and for layouts of one degree of which some split tokens.
        """
        if meshes := [shards.layout.name() for shards in every if shards.layout.is_mesh]:
            raise ValueError(f"weights do not move to or from a mesh: {', '.join(meshes)}")
        if divided := [s.layout.name() for s in every if s.layout.experts > 1]:
            raise ValueError(f"weights do not move where experts are divided: {', '.join(divided)}")
        self.every = {shards.layout.stored_as: shards for shards in every}
        """Who holds what, by how ranks hold it."""
        for shards in every:
            if self.every[shards.layout.stored_as].splits_tokens != shards.splits_tokens:
                twice = f"tensor degree {shards.layout.tensor}"
                raise ValueError(f"of the layouts with {twice} some have use_seq_parallel, not all")
        self.module, self.holders, self.device = module, holders, device
        self._staged = {
            stages: (net.to(device), run) for stages, (net, run) in (staged or {}).items()
        }
        self._nets = [
            cast("nn.Module", module).to(device),
            *(net for net, _ in self._staged.values()),
        ]
        self.named, dtype = module.named(), getattr(torch, recipe.model.dtype)
        self.shapes: dict[str, Shape] = {n: holders.shapes[n] for n in _in_order(self.named)}
        """The whole shape of every parameter, in the order in which they lie."""
        self._own(recipe)
        self._hosts = hosts or [0] * holders.everyone.size
        self._switches: dict[tuple[StoredAs, bool], Switch] = {}
        self._nothing = torch.empty(0, dtype=dtype, device=device)
        self._here: Shards | None = None
        """The layout whose parts the module's parameters are."""
        self._sums: dict[str, tuple[Tensor, float]] = {}
        """Where each gradient is added up while a layout trains, and what it is multiplied by."""
        self._lap_of: list[int | None] = []
        """The micro-batch of each lap of the step's clock; None: a switch between layouts."""
        self._hooks = [
            self.named[name].register_post_accumulate_grad_hook(partial(self._add, name))
            for name in self.trains
        ]
        self._release()

    def _own(self, recipe: Recipe) -> None:
        """Take what this rank owns of what it holds: its piece of every parameter, flat, and AdamW
        over those that train; collective.

        Those that train come first, and of them those that are decayed.
        """
        shards, zero = self.holders.shards, self.holders.zero
        self._max_norm = recipe.training.max_grad_norm
        self.trains = {name: None for name in self.shapes if self.named[name].requires_grad}
        """The names of those that train, in order."""
        self._places: dict[str, _Place] = {}
        pieces, at = [], 0
        for name, shape in self.shapes.items():
            values = self.named[name].detach().to(self.device)
            if zero.size > 1:  # it is filled on one of them
                dist.broadcast(values, src=zero.ranks[0], group=zero.handle)
            _, (start, stop) = owned(shards, name, shape, self.holders.rank)
            self._places[name] = _Place(start, at, stop - start)
            pieces.append(values.flatten()[start:stop].clone())
            at += stop - start
        flat = torch.cat(pieces)
        trained = sum(self._places[name].elements for name in self.trains)
        self.masters = flat[:trained].to(torch.float32, copy=True)
        self._frozen = flat[trained:].clone()
        self.gradients = torch.zeros_like(self.masters)
        """The sum of what all ranks have made of this rank's piece of the gradient."""
        decayed = [name for name in self.trains if len(self.shapes[name]) > 1]
        self._decayed = sum(self._places[name].elements for name in decayed)
        self._groups = [
            _with_gradient(self.masters[among], self.gradients[among])
            for among in (slice(0, self._decayed), slice(self._decayed, trained))
        ]
        self.adam = adamw(self._groups[:1], self._groups[1:], recipe.optimizer)
        start_moments(self.adam)

    def _add(self, name: str, parameter: Tensor) -> None:
        """Take a parameter's gradient away as soon as a backward pass has made it."""
        place, share = self._sums[name]
        assert parameter.grad is not None
        place.add_(parameter.grad, alpha=share)
        parameter.grad = None

    def fragment(self, name: str, kind: str) -> tuple[int, Tensor]:
        start, at, count = self._places[name]
        held = self.masters
        if name not in self.trains:
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

    def make_moments(self, empty: Batch) -> None:
        """Do nothing, since owners have them from the beginning."""

    def run(self, batches: Sequence[Batch], scales: Scales) -> Tensor:
        """Run a step as `Engine.run` says; the layouts of all ranks' micro-batches must store the
        parameters in the same ways."""
        self.gradients.zero_()
        sums = torch.zeros(len(scales), dtype=torch.float64, device=self.device)
        self._lap_of.clear()
        for shards, own in self._turns(batches):
            with self._training(shards):
                self.laps.mark()
                here = [batches[number] for number in own]
                sums += (self.stages_for(here[0]) or in_turn)(self, here, scales)
            self.laps.mark()
            self._lap_of += [None, *own, None]
        return sums

    def update(self, most: float) -> float:
        own = float(torch.linalg.vector_norm(self.gradients, dtype=torch.float64))
        (squares,) = self.total(own * own)
        norm = math.sqrt(squares)
        if math.isfinite(norm) and norm <= most:
            if self._max_norm is not None:
                self.gradients.mul_(min(1.0, self._max_norm / (norm + 1e-6)))
            self.adam.step()
        return norm

    def seconds(self, batches: int) -> tuple[tuple[float, ...], float]:
        took: dict[int | None, float] = dict.fromkeys([None, *range(batches)], 0.0)
        for of, seconds in zip(self._lap_of, self.laps.seconds(), strict=True):
            took[of] += seconds
        return tuple(took[number] for number in range(batches)), took[None]

    def _turns(self, batches: Sequence[Batch]) -> list[tuple[Shards, list[int]]]:
        """Return the numbers of each layout's micro-batches, the least sharded first; collective.

        Raises RuntimeError where another rank has other layouts, ValueError for one that the engine
        was not made with.
        """
        for batch in batches:
            if batch.world.layout.stored_as not in self.every:
                known = ", ".join(shards.layout.name() for shards in self.every.values())
                raise ValueError(f"weights move between {known}, not to {batch.world.name}")
        place = {key: number for number, key in enumerate(sorted(self.every))}
        keys = [batch.world.layout.stored_as for batch in batches]
        turns = [
            (self.every[key], [number for number, one in enumerate(keys) if one == key])
            for key in sorted(set(keys))
        ]
        mine = float(sum(1 << place[shards.layout.stored_as] for shards, _ in turns))
        numbers, squares = self.total(mine, mine * mine)
        alike = numbers * numbers == squares * self.holders.everyone.size  # just where all are
        if not alike:
            raise RuntimeError("ranks run micro-batches in different layouts: an error in uspft")
        return turns

    @contextmanager
    def _training(self, shards: Shards) -> Iterator[None]:
        """Have the module's parameters be a layout's parts, whose gradients then go to owners."""
        self._bind(shards)
        degree, split = shards.layout.tensor, shards.splits_tokens
        count = self._switch(shards, trained=True).count_after
        sums = torch.zeros(count, device=self.device)
        for name, place in self._parts_of(sums, shards, self.trains):
            times = counting.times(shards, name, degree, splits_tokens=split)
            self._sums[name] = place, 1 / times
        try:
            yield
        finally:
            self._release()
        self.give(shards, sums)

    def weights(self) -> Tensor:
        """Return all that this rank owns, flat, in the compute type."""
        trained, frozen = len(self.masters), len(self._frozen)
        found = torch.empty(trained + frozen, dtype=self._nothing.dtype, device=self.device)
        found[:trained].copy_(self.masters)
        found[trained:].copy_(self._frozen)
        return found

    def fetch(self, shards: Shards) -> Tensor:
        """Return what this rank holds of all parameters under a layout, flat; collective."""
        weights = self.weights()
        switch = self._switch(shards, trained=False)
        found = weights.new_empty(switch.count_after)
        switch.copy(weights, found)
        return found

    def give(self, shards: Shards, sums: Tensor) -> None:
        """Give owners what this rank has made of the gradients of what it holds under a layout,
        flat, which may change; collective. Over all ranks each gradient is in it once."""
        self._switch(shards, trained=True).add(sums, self.gradients)

    def _switch(self, shards: Shards, *, trained: bool) -> Switch:
        """Return the switch from what ranks own to what they hold under a layout, which is planned
        once. trained: whether of what trains alone."""
        key = shards.layout.stored_as, trained
        if key not in self._switches:
            shapes = {n: self.shapes[n] for n in (self.trains if trained else self.shapes)}
            own, held = owned_stock(self.holders.shards, shapes), held_stock(shards, shapes)
            moves = deliveries(own, held, self._hosts)
            self._switches[key] = Switch(moves, own, held, self.holders.everyone)
        return self._switches[key]

    def _bind(self, shards: Shards) -> None:
        for name, values in self._parts_of(self.fetch(shards), shards, self.shapes):
            self.named[name].data = values
        self._here = shards

    def _parts_of(
        self, flat: Tensor, shards: Shards, names: Iterable[str]
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter's part under a layout as a view of a flat tensor of all of them."""
        at = 0
        for name in names:
            part = shards.part(name, self.shapes[name], self.holders.rank)
            yield name, flat[at : at + part.count].view(part.size)
            at += part.count

    def _release(self) -> None:
        """Have the module's parameters be nothing, so that no layout's weights outlive it."""
        for parameter in self.named.values():
            parameter.data, parameter.grad = self._nothing, None
        self._here = None
        self._sums.clear()

    def forward(self, batch: Batch, scales: Scales) -> Tensor:
        return self.module(batch, scales)

    def take(self, batch: Batch, scales: Scales, stage: int | None, x: Tensor | None) -> Tensor:
        """Take a micro-batch through a stage of its layout, as that module's forward does."""
        net, _ = self._staged[batch.world.layout.pipeline]
        made: Tensor = net(batch, scales, stage, x)
        return made

    def backward(self, loss: Tensor, batch: Batch, *, last: bool) -> None:
        loss.backward()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        for net in self._nets:
            net.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self._release()
            for net in self._nets:
                net.train()
            self.holders.everyone.books.close()  # what came for this is of no training step

    def stages_for(self, batch: Batch) -> StageRunner | None:
        _, run = self._staged.get(batch.world.layout.pipeline, (None, None))
        return run

    def terms(self, batch: Batch) -> dict[str, float]:
        shards = self.every[batch.world.layout.stored_as]
        if self._here is not shards:
            self._release()
            self._bind(shards)
        return super().terms(batch)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


class _Place(NamedTuple):
    """Where what this rank owns of a parameter lies: in its part, and among all that it owns."""

    start: int
    at: int
    elements: int


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

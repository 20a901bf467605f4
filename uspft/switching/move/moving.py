"""The engine of `switching: move`, whose weights move between layouts inside a step; apart from
that it is a ZeRO-1 engine.

Every element of the float32 master weights, Adam's moments and the gradients has one owner among
the ranks. The layouts of a step run one after another, from the least to the most sharded. Each
gathers its shards of the weights from the owners: the module's parameters are views of one flat
tensor, which is freed when the layout has run. The gradients of its micro-batches are summed in
float32 in another flat tensor, which is then reduced to the owners.

Memory of a rank, for p trained parameters of which its shards have h in a layout, with b bytes per
element of the compute dtype and n ranks: 16·p/n bytes always, and (b + 4)·h while the layout runs;
for frozen parameters b·p/n and b·h. Transfer buffers come on top, for at most BATCH_ELEMENTS of the
parameters at a time. A rank sends on average, per step and parameter of matrices that tensor
degrees t divide, Σ_t (1/t − 1/n) · (b + 4) bytes. HotSPa's direct switches between layouts send
more (benchmarks/switching/straight.py).

DeepSpeed's ZeRO is not used: it takes gradients only from its own hooks on parameters of fixed
shapes, and silently ignores those written into its buffers (stage 1 in bfloat16, 0.19.8).
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
    from uspft.parameters.shards import Holders, Shards
    from uspft.tensor.parts import Shape


class MovingEngine(Engine):
    """An engine whose step runs micro-batches of several layouts, with weights that move."""

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
        """Take over a module that is filled with its shards in the most sharded layout; collective.

        holders: of that layout. every: the shards of each layout. staged: for each number of
        pipeline stages above 1, this rank's stages as a module and their runner. hosts: the index
        of each rank's host; None: one host.
        """
        self.every = {shards.layout.stored_as: shards for shards in every}
        """The shards of each layout, by `Layout.stored_as`."""
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
        """The whole shape of every parameter, in the order of the flat tensors."""
        self._own(recipe)
        self._hosts = hosts or [0] * holders.everyone.size
        self._switches: dict[tuple[StoredAs, bool], Switch] = {}
        self._nothing = torch.empty(0, dtype=dtype, device=device)
        self._here: Shards | None = None
        """The layout whose shards the module's parameters are; None: they are empty."""
        self._sums: dict[str, tuple[Tensor, float]] = {}
        """The sum to which each gradient is added while a layout trains, and its factor."""
        self._lap_of: list[int | None] = []
        """The micro-batch of each lap of the step's clock; None: a switch between layouts."""
        self._hooks = [
            self.named[name].register_post_accumulate_grad_hook(partial(self._add, name))
            for name in self.trains
        ]
        self._release()

    def _own(self, recipe: Recipe) -> None:
        """Copy the elements that this rank owns into flat tensors, and make AdamW for those that
        train; collective.

        Trained parameters come first, and among them those with weight decay.
        """
        shards, zero = self.holders.shards, self.holders.zero
        self._max_norm = recipe.training.max_grad_norm
        self.trains = {name: None for name in self.shapes if self.named[name].requires_grad}
        """The names of the trained parameters, in order."""
        self._places: dict[str, _Place] = {}
        pieces, at = [], 0
        for name, shape in self.shapes.items():
            values = self.named[name].detach().to(self.device)
            if zero.size > 1:  # only one of these ranks has its values
                dist.broadcast(values, src=zero.ranks[0], group=zero.handle)
            start, stop = owned(shards, name, shape, self.holders.rank)
            self._places[name] = _Place(start, at, stop - start)
            pieces.append(values.flatten()[start:stop].clone())
            at += stop - start
        flat = torch.cat(pieces)
        trained = sum(self._places[name].elements for name in self.trains)
        self.masters = flat[:trained].to(torch.float32, copy=True)
        self._frozen = flat[trained:].clone()
        self.gradients = torch.zeros_like(self.masters)
        """The gradient of the elements that this rank owns, summed over all ranks."""
        decayed = [name for name in self.trains if len(self.shapes[name]) > 1]
        self._decayed = sum(self._places[name].elements for name in decayed)
        self._groups = [
            _with_gradient(self.masters[among], self.gradients[among])
            for among in (slice(0, self._decayed), slice(self._decayed, trained))
        ]
        self.adam = adamw(self._groups[:1], self._groups[1:], recipe.optimizer)
        start_moments(self.adam)

    def _add(self, name: str, parameter: Tensor) -> None:
        """Add a parameter's gradient to its sum and free it, as soon as the backward has computed
        it."""
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
        """Do nothing: owners always have moments."""

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
        """Return each layout with the indices of its micro-batches, the least sharded first."""
        keys = [batch.world.layout.stored_as for batch in batches]
        return [
            (self.every[key], [number for number, one in enumerate(keys) if one == key])
            for key in sorted(set(keys))
        ]

    @contextmanager
    def _training(self, shards: Shards) -> Iterator[None]:
        """Bind the module's parameters to a layout's shards within the `with` block, and then send
        their gradients to the owners."""
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
        """Return the weights that this rank owns, flat, in the compute dtype."""
        trained, frozen = len(self.masters), len(self._frozen)
        found = torch.empty(trained + frozen, dtype=self._nothing.dtype, device=self.device)
        found[:trained].copy_(self.masters)
        found[trained:].copy_(self._frozen)
        return found

    def fetch(self, shards: Shards) -> Tensor:
        """Return this rank's shards of all parameters in a layout, flat; collective."""
        weights = self.weights()
        switch = self._switch(shards, trained=False)
        found = weights.new_empty(switch.count_after)
        switch.copy(weights, found)
        return found

    def give(self, shards: Shards, sums: Tensor) -> None:
        """Reduce gradients to their owners; collective. sums: this rank's partial gradients of its
        shards in a layout, flat, such that the sum over ranks is the gradient; overwritten."""
        self._switch(shards, trained=True).add(sums, self.gradients)

    def _switch(self, shards: Shards, *, trained: bool) -> Switch:
        """Return the switch between owners and a layout's shards, planned once. trained: whether it
        covers only trained parameters."""
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
        """Make the module's parameters empty, so that a layout's weights are freed after it."""
        for parameter in self.named.values():
            parameter.data, parameter.grad = self._nothing, None
        self._here = None
        self._sums.clear()

    def forward(self, batch: Batch, scales: Scales) -> Tensor:
        return self.module(batch, scales)

    def take(self, batch: Batch, scales: Scales, stage: int | None, x: Tensor | None) -> Tensor:
        """Run a micro-batch through one pipeline stage of its layout."""
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
            self.holders.everyone.books.close()  # these bytes are not part of a training step

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
    """The position of the elements of a parameter that this rank owns: `start` in its shard of the
    parameter, and `at` in the flat tensor of all that it owns."""

    start: int
    at: int
    elements: int


def _with_gradient(values: Tensor, gradient: Tensor) -> nn.Parameter:
    found = nn.Parameter(values)
    found.grad = gradient
    return found


def _in_order(named: Mapping[str, nn.Parameter]) -> list[str]:
    """Return the names of parameters with weight decay, then the other trained ones, then the
    frozen ones."""

    def kind(name: str) -> int:
        parameter = named[name]
        return 2 if not parameter.requires_grad else int(parameter.dim() <= 1)

    return sorted(named, key=kind)

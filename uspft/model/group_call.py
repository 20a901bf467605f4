"""A block that computes one group of heads at a time, to need less memory: its forward and
backward, as far as attention and layers with a state (gated delta nets) have them in common.

Shapes, as suffixes: t this rank's tokens, n those of a tile; H/G all query/KV heads of this tensor
rank (value/key heads in a layer with a state), N some of either; D head dim, d hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from uspft.families.projections import BEFORE, BEHIND, ROWS
from uspft.model.divided import PartLinear
from uspft.model.halves import (
    BlockInput,
    Given,
    Halves,
    Hook,
    StandIn,
    own_forward,
    standing_in,
    stops,
    until_ended,
)
from uspft.model.some_heads import Piece, SomeHeads, seeing_some, some_of
from uspft.model.tiles import TOKENS, TiledCall, add_up, of_all_ranks, put_of_all_ranks

if TYPE_CHECKING:
    from uspft.blocks import HeadRange
    from uspft.model.attention import Bound
    from uspft.sequence import Heads


class GroupedBlock:
    """The replacement of an attention block's forward, with or without its norms and residual,
    which computes in groups of heads."""

    def __init__(
        self,
        some: SomeHeads,
        at_once: int,
        heads: Heads,
        tile: int | None,
        kind: Callable[[Bound], type[BlockCall]],
        halves: Halves | None = None,
    ) -> None:
        """at_once: the number of query heads that are computed at once for each KV head. heads:
        those of the model's attention, before tensor ranks divide them. tile: the number of tokens
        of a tile; None: all at once. kind: returns the class of a call of the block. halves: the
        layer's two halves, if the block is the whole first half; None: the block is the attention
        module alone."""
        self.some, self.at_once, self.heads, self.tile, self.kind = some, at_once, heads, tile, kind
        self.attention, self._halves = some.attention, halves
        self.module = halves.layer if halves else self.attention
        """The module whose forward is run, up to attention, on the block's input."""
        self.run = own_forward(self.module)
        """That module's forward, which a hook may end by an exception."""
        self.parameters_of: list[nn.Module] = halves.first if halves else [self.module]
        """The modules whose parameters the block uses."""
        self.last: Any = self.attention.get_submodule(some.last)
        self.before: list[nn.Module] = halves.norms_in if halves else []
        """The norm before attention, if the block has one."""
        self.behind = [self.last, *(halves.norms_behind if halves else [])]
        """The modules after attention: the output projection, and a norm if there is one."""
        divided = (one for one in self.attention.modules() if isinstance(one, PartLinear))
        self._call = next((one.call for one in divided), None)

    def again_with(self, bound: Bound) -> AbstractContextManager[None]:
        """Return the context in which divided modules take part in an earlier pass once more: in a
        pipeline the layer may have begun that of another micro-batch since."""
        return standing_in([StandIn(vars(self._call), "bound", bound)] if self._call else [])

    def __call__(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        bound: Bound | Hook = kwargs["uspft"]
        if isinstance(bound, Hook):
            return self.run(hidden_states, **kwargs)
        out = bound.leave(self.attend(hidden_states, kwargs))
        return out if self.some.has_state else (out, None)

    def attend(self, x: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """Return the block's output for x [1, t, d]; differentiable."""
        parameters = [p for m in self.parameters_of for p in m.parameters() if p.requires_grad]
        keeps = torch.is_grad_enabled() and (x.requires_grad or bool(parameters))
        call = self.kind(kwargs["uspft"])(self, x, parameters, kwargs, keeps=keeps)
        out: Tensor = _InGroups.apply(call, x, *parameters)
        return out

    def whole(self, x: Tensor, made: Tensor) -> Tensor:
        """Return the block's output. x: its input. made: the output projection's output."""
        return self._halves.joined(x, made) if self._halves else made

    def left(self, made: Tensor, bound: Bound) -> Tensor:
        """Return the output projection's output, summed over tensor ranks if the block has to."""
        return bound.leave(made) if self._halves else made


class BlockCall(ABC):
    """One call of a block: its forward and, on a copy of the call, its backward, which is
    last_projection, then groups, then first_projections."""

    heads: Heads
    """The heads of this tensor rank."""
    leaves: list[Tensor]
    """The tensors that replace the trained parameters in the backward."""
    ranks = 1
    """The number of tensor ranks whose tokens are gathered for a tile; 1 if all have the same."""

    def __init__(
        self,
        block: GroupedBlock,
        x: Tensor,
        parameters: list[nn.Parameter],
        kwargs: dict[str, Any],
        *,
        keeps: bool,
    ) -> None:
        """keeps: whether a backward follows."""
        self.block, self.keeps = block, keeps
        self._kwargs = dict(kwargs)
        self.bound: Bound = self._kwargs.pop("uspft")
        tile = max(1, (block.tile or self.ranks * x.shape[TOKENS]) // self.ranks)
        whole = nn.ModuleList(block.parameters_of)
        self.tiles = TiledCall(whole, None, tile, parameters, TOKENS, self.ranks)
        self.come = self.bound.shelf.coming() if self.bound.shelf and keeps else lambda: None

    @abstractmethod
    def all_out(self, x: Tensor) -> list[Tensor]:
        """Return the output [t, H, D] of attention or of the delta rule, and the other tensors of
        the forward that the backward needs."""

    def kept(self) -> list[Tensor]:
        """Return further tensors to save for the backward; called once."""
        return []

    @abstractmethod
    def before(self, x: Tensor, tile: slice, entry: BlockInput | None = None) -> list[Tensor]:
        """Return the inputs of attention or of the delta rule for a tile of x, for the heads whose
        projections are in place. entry: receives the block's input."""

    def spans(self, x: Tensor) -> Iterator[tuple[slice, Any]]:
        """Yield each tile of tokens, and a context that tells dropouts which tokens these are."""
        for start, length in self.tiles.spans(x):
            yield slice(start, start + length), self.tiles.of_tile(start, length)

    def made_of(
        self,
        x: Tensor,
        places: Sequence[StandIn] = (),
        norms: Sequence[Any] = (),
        form: Callable[[list[Tensor]], list[Tensor]] = list,
    ) -> list[Tensor]:
        """Return the results of `before` for all tokens, computed tile by tile.

        places: modules that replace the block's meanwhile. norms: those of them that must know the
        tile. form: a function that selects what is kept of a tile's results.
        """
        every: list[Tensor] = []
        with standing_in(places):
            for tile, told in self.spans(x):
                for norm in norms:
                    norm.tile = tile
                with told:
                    found = form(self.before(x[:, tile], tile))
                if not every:
                    tokens = len(self.bound.tokens)
                    every = [one.new_empty(tokens, *one.shape[1:]) for one in found]
                for whole, part in zip(every, found, strict=True):
                    put_of_all_ranks(whole, tile, self.ranks, part)
                del found
        return every

    def part(self, whole: Tensor, tile: slice, dim: int = 0) -> Tensor:
        """Return a tile's part of a tensor of all tokens, as blocks see it."""
        return of_all_ranks(whole, tile, self.ranks, dim)

    def run_up_to(
        self, hook: Hook, x: Tensor, tile: slice, entry: BlockInput | None = None
    ) -> None:
        """Run the block's original forward on a tile of x until the hook ends it. entry: as in
        `before`."""
        kwargs = dict(self._kwargs)
        if angles := kwargs.get("position_embeddings"):
            kwargs["position_embeddings"] = tuple(self.part(one, tile, 1) for one in angles)
        if (places := kwargs.get("position_ids")) is not None:
            kwargs["position_ids"] = self.part(places, tile, 1)
        if entry and self.block.module is self.block.attention:
            x = entry.take(x)
        hook.entry = entry
        until_ended(self.block.run, hidden_states=x, **kwargs, uspft=hook)

    @property
    def every(self) -> tuple[Sequence[HeadRange], Sequence[int]]:
        """All query heads, and all KV heads."""
        return ((0, self.heads.query),), range(self.heads.kv)

    def taken(
        self,
        x: Tensor,
        tile: slice,
        out: Tensor,
        some: tuple[Sequence[HeadRange], Sequence[int]] | None = None,
        entry: BlockInput | None = None,
    ) -> Tensor:
        """Return the output projection's input [1, n, N · D] for a tile. x: the tile of the block's
        input, of which gates are made. out: attention's output [n, N, D]. some: the query and KV
        heads in `out`; None: all. entry: as in `before`."""
        heads = self.block.some
        if not heads.gated:
            return out.flatten(1)[None]
        found: list[Tensor] = []
        places = heads.projections(self.heads, *(some or self.every), BEHIND)
        places.append(StandIn(self.block.attention._modules, heads.last, stops(found)))
        with standing_in(places):
            self.run_up_to(Given(self.bound.softcap, out), x, tile, entry)
        return found[0]

    def projected(self, taken: Tensor) -> Tensor:
        """Return the output projection of [1, n, H · D], without calling the module's hooks."""
        made: Tensor = self.block.last.forward(taken)
        return made

    def slope(
        self, x: Tensor, dh: Tensor, made: Tensor | None = None, leaves: Sequence[Tensor] = ()
    ) -> tuple[Tensor | None, ...]:
        """Return a tile's gradients of x through the residual alone, of the output projection's
        output, and of the leaves after it. made: that output; None if they do not depend on it."""
        made = dh.new_zeros(()).expand(dh.shape) if made is None else made.detach()
        inputs = x.detach().requires_grad_(), made.requires_grad_()
        with torch.enable_grad():
            whole = self.block.whole(*inputs)
        return torch.autograd.grad(whole, [*inputs, *leaves], dh, allow_unused=True)

    def begin_backward(self, x: Tensor, found: list[Tensor], dh: Tensor) -> None:
        """Set what the backward starts from. x: the block's input. found: the result of all_out,
        which this empties. dh: the gradient of the block's output."""
        self._x, self._dh = x, dh
        self._out = found.pop(0)
        self.sums: list[Tensor | None] = [None] * len(self.tiles.parameters)
        self._slopes: Tensor | None = None
        """The gradient of the output projection's output, if a norm follows it."""
        self.gates: Tensor | None = None
        """The gradient of the block's input through gates, which are applied after attention; None
        without gates. The gradient through attention is added to it later, so that ranks sum both
        at once."""

    def last_projection(self, *, wanted: bool) -> None:
        """Sum the gradients of the weights after attention, while attention's output is in memory;
        if there is a norm, keep the gradient of its input. wanted: whether the gradient of the
        block's input is wanted."""
        x = self._x
        projection, *norms = (self.leaves_of(module) for module in self.block.behind)
        gated = self.block.some.gated
        after = [n for norm in norms for n in norm]
        if gated:
            wanted_of = [n for n in range(len(self.leaves)) if n not in after]
            wanted = wanted or any(map(self.leaves_of, self.block.before))
            self.gates = torch.empty_like(x) if wanted else None
        else:
            wanted_of = projection
        if norms:
            self._slopes = torch.empty_like(self._dh)
        elif not (wanted_of or self.gates is not None):
            return
        for tile, told in self.spans(x):
            entry = BlockInput(ends=True) if gated else None
            with told, torch.enable_grad():
                taken = self.taken(x[:, tile], tile, self._out[tile], None, entry)
                made = self.projected(taken)
            del taken
            of = x[:, tile], self._dh[:, tile], made if norms else None
            _, slope, *found = self.slope(*of, [self.leaves[n] for n in after])
            assert slope is not None
            if self._slopes is not None:
                self._slopes[:, tile] = slope
            inputs = [self.leaves[n] for n in wanted_of]
            if entry and self.gates is not None:
                inputs.append(entry.x)
            if inputs and made.requires_grad:
                own = [*torch.autograd.grad(made, inputs, slope, allow_unused=True)]
                if self.gates is not None:
                    self.gates[:, tile] = own.pop()
                found += own
                del own
            del made, inputs, entry
            self.sum_up([*after, *wanted_of], found)

    def leaves_of(self, module: nn.Module) -> list[int]:
        """Return the indices of a module's parameters among those that train."""
        own = {id(p) for p in module.parameters()}
        return [n for n, leaf in enumerate(self.leaves) if id(leaf) in own]

    def sum_up(self, places: Sequence[int], found: Sequence[Tensor | None]) -> None:
        """Add the gradients that a tile has of the trained parameters at these places."""
        by_place = dict(zip(places, found, strict=False))
        add_up(self.sums, [by_place.get(n) for n in range(len(self.leaves))])

    @abstractmethod
    def groups(self) -> None:
        """Compute the gradients of the inputs of attention or of the delta rule, one group of heads
        at a time; the gradient of queries (or values) overwrites the saved output."""

    def out_slope(self, queries: Sequence[HeadRange], keys: Sequence[int]) -> Tensor:
        """Return the gradient of some heads' output [t, N, D], through their columns of the output
        projection."""
        block, dim = self.block, self.heads.dim
        columns = [(a * dim, b * dim) for a, b in queries]
        width = sum(b - a for a, b in queries)
        found = self._x.new_empty(self._x.shape[1], width, dim)
        pieces = [Piece(*one) for one in columns]
        places = some_of(block.attention, block.some.last, ROWS, pieces)
        projection = places[0]
        for tile, told in self.spans(self._x):
            slope = self._slope(tile)
            if block.some.gated:
                out = pick(self._out[tile], queries).detach().requires_grad_()
            else:
                out = slope.new_empty(slope.shape[1], width, dim).requires_grad_()
            with told, torch.enable_grad(), frozen(self.leaves):
                taken = self.taken(self._x[:, tile].detach(), tile, out, (queries, keys))
                with standing_in([*seeing_some(block.last, columns), *places]):
                    of_all = projection.table[projection.name]
                    module = block.attention._modules[block.some.last]
                    made = (of_all if module is of_all else module.forward)(taken)
                del taken
                (found[tile],) = torch.autograd.grad(made, out, slope)
            del made, out
        return found

    def _slope(self, tile: slice) -> Tensor:
        """Return the gradient of the output projection's output for a tile."""
        if self._slopes is not None:
            return self._slopes[:, tile]
        _, slope = self.slope(self._x[:, tile], self._dh[:, tile])
        assert slope is not None
        return slope

    @abstractmethod
    def slopes_before(self, tile: slice, made: list[Tensor]) -> list[Tensor]:
        """Return the gradients of `made`, a tile's inputs of attention or of the delta rule; both
        lists may be extended."""

    def first_projections(self, *, wanted: bool) -> Tensor | None:
        """Return the gradient of the block's input, and sum those of the weights before attention.

        If it has as many elements as the queries' gradient, it overwrites that one.
        """
        x, out, gates = self._x, self._out, self.gates
        dx = out.view(x.shape) if out.numel() == x.numel() else torch.empty_like(x)
        dx = dx if gates is None else gates
        places = self.block.some.projections(self.heads, *self.every, BEFORE)
        for tile, told in self.spans(x):
            part = x[:, tile].detach().requires_grad_(wanted)
            entry = BlockInput(ends=False) if gates is not None else None
            with told, torch.enable_grad(), standing_in(places):
                made = self.before(part, tile, entry)
            slopes = self.slopes_before(tile, made)
            if entry and gates is not None:
                made.append(entry.x)
                slopes.append(gates[:, tile])
            able = [n for n, one in enumerate(made) if one.requires_grad]
            found = torch.autograd.grad(
                [made[n] for n in able],
                [*[part] * wanted, *self.leaves],
                [slopes[n] for n in able],
                allow_unused=True,
            )
            del made, slopes, entry
            if wanted:
                residual, _ = self.slope(x[:, tile], self._dh[:, tile])
                dx[:, tile] = found[0] if residual is None else residual + found[0]
                del residual
            add_up(self.sums, found[wanted:])
            del part, found
        return dx if wanted else None


class _InGroups(torch.autograd.Function):
    """The autograd function of a block."""

    @staticmethod
    def forward(ctx: Any, call: BlockCall, x: Tensor, *parameters: Tensor) -> Tensor:
        layer, bound = id(call.block.module), call.bound
        found = bound.recalled(layer) if call.keeps else None
        if found is None:
            found = call.all_out(x)
            if call.keeps:
                bound.remember(layer, found)
        out = found[0]
        whole = torch.empty_like(x)
        for tile, told in call.spans(x):
            with told:
                taken = call.taken(x[:, tile], tile, call.part(out, tile))
                made = call.block.left(call.projected(taken), bound)
                del taken
                whole[:, tile] = call.block.whole(x[:, tile], made)
                del made
        ctx.call = call
        ctx.save_for_backward(x, *found, *call.kept())
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor | None, ...]:
        # a copy, freed with everything that the backward stores in it
        call: BlockCall = copy(ctx.call)
        x, *found = ctx.saved_tensors
        call.begin_backward(x, found, dh)
        wanted = ctx.needs_input_grad[1]
        with call.tiles.leaves() as call.leaves:
            call.last_projection(wanted=wanted)
            call.groups()
            call.come()
            dx = call.first_projections(wanted=wanted)
        return None, dx, *call.tiles.gradients(call.sums)


@contextmanager
def frozen(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Turn requires_grad off for leaves within the `with` block, so that autograd saves nothing for
    their gradients."""
    for leaf in leaves:
        leaf.requires_grad_(False)
    try:
        yield
    finally:
        for leaf in leaves:
            leaf.requires_grad_()


def put(whole_tND: Tensor, heads: Sequence[HeadRange], part_tND: Tensor) -> None:
    """Copy some heads to their positions among all heads."""
    at = 0
    for a, b in heads:
        whole_tND[:, a:b] = part_tND[:, at : at + b - a]
        at += b - a


def pick(whole_tND: Tensor, heads: Sequence[HeadRange]) -> Tensor:
    """Return some of all heads, contiguous."""
    parts = [whole_tND[:, a:b] for a, b in heads if a < b]
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, dim=1)

"""Blocks of split matrices that work on copies of their tokens by turns (`fine_grain_interleave`).

Each rank's own tokens are dealt out into as many copies. What works token by token, the projections
around attention and the MLP, takes one copy after another, while the transfers of others are under
way; attention between them is whole. The bytes that are sent are the same.

Shapes, as suffixes: T tokens that the tensor ranks have together, t one rank's of those; d hidden
size, f features of a projection on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from uspft.tensor.interleaved import Crossing, into_block, out_of_block
from uspft.tensor.parts import tokens_of_each

if TYPE_CHECKING:
    from uspft.model.attention import Bound
    from uspft.model.divided import Call

PlainForward = Callable[..., Tensor]


class _UnderWay(NamedTuple):
    """A copy on its way."""

    crossing: Crossing
    begun: Tensor

    def arrived(self) -> Tensor:
        return self.crossing.awaited(self.begun)


def interleave(owner: Any, last: str, block: str, columns: Sequence[str], call: Call) -> None:
    """Make a block take its tokens in as many copies as its call says, where these are several.

    last: the name of its projection out. columns: of those into it.
    """
    if block.startswith("mlp"):
        owner.forward = _TokenByToken(owner.forward, call)
        return
    into = _IntoAttention(owner, columns, call)
    owner.register_forward_pre_hook(into.begin, with_kwargs=True)
    out = owner.get_submodule(last)
    out.forward = _OutOfAttention(out.forward, call)


def _entering(bound: Bound, x_td: Tensor) -> list[_UnderWay]:
    """Begin to let every copy of this rank's tokens into a block."""
    group, tensor = bound.world.mesh.columns, bound.world.tensor
    sizes = _sizes(len(x_td), tensor.copies)
    ways = [into_block(group, splits_tokens=tensor.splits_tokens) for _ in sizes]
    parts = x_td.split(sizes)
    return [_UnderWay(way, way.begin(part)) for way, part in zip(ways, parts, strict=True)]


def _leaving(bound: Bound, x_Td: Tensor) -> _UnderWay:
    """Begin to let a copy out of a block."""
    tensor = bound.world.tensor
    way = out_of_block(bound.world.mesh.columns, splits_tokens=tensor.splits_tokens)
    return _UnderWay(way, way.begin(x_Td))


def _sizes(tokens: int, copies: int) -> list[int]:
    """Return how many tokens each copy has, as equal as can be, none without any."""
    bounds = [tokens * n // copies for n in range(copies + 1)]
    return [b - a for a, b in pairwise(bounds) if b > a]


class _TokenByToken:
    """What stands in for the forward of an MLP."""

    def __init__(self, plain: PlainForward, call: Call) -> None:
        self._plain, self._call = plain, call

    def __call__(self, x: Tensor) -> Tensor:
        bound = self._call.bound
        if bound.copies == 1:
            return self._plain(x)
        leaving, made = [], []
        for one in _entering(bound, x[0]):
            made.append(self._plain(one.arrived()[None])[0])
            if not self._call.again:
                leaving.append(_leaving(bound, made.pop()))
        # A layer that is recomputed may end here: what it needs no more is not sent again.
        leaving += [_leaving(bound, one) for one in made]
        return torch.cat([one.arrived() for one in leaving])[None]


class _IntoAttention:
    """The projections into an attention, which are all made of a copy once it is there."""

    def __init__(self, owner: Any, columns: Sequence[str], call: Call) -> None:
        self._call, self._columns = call, [(name, owner.get_submodule(name)) for name in columns]
        self._plain = {name: module.forward for name, module in self._columns}
        for name, module in self._columns:
            module.forward = _Standing(self, name, self._plain[name])
        self._entering: list[_UnderWay] = []
        self._made: dict[str, Tensor] = {}
        self.making = False
        """Whether projections are called with copies, and not by the attention."""

    def begin(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Begin to let the tokens in, before the attention runs; it is given their shape."""
        bound = self._call.bound
        if bound.copies == 1:
            return None
        x = args[0] if args else kwargs["hidden_states"]
        self._entering, self._made = _entering(bound, x[0]), {}
        shape = x.new_zeros(()).expand(1, len(bound.tokens), x.shape[-1])
        if args:
            return (shape, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": shape}

    @property
    def interleaves(self) -> bool:
        return self._call.bound.copies > 1 and not self.making

    def made(self, asked: str) -> Tensor:
        """Return what a projection makes of all tokens, [1, T, f]."""
        if not self._made:
            parts: dict[str, list[Tensor]] = {name: [] for name, _ in self._columns}
            self.making = True
            for one in self._entering:
                x = one.arrived()[None]
                for name, module in self._columns:
                    # The one that is asked is being called already.
                    run = self._plain[name] if name == asked else module
                    parts[name].append(run(x)[0])
            self.making, self._entering = False, []
            self._made = {name: self._in_order(every)[None] for name, every in parts.items()}
        return self._made.pop(asked)

    def _in_order(self, copies_Tf: Sequence[Tensor]) -> Tensor:
        """Return all tokens [T, f] in their order, of copies that each have some of every rank."""
        bound = self._call.bound
        if not bound.world.tensor.splits_tokens:
            return torch.cat([*copies_Tf])
        ranks = bound.world.mesh.columns.size
        each = [copy_Tf.unflatten(0, (ranks, -1)) for copy_Tf in copies_Tf]
        return torch.cat(each, dim=1).flatten(0, 1)[: len(bound.tokens)]


class _Standing:
    """What stands in for the forward of a projection into an attention."""

    def __init__(self, into: _IntoAttention, name: str, plain: PlainForward) -> None:
        self._into, self._name, self._plain = into, name, plain

    def __call__(self, x: Tensor) -> Tensor:
        return self._into.made(self._name) if self._into.interleaves else self._plain(x)


class _OutOfAttention:
    """What stands in for the forward of the projection out of an attention."""

    def __init__(self, plain: PlainForward, call: Call) -> None:
        self._plain, self._call = plain, call

    def __call__(self, x: Tensor) -> Tensor:
        bound = self._call.bound
        if bound.copies == 1:
            return self._plain(x)
        leaving = [_leaving(bound, self._plain(copy[None])[0]) for copy in self._copies(x[0])]
        return torch.cat([one.arrived() for one in leaving])[None]

    def _copies(self, x_Tf: Tensor) -> list[Tensor]:
        """Return all ranks' tokens of each copy."""
        bound = self._call.bound
        if not bound.world.tensor.splits_tokens:
            return [*x_Tf.split(_sizes(len(x_Tf), bound.copies))]
        ranks = bound.world.mesh.columns.size
        own = tokens_of_each(len(x_Tf), ranks)
        whole = pad(x_Tf, (0, 0, 0, ranks * own - len(x_Tf))).unflatten(0, (ranks, own))
        return [part.flatten(0, 1) for part in whole.split(_sizes(own, bound.copies), dim=1)]

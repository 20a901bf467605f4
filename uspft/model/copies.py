"""A tensor parallel layer that splits its tokens into copies which take turns
(`fine_grain_interleave`), so that one copy's transfers overlap with another's products.

Each rank's own tokens are divided into the copies. Everything that works token by token (norms and
residuals, the projections around attention, the MLP) takes one copy after another. Copies are
joined for attention, which needs all queries, keys and values, and at the end of the layer. In the
backward, gradients of weights are computed while a transfer is awaited (tensor/interleaved.py). The
bytes sent are the same as without copies.

Shapes, as suffixes: T tokens of all tensor ranks, t one rank's of those; d hidden size, f features
of a projection on this rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from uspft.families.projections import ROWS, Projection
from uspft.model.divided import PartLinear
from uspft.model.dropout import dropouts_in
from uspft.model.halves import (
    Halves,
    StandIn,
    run_as_layer,
    standing_in,
)
from uspft.model.tiles import of_all_ranks
from uspft.tensor.interleaved import Crossing, PutOff, into_block, out_of_block
from uspft.tensor.parts import tokens_of_each

if TYPE_CHECKING:
    from uspft.model.attention import Bound
    from uspft.model.divided import Call


class LayerInCopies:
    """A replacement of a layer's forward that runs its tokens in as many copies as the call has;
    with one, the layer runs unchanged."""

    def __init__(self, layer: Any, table: Mapping[str, Projection], call: Call) -> None:
        """table: how the projections of the model's family are split.

        Raises RuntimeError for a layer that is not two halves with their residuals.
        """
        halves = Halves.of(layer)
        if halves is None:
            raise RuntimeError(f"fine_grain_interleave: {type(layer).__name__} is not two halves")
        self._layer, self._call, self._halves = layer, call, halves
        named = ((*name.rpartition(".")[::2], found) for name, found in table.items())
        own = {last: of.dim for at, last, of in named if at == "self_attn" and "norm" not in last}
        there = {name: dim for name, dim in own.items() if hasattr(layer.self_attn, name)}
        (self._last,) = (name for name, dim in there.items() if dim == ROWS)
        """The name of attention's projection out; `_columns` are those in."""
        self._columns = [name for name in there if name != self._last]
        self._products = [m for m in layer.modules() if isinstance(m, PartLinear)]
        self._dropouts = dropouts_in(layer)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer = self._layer
        if kwargs["uspft"].copies == 1:
            return type(layer).forward(layer, *args, **kwargs)
        return run_as_layer(layer, self._run, *args, **kwargs)

    def _run(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        call, put_off = self._call, PutOff()
        # Under ZeRO-3 weights are gathered as each module runs, and fetched then.
        weights = (one.weight for one in self._products if not hasattr(one.weight, "ds_id"))
        call.put_off = {id(one): put_off.stand_for(one) for one in weights if one.requires_grad}
        try:
            return self._by_turns(hidden_states, _Ways(call.bound, put_off), kwargs)
        finally:
            call.put_off = {}

    def _by_turns(self, x: Tensor, ways: _Ways, kwargs: dict[str, Any]) -> Tensor:
        halves, again = self._halves, self._call.again
        sizes = ways.sizes(x.shape[1])
        numbers = range(len(sizes))
        residual = [part[None] for part in x[0].split(sizes)]
        entering = ways.way(into_block, sizes)
        for copy in numbers:
            entering.begin(copy, _through(halves.norms_in, residual[copy]))
        attended = self._attended(x, ways, entering, sizes, kwargs)
        leaving, into_mlp, out_of_mlp = (
            ways.way(out_of_block, sizes),
            ways.way(into_block, sizes),
            ways.way(out_of_block, sizes),
        )
        last = halves.attention.get_submodule(self._last)
        for copy in numbers:
            with self.told(ways, sizes, copy):
                made = last(attended[copy][None])
            leaving.begin(copy, made)
        for copy in numbers:
            residual[copy] = halves.joined(residual[copy], leaving.arrived(copy))
            into_mlp.begin(copy, _through(halves.norms_of_mlp, residual[copy]))
        held: list[Tensor] = []
        for copy in numbers:
            arrived = into_mlp.arrived(copy)
            with self.told(ways, sizes, copy):
                made = halves.mlp(arrived)
            del arrived
            if again:  # recomputation may end here: the last transfer is not needed again
                held.append(made)
            else:
                out_of_mlp.begin(copy, made)
        for copy, made in enumerate(held):
            out_of_mlp.begin(copy, made)
        ends = (halves.second(residual[copy], out_of_mlp.arrived(copy)) for copy in numbers)
        return torch.cat([*ends], dim=1)

    def told(self, ways: _Ways, sizes: Sequence[int], copy: int) -> AbstractContextManager[None]:
        """Return the context in which dropouts know which tokens a copy has. sizes: of each."""
        start = sum(sizes[:copy])
        tile, places = slice(start, start + sizes[copy]), list[StandIn]()
        for one in self._dropouts:
            assert one.words is not None
            words = of_all_ranks(one.words, tile, ways.bound.ranks)
            places.append(StandIn(vars(one), "words", words))
        return standing_in(places)

    def _attended(
        self,
        x: Tensor,
        ways: _Ways,
        entering: _UnderWay,
        sizes: Sequence[int],
        kwargs: dict[str, Any],
    ) -> list[Tensor]:
        """Return, for each copy, the input [T, f] of attention's output projection."""
        attention = self._halves.attention
        parts: dict[str, list[Tensor]] = {name: [] for name in self._columns}
        for copy in range(len(sizes)):
            arrived = entering.arrived(copy)
            with self.told(ways, sizes, copy):
                for name, made in parts.items():
                    made.append(attention.get_submodule(name)(arrived)[0])
        whole = {name: ways.in_order(made)[None] for name, made in parts.items()}
        shape = x.new_zeros(()).expand(1, len(ways.bound.tokens), x.shape[-1])
        table = attention._modules
        gives = {name: partial(lambda made, _: made, made) for name, made in whole.items()}
        places = [StandIn(table, *one) for one in gives.items()]
        places.append(StandIn(table, self._last, nn.Identity()))
        with standing_in(places):
            out = self._halves.attended(shape, kwargs)
        return ways.copies(out[0])


def _through(modules: Sequence[Any], x: Tensor) -> Tensor:
    """Return x after it has passed through the modules in order."""
    for module in modules:
        x = module(x)
    return x


class _UnderWay:
    """The started transfers of copies, each [1, tokens, d]."""

    def __init__(self, crossing: Crossing) -> None:
        self._crossing = crossing
        self.begun: dict[int, Tensor] = {}

    def begin(self, copy: int, x: Tensor) -> None:
        """Start the transfer of a copy."""
        self.begun[copy] = self._crossing.begin(x[0], copy)

    def arrived(self, copy: int) -> Tensor:
        """Wait for a copy's transfer and return it."""
        return self._crossing.awaited(self.begun[copy], copy)[None]


class _Ways(NamedTuple):
    """The transfers of copies into and out of blocks in one pass, and how copies are joined."""

    bound: Bound
    put_off: PutOff

    def way(self, way: Any, sizes: Sequence[int]) -> _UnderWay:
        """Return the transfers into a block or out of it. sizes: each copy's tokens per rank."""
        columns, splits = self.bound.world.mesh.columns, self.bound.ranks > 1
        return _UnderWay(way(columns, sizes, self.put_off, splits_tokens=splits))

    def sizes(self, tokens: int) -> list[int]:
        """Return the tokens of each copy, as equal as possible and at least 1 each."""
        copies = self.bound.copies
        bounds = [tokens * n // copies for n in range(copies + 1)]
        return [b - a for a, b in pairwise(bounds) if b > a]

    def in_order(self, copies_Tf: Sequence[Tensor]) -> Tensor:
        """Return all tokens [T, f] in order, from copies with some tokens of every rank each."""
        if (ranks := self.bound.ranks) == 1:
            return torch.cat([*copies_Tf])
        each = [copy_Tf.unflatten(0, (ranks, -1)) for copy_Tf in copies_Tf]
        return torch.cat(each, dim=1).flatten(0, 1)[: len(self.bound.tokens)]

    def copies(self, x_Tf: Tensor) -> list[Tensor]:
        """Return each copy's tokens of all ranks, from all tokens [T, f]."""
        if (ranks := self.bound.ranks) == 1:
            return [*x_Tf.split(self.sizes(len(x_Tf)))]
        own = tokens_of_each(len(x_Tf), ranks)
        whole = pad(x_Tf, (0, 0, 0, ranks * own - len(x_Tf))).unflatten(0, (ranks, own))
        return [part.flatten(0, 1) for part in whole.split(self.sizes(own), dim=1)]

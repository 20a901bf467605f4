"""How a layer with a state sees a row that is split over ranks: heads inside the Ulysses group,
states across the ring, and a halo of tokens for the convolution before it.

Every algorithm deals tokens out to Ulysses × ring ranks, and that is all this needs to know of it.

Shapes, as suffixes: t this rank's tokens, T those of its Ulysses group; H/h all value heads and
this rank's, G/g key heads; K key dim, V value dim; C channels; N places of a laid-out input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from uspft.comm import Group, all_to_all, with_backward
from uspft.kernels.varlen import put
from uspft.sequence.algorithm import Inside
from uspft.sequence.rows.fragments import Halo
from uspft.sequence.rows.heads import split_heads
from uspft.sequence.rows.share import Share
from uspft.sequence.states import Mixed, StateRule, mix_over_states
from uspft.sequence.ulysses import HeadExchange, start_exchange, start_exchange_back

STATE = "state"
"""The kind as which transfers of layers with a state are counted, but for those of heads."""


class StateExchange:
    """The exchange of tokens for heads of layers with a state, and back: differentiable.

    A key head stands with several members where its value heads do, as with the key-value heads of
    attention. In a group of one nothing moves.
    """

    def __init__(self, values: int, keys: int, share: Share, ulysses: Group) -> None:
        self._heads, self._per_key = split_heads(values, keys, ulysses.size), values // keys
        self._exchange, self._member = HeadExchange(share, ulysses), ulysses.index

    @property
    def own(self) -> int:
        """How many value heads this member has: none where the whole ring has none in its place,
        and nothing to exchange."""
        first, last = self._heads.query[self._member]
        return last - first

    def there(self, x: Mixed) -> Mixed:
        """Return this member's heads of the tokens of all its group, in the order of the row."""
        if not self._exchange.moves:
            return x
        inside = Mixed(*map(self._exchange.in_order, self._to_heads(x)))
        (a, b), (c, d) = self._heads.query[self._member], self._heads.kv[self._member]
        if b > a and b - a != (d - c) * self._per_key:
            each = [head // self._per_key - c for head in range(a, b)]
            keys = torch.tensor(each, device=x.v.device)
            q, k = (part.index_select(1, keys) for part in inside[:2])
            inside = inside._replace(q=q, k=k)
        return inside

    def _to_heads(self, x: Mixed) -> tuple[Tensor, ...]:
        """Exchange tokens for heads in one all-to-all; gates go with their value heads, as wide as
        they are. Differentiable."""
        parts = (*[self._heads.kv] * 2, *[self._heads.query] * 3)
        dtypes = x.g.dtype, x.beta.dtype

        def exchanged(way: Callable[..., Any], *x: Tensor) -> tuple[Tensor, ...]:
            # A gate's bits as elements [t, H, n] of the others' type.
            gates = [gate[..., None].contiguous().view(x[2].dtype) for gate in x[3:]]
            found = way((*x[:3], *gates), parts, self._exchange.tokens, self._exchange.group)()
            came = zip(found[3:], dtypes, strict=True)
            return *found[:3], *(one.contiguous().view(dtype).squeeze(-1) for one, dtype in came)

        there, back = (partial(exchanged, way) for way in (start_exchange, start_exchange_back))
        found: tuple[Tensor, ...] = with_backward(there, back, *x)
        return found

    def slope_there(self, dout_tHV: Tensor) -> Tensor:
        """Return this member's heads of the gradient of what came back, without one of its own."""
        return self._exchange.start_there(dout_tHV, self._heads.query)()

    def back(self, out_ThV: Tensor) -> Tensor:
        """Return all heads of this rank's tokens."""
        exchange = self._exchange
        return exchange.back(out_ThV, self._heads.query) if exchange.moves else out_ThV


def mix(
    x: Mixed,
    share: Share,
    rule: StateRule,
    groups: tuple[Group, Group],
    around: Inside | None = None,
) -> Tensor:
    """Return the out [t, H, V] of a rule with a state for this rank's tokens, each document by
    itself; differentiable.

    x: of this rank's tokens, with all heads. groups: Ulysses and ring. around: calls what runs
    between exchanges of heads; None: as any function.
    """
    ulysses, ring = groups
    if ulysses.size == 1:
        return mix_over_states(x, share.chains, rule, ring)
    exchange = StateExchange(x.v.shape[1], x.k.shape[1], share, ulysses)
    inside = exchange.there(x)
    if not exchange.own:
        return exchange.back(inside.v)

    def run(inputs: tuple[Tensor, ...]) -> Tensor:
        return mix_over_states(Mixed(*inputs), share.chains, rule, ring)

    out = around(run, inside) if around else run(inside)
    del inside  # what the backward takes of it is kept elsewhere
    return exchange.back(out)


Convolution = Callable[[Tensor], Tensor]
"""A causal depthwise convolution [1, C, N] → [1, C, N], zeros before its first place."""
Places = NDArray[np.int64]


def convolve(x_Ct: Tensor, halo: Halo, convolution: Convolution, context: Group) -> Tensor:
    """Return a causal convolution [1, C, t] of this rank's tokens [1, C, t], each document by
    itself; differentiable."""
    if halo.whole:
        return convolution(x_Ct)
    counts, tokens = [*map(len, halo.gives)], len(halo.own)

    def come(x_tC: Tensor) -> list[Tensor]:
        if not halo.crossing:
            return []
        send = torch.cat([x_tC.index_select(0, put_on(one, x_tC)) for one in halo.gives])
        return [_moved(send, counts, halo.takes, context)]

    def home(drows: Tensor, dtype: torch.dtype) -> None:
        if halo.crossing:
            back = _moved(drows[tokens:-1].to(dtype), halo.takes, counts, context)
            gives = torch.cat([put_on(one, drows) for one in halo.gives])
            drows[:tokens].index_add_(0, gives, back.to(drows.dtype))

    laid_NC = laid_out(x_Ct[0].t(), halo.places, sum(halo.takes), come, home)
    return convolution(laid_NC.t()[None]).index_select(2, put_on(halo.own, x_Ct))


def laid_out(
    x_tC: Tensor,
    places: Places,
    others: int,
    come: Callable[[Tensor], Sequence[Tensor]],
    home: Callable[[Tensor, torch.dtype], None],
    leave: Callable[[Tensor], None] = lambda _: None,
) -> Tensor:
    """Return a convolution's input [N, C], laid out of tokens, others that come and a row of zeros.

    One function has both transfers, so that ranks that need nothing take part in the backward's.
    places: which of all these rows stands at each place. others: how many come. come: returns them.
    home: takes the gradients of all rows, in float32 or wider, and the type in which those of
    others go home; adds to those of tokens. leave: is shown all rows.
    """

    def there(x_tC: Tensor) -> Tensor:
        rows = torch.cat([x_tC, *come(x_tC), x_tC.new_zeros(1, x_tC.shape[1])])
        leave(rows)
        return rows.index_select(0, put_on(places, rows))

    def back(dlaid_NC: Tensor) -> Tensor:
        wide = torch.promote_types(dlaid_NC.dtype, torch.float32)
        drows = dlaid_NC.new_zeros(tokens + others + 1, dlaid_NC.shape[1], dtype=wide)
        drows.index_add_(0, put_on(places, drows), dlaid_NC.to(wide))
        home(drows, dlaid_NC.dtype)
        return drows[:tokens].to(dlaid_NC.dtype)

    tokens = len(x_tC)
    found: Tensor = with_backward(there, back, x_tC)
    return found


def put_on(places: Places, like: Tensor) -> Tensor:
    """Return places as an index on another tensor's device."""
    return put(torch.from_numpy(places), like.device)


def _moved(rows: Tensor, sends: Sequence[int], takes: Sequence[int], group: Group) -> Tensor:
    """Send rows [n, C] to the members, so many to each, and return those that arrive."""
    channels = rows.shape[1]
    leaving, arriving = ([n * channels for n in counts] for counts in (sends, takes))
    got = all_to_all(rows.reshape(-1).contiguous(), leaving, arriving, group, STATE)
    return got.view(-1, channels)

"""Context parallelism of a layer with a state: heads are exchanged inside the Ulysses group, states
across the ring, and the convolution before the delta rule gets a halo of tokens.

From the algorithm it needs only the assignment of tokens to Ulysses × ring ranks.

Shapes, as suffixes: t this rank's tokens, T those of its Ulysses group; H/h all value heads and
this rank's, G/g key heads; K key dim, V value dim; C channels; N positions of a convolution's
padded input.
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
"""The name under which transfers of layers with a state are counted, except the exchange of
heads."""


class StateExchange:
    """The Ulysses exchange of heads in a layer with a state, differentiable.

    A key head is replicated on all ranks that have value heads of it, as KV heads in attention. In
    a group of one nothing is sent.
    """

    def __init__(self, values: int, keys: int, share: Share, ulysses: Group) -> None:
        self._heads, self._per_key = split_heads(values, keys, ulysses.size), values // keys
        self._exchange, self._member = HeadExchange(share, ulysses), ulysses.index

    @property
    def own(self) -> int:
        """The number of this rank's value heads; if it is 0, all ranks of its ring have none, and
        exchange no states."""
        first, last = self._heads.query[self._member]
        return last - first

    def there(self, x: Mixed) -> Mixed:
        """Return this rank's heads of the Ulysses group's tokens, in the order of the row."""
        if not self._exchange.moves:
            return x
        inside = Mixed(*map(self._exchange.in_order, self._to_heads(x)))
        (a, b), (c, d) = self._heads.query[self._member], self._heads.kv[self._member]
        if b > a and b - a != (d - c) * self._per_key:
            each = [head // self._per_key - c for head in range(a, b)]
            keys = put(torch.tensor(each), x.v.device)
            q, k = (part.index_select(1, keys) for part in inside[:2])
            inside = inside._replace(q=q, k=k)
        return inside

    def _to_heads(self, x: Mixed) -> tuple[Tensor, ...]:
        """Make the all-to-all that splits heads and gathers tokens; gates are sent with their value
        heads, in their own dtypes. Differentiable."""
        parts = (*[self._heads.kv] * 2, *[self._heads.query] * 3)
        dtypes = x.g.dtype, x.beta.dtype

        def exchanged(way: Callable[..., Any], *x: Tensor) -> tuple[Tensor, ...]:
            # The bits of gates, viewed as elements [t, H, n] of the others' dtype.
            gates = [gate[..., None].contiguous().view(x[2].dtype) for gate in x[3:]]
            found = way((*x[:3], *gates), parts, self._exchange.tokens, self._exchange.group)()
            came = zip(found[3:], dtypes, strict=True)
            return *found[:3], *(one.contiguous().view(dtype).squeeze(-1) for one, dtype in came)

        there, back = (partial(exchanged, way) for way in (start_exchange, start_exchange_back))
        return with_backward(there, back, *x)

    def slope_there(self, dout_tHV: Tensor) -> Tensor:
        """Return this rank's heads of the output's gradient; not differentiable itself."""
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
    """Return the delta rule's output [t, H, V] for this rank's tokens, in which each document has a
    state of its own; differentiable.

    x: of this rank's tokens, with all heads. groups: Ulysses and ring. around: a wrapper of what
    runs between the exchanges of heads, such as checkpointing; None: it is called directly.
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
    del inside  # its backward uses what is saved elsewhere
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
    """Return a convolution's input [N, C], gathered from the concatenation of this rank's tokens,
    received tokens, and a row of zeros.

    One autograd function makes both transfers, so that ranks that receive nothing take part in the
    backward's too. places: for each position of the result, the index into the concatenation.
    others: the number of received tokens. come: receives them. home: called with the gradients of
    the concatenation, in at least float32, and the dtype for sending; it sends the received tokens'
    gradients back and adds those that arrive. leave: called with the concatenation.
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
    return with_backward(there, back, x_tC)


def put_on(places: Places, like: Tensor) -> Tensor:
    """Return places as an index on another tensor's device."""
    return put(torch.from_numpy(places), like.device)


def _moved(rows: Tensor, sends: Sequence[int], takes: Sequence[int], group: Group) -> Tensor:
    """Send rows [n, C] to the members, this many to each, and return those that arrive."""
    channels = rows.shape[1]
    leaving, arriving = ([n * channels for n in counts] for counts in (sends, takes))
    got = all_to_all(rows.reshape(-1).contiguous(), leaving, arriving, group, STATE)
    return got.view(-1, channels)

"""Layers with a state over one chunk of rows (seqpipe), without a ring: the final state of a chunk
is the initial state of the next, and its gradient passes back the same way.

Chunks run forward in order and backward in reverse: a chunk's backward takes the gradient of its
final states from the next chunk, and stores that of its initial states for the chunk before.

Shapes, as suffixes: t tokens of the chunk, n those of earlier chunks that a convolution sees, N
positions of the convolution's padded input; C channels; H value heads, G key heads; K key dim, V
value dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from uspft.sequence.chunked import ChunkShare
from uspft.sequence.kept_keys import LayerStates, leave
from uspft.sequence.mixing import Convolution, Places, laid_out, put_on
from uspft.sequence.rows.fragments import NOBODY, Fragment, laid_places
from uspft.sequence.states import Mixed, StateRule, laid, part_of


def mix_over_chunks(x: Mixed, share: ChunkShare, rule: StateRule, states: LayerStates) -> Tensor:
    """Return the delta rule's output [t, H, V] for a chunk's tokens, in which each document has a
    state of its own; zeros for padding. Differentiable."""
    out: Tensor = _OverChunk.apply(share, rule, states, *x)
    return out


def _crossing(share: ChunkShare) -> tuple[list[Fragment], set[Fragment], set[Fragment]]:
    """Return the chunk's fragments of documents, those whose document begins in an earlier chunk,
    and those whose document ends in a later one."""
    real = [f for f in share.chains.mine if f.document != NOBODY]
    bounds = share.documents
    enters = {f for f in real if bounds[f.document][0] < f.start}
    return real, enters, {f for f in real if f.stop < bounds[f.document][1]}


class _OverChunk(torch.autograd.Function):
    """The autograd function of `mix_over_chunks`, which saves inputs and initial states; the
    backward recomputes each fragment's graph, as that of `mix_over_states` does."""

    @staticmethod
    def forward(
        ctx: Any, share: ChunkShare, rule: StateRule, states: LayerStates, *every: Tensor
    ) -> Tensor:
        x = Mixed(*every)
        real, enters, leaves = _crossing(share)
        before = share.number - 1
        entering = {f: states["rule", before, f.document].value for f in real if f in enters}
        out = {}
        for fragment in real:
            out[fragment], end = rule(part_of(x, fragment), entering.get(fragment))
            if fragment in leaves:
                leave(states, ("rule", share.number, fragment.document), end)
        ctx.save_for_backward(*x, *entering.values())
        ctx.of = share, rule, states
        return laid(x.v, out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_tHV: Tensor) -> tuple[Tensor | None, ...]:
        share, rule, states = ctx.of
        real, enters, leaves = _crossing(share)
        first, saved = [f for f in real if f in enters], ctx.saved_tensors
        with torch.enable_grad():
            x = Mixed(*(t.detach().requires_grad_() for t in saved[:5]))
            states_in = (state.detach().requires_grad_() for state in saved[5:])
            entering = dict(zip(first, states_in, strict=True))
            out, ends, dends = {}, [], []
            for fragment in real:
                out[fragment], end = rule(part_of(x, fragment), entering.get(fragment))
                if fragment in leaves:
                    ends.append(end)
                    dends.append(states.pop(("rule", share.number, fragment.document)).gradient)
            whole = laid(x.v, out)
        grads = torch.autograd.grad(
            [whole, *ends],
            [*x, *entering.values()],
            [dout_tHV, *dends],
            allow_unused=True,  # a chunk of padding uses none of them
            materialize_grads=True,
        )
        for fragment, gradient in zip(first, grads[5:], strict=True):
            states["rule", share.number - 1, fragment.document].found = gradient
        return None, None, None, *grads[:5]


@dataclass(frozen=True)
class _Places:
    """The input of a convolution, gathered from the concatenation of the chunk's tokens, tokens of
    earlier chunks, and a row of zeros."""

    laid: Places
    """For each position of the convolution's input, the index into that concatenation."""
    own: Places
    """For each of the chunk's tokens, its position in the convolution's input."""
    enters: tuple[tuple[int, int], ...]
    """(document, number of tokens) of the tokens from earlier chunks."""
    leaves: tuple[tuple[int, Places], ...]
    """(document, indices into the concatenation) of the tokens that the next chunk needs."""


def _places(share: ChunkShare, taps: int) -> _Places:
    _, enters, leaves = _crossing(share)
    tokens, arrived, seen = share.holding.tokens, share.holding.tokens, dict[Fragment, range]()
    left = list[tuple[int, Places]]()
    for fragment in share.chains.mine:
        near = 0
        if fragment in enters:
            near = min(taps - 1, fragment.start - share.documents[fragment.document][0])
        seen[fragment] = range(arrived, arrived + near)
        arrived += near
        if fragment in leaves:
            both = np.array([*seen[fragment], *range(fragment.own.start, fragment.own.stop)])
            left.append((fragment.document, both[max(0, len(both) - taps + 1) :]))
    come = tuple((fragment.document, len(near)) for fragment, near in seen.items() if near)
    laid, own = laid_places(share.chains.mine, seen, tokens, taps, arrived)
    return _Places(laid, own, come, tuple(left))


def convolve_chunk(
    x_Ct: Tensor, share: ChunkShare, taps: int, convolution: Convolution, states: LayerStates
) -> Tensor:
    """Return a causal convolution [1, C, t] of a chunk's tokens [1, C, t], each document by itself;
    differentiable."""
    places = share.once(("places", taps), lambda: _places(share, taps))
    number, tokens, sizes = share.number, len(places.own), [size for _, size in places.enters]

    def come(_: Tensor) -> list[Tensor]:
        return [states["taps", number - 1, document].value for document, _ in places.enters]

    def pass_on(rows: Tensor) -> None:
        for document, left in places.leaves:
            leave(states, ("taps", number, document), rows[put_on(left, rows)])

    def home(drows: Tensor, dtype: torch.dtype) -> None:
        for document, left in places.leaves:
            found = states.pop(("taps", number, document)).gradient
            drows.index_add_(0, put_on(left, drows), found.to(drows.dtype))
        parts = drows[tokens:-1].split(sizes) if sizes else ()
        for (document, _), part_nC in zip(places.enters, parts, strict=True):
            states["taps", number - 1, document].found = part_nC.clone()

    laid_NC = laid_out(x_Ct[0].t(), places.laid, sum(sizes), come, home, pass_on)
    return convolution(laid_NC.t()[None]).index_select(2, put_on(places.own, x_Ct))

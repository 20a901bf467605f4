"""Layers with a state under context parallelism: the state passes from rank to rank, tokens stay.

A gated delta net updates a state S [K, V] per head with each token: S ← e^g (I − β k kᵀ) S + β k vᵀ
(arXiv 2412.06464). Over a whole fragment that is S ← M S + S₀; M and S₀ are computed by the same
rule, with values [0 | v] and initial state [I | 0]. Ranks exchange these summaries, and each rank
computes the initial states of its fragments from them. The gradient of a state passes the other
way: dS ← Mᵀ dS + dS₀. The bytes sent do not depend on the row's length.

Shapes, as suffixes: T tokens of the ring rank; H value heads, G key heads; K key dim, V value dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from uspft.comm import Group, all_to_all
from uspft.sequence.rows.fragments import NOBODY, Chains, Fragment


class Mixed(NamedTuple):
    """The inputs of the delta rule for each token."""

    q: Tensor
    """[T, G, K]."""
    k: Tensor
    """[T, G, K]."""
    v: Tensor
    """[T, H, V], H a multiple of G: consecutive value heads share a key head."""
    g: Tensor
    """[T, H]: the logarithm of the state's decay, in at least float32."""
    beta: Tensor
    """[T, H]: the strength with which the value for a key is overwritten."""


class StateRule(Protocol):
    """The delta rule, differentiable: a function from tokens and the initial state (None: 0) to the
    output [T, H, V] in v's dtype and the final state [H, K, V] in at least float32."""

    def __call__(self, x: Mixed, state: Tensor | None) -> tuple[Tensor, Tensor]: ...


def mix_over_states(x: Mixed, chains: Chains, rule: StateRule, group: Group) -> Tensor:
    """Return the delta rule's output [T, H, V] for a ring rank's tokens, in which each document has
    a state of its own; zeros for padding. Differentiable; collective over the ring if documents
    cross ranks.

    The layer of arXiv 2412.06464 over sequence pieces, as LASP-2 exchanges states (2502.07563).
    """
    out: Tensor = _OverStates.apply(chains, rule, group, *x)
    return out


class _OverStates(torch.autograd.Function):
    """The autograd function of `mix_over_states`, which saves inputs, initial states and the
    matrices M; the backward recomputes each fragment's graph.

    A graph kept from the forward would save everything inside the rule, and under checkpointing
    each use of its saved tensors would recompute the layer. Both transfers are in one function, so
    that a rank which uses nothing of what it receives takes part in the backward's too; and every
    rank calls it whatever its documents are, so that ZeRO-3 sees the same order of modules.
    """

    @staticmethod
    def forward(ctx: Any, chains: Chains, rule: StateRule, group: Group, *x: Tensor) -> Tensor:
        out, kept = mixed_forward(Mixed(*x), chains, rule, group)
        ctx.save_for_backward(*x, *kept)
        ctx.of = chains, rule, group
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_THV: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, g, beta, *kept = ctx.saved_tensors
        of = Mixed(q, k, v, g, beta), kept, dout_THV, *ctx.of
        return None, None, None, *mixed_backward(*of)


def mixed_forward(
    x: Mixed, chains: Chains, rule: StateRule, group: Group
) -> tuple[Tensor, list[Tensor]]:
    """Return the output of mix_over_states without a graph, and the tensors besides x that its
    backward needs; `kept_of` returns their number."""
    out: dict[Fragment, Tensor] = {}
    summaries: dict[Fragment, _Summary] = {}
    for fragment in _real(chains.mine):
        part = part_of(x, fragment)
        if fragment in chains.first:
            out[fragment], state = rule(part, None)
            summaries[fragment] = _Summary(None, state)
        elif fragment not in chains.last:
            summaries[fragment] = _summary(part, rule)
    like = _state_like(x)
    ways = chains.sends, chains.takes, chains.first
    every = summaries | _exchanged(summaries, ways, group, like, crossing=chains.crossing)
    entering = carried(chains, every)
    for fragment, state in entering.items():
        out[fragment] = rule(part_of(x, fragment), state)[0]
    passes = [summaries[f].passes for f in _entered(chains) if f not in chains.last]
    kept = [*entering.values(), *(m for m in passes if m is not None)]
    return laid(x.v, out), kept


def mixed_backward(
    x: Mixed,
    kept: Sequence[Tensor],
    dout_THV: Tensor,
    chains: Chains,
    rule: StateRule,
    group: Group,
) -> tuple[Tensor, ...]:
    """Return the gradients of x. kept: what mixed_forward returned."""
    entered = _entered(chains)
    middle = [f for f in entered if f not in chains.last]
    states, passes = kept[: len(entered)], dict(zip(middle, kept[len(entered) :], strict=True))
    with torch.enable_grad():
        x = Mixed(*(t.detach().requires_grad_() for t in x))
        state_of = {f: s.detach().requires_grad_() for f, s in zip(entered, states, strict=True)}
        out, leaving = {}, {}
        for fragment in _real(chains.mine):
            out[fragment], end = rule(part_of(x, fragment), state_of.get(fragment))
            if fragment not in chains.last:
                leaving[fragment] = end
        whole = laid(x.v, out)
    needed = list(state_of.values())
    local = torch.autograd.grad(whole, needed, dout_THV, retain_graph=True) if needed else ()
    like = _state_like(x)
    mine = {f: _Summary(passes.get(f), d) for f, d in zip(state_of, local, strict=True)}
    ways = chains.sends_back, chains.takes_back, chains.last
    every = mine | _exchanged(mine, ways, group, like, crossing=chains.crossing)
    dleaving = carried(chains, every, back=True)
    ends = [f for f in leaving if f in dleaving]
    return torch.autograd.grad(
        [whole, *(leaving[f] for f in ends)],
        x,
        [dout_THV, *(dleaving[f] for f in ends)],
        allow_unused=True,  # a rank with only padding uses none of them
        materialize_grads=True,
    )


def _entered(chains: Chains) -> list[Fragment]:
    """Return this rank's fragments with a state from earlier fragments."""
    return [f for f in _real(chains.mine) if f not in chains.first]


def kept_of(chains: Chains) -> int:
    """Return how many tensors the backward of mix_over_states takes in addition to x."""
    entered = _entered(chains)
    return len(entered) + sum(f not in chains.last for f in entered)


class _Summary(NamedTuple):
    """A fragment's linear map from its initial to its final state, passes · state + adds;
    transposed for gradients."""

    passes: Tensor | None
    """[H, K, K]; None for a fragment without an initial state."""
    adds: Tensor
    """[H, K, V]."""


def _summary(x: Mixed, rule: StateRule) -> _Summary:
    """Return a fragment's summary, computed by the rule itself with a wider state."""
    heads, key, value = x.v.shape[1], x.k.shape[2], x.v.shape[2]
    wide = torch.cat([x.v.new_zeros(*x.v.shape[:2], key), x.v], dim=-1)
    like = _state_like(x)
    unit = torch.eye(key, dtype=like.dtype, device=like.device)
    start = torch.cat([unit, like.new_zeros(key, value)], dim=-1)
    _, end = rule(x._replace(v=wide), start.expand(heads, key, key + value))
    passes, adds = end.split([key, value], dim=-1)
    return _Summary(passes.contiguous(), adds.contiguous())


def _state_like(x: Mixed) -> Tensor:
    """Return an empty tensor of a state's dtype and device, with the shape [0, H, K, V]."""
    dtype = torch.promote_types(x.v.dtype, torch.float32)
    return x.v.new_empty((0, x.v.shape[1], x.k.shape[2], x.v.shape[2]), dtype=dtype)


_Ways = tuple[Sequence[Sequence[Fragment]], Sequence[Sequence[Fragment]], frozenset[Fragment]]
"""The fragments whose summaries are sent to each rank, those received from each, and those without
`passes` because they are first in their document (for gradients: last)."""


def _exchanged(
    mine: Mapping[Fragment, _Summary],
    ways: _Ways,
    group: Group,
    like: Tensor,
    *,
    crossing: bool,
) -> dict[Fragment, _Summary]:
    """Exchange summaries over the ring, each with the ranks that need it; nothing is sent where no
    document crosses ranks."""
    if not crossing:
        return {}
    sends, takes, alone = ways
    _, heads, key, value = like.shape
    adds, passes = heads * key * value, heads * key * key

    def size(fragments: Iterable[Fragment]) -> int:
        return sum(adds if f in alone else adds + passes for f in fragments)

    parts = [
        part.to(like).reshape(-1)
        for fragments in sends
        for f in fragments
        for part in mine[f]
        if part is not None
    ]
    send = torch.cat([like.reshape(-1), *parts])
    got = all_to_all(
        send, [size(one) for one in sends], [size(one) for one in takes], group, "state"
    )
    found: dict[Fragment, _Summary] = {}
    at = 0
    for fragment in (f for one in takes for f in one):
        first = None
        if fragment not in alone:
            first, at = got[at : at + passes].view(heads, key, key), at + passes
        found[fragment] = _Summary(first, got[at : at + adds].view(heads, key, value))
        at += adds
    return found


def carried(
    chains: Chains, every: Mapping[Fragment, _Summary], *, back: bool = False
) -> dict[Fragment, Tensor]:
    """Return the initial state of each of this rank's fragments that does not begin a document,
    from the fragments before it; with `back`, the gradient of the final state of each that does not
    end one, from the fragments after it."""
    holder = chains.mine[0].holder if chains.mine else NOBODY
    found: dict[Fragment, Tensor] = {}
    for chain in chains.documents:
        so_far: Tensor | None = None
        came = False  # a copy: a view would keep the whole received buffer alive
        left = sum(f.holder == holder for f in chain)
        for fragment in reversed(chain) if back else chain:
            if fragment.holder == holder:
                left -= 1
                if so_far is not None:
                    found[fragment] = so_far.clone() if came else so_far
            if not left:
                break
            passes, adds = every[fragment]
            came = so_far is None or passes is None
            if so_far is None or passes is None:
                so_far = adds
            else:
                so_far = (passes.mT if back else passes) @ so_far + adds
    return {f: found[f] for f in chains.mine if f in found}


def _real(fragments: Sequence[Fragment]) -> list[Fragment]:
    """Return the fragments that are not padding."""
    return [f for f in fragments if f.document != NOBODY]


def part_of(x: Mixed, fragment: Fragment) -> Mixed:
    """Return the rule's inputs for a fragment's tokens."""
    return Mixed(*(t[fragment.own] for t in x))


def laid(like_THV: Tensor, parts: Mapping[Fragment, Tensor]) -> Tensor:
    """Return the fragments' tokens at their positions, zeros elsewhere."""
    if not parts:
        return like_THV * 0
    order = sorted(parts, key=lambda f: f.local)
    pieces, at = [], 0
    for fragment in order:
        if fragment.local > at:
            pieces.append(like_THV.new_zeros(fragment.local - at, *like_THV.shape[1:]))
        pieces.append(parts[fragment])
        at = fragment.own.stop
    if at < len(like_THV):
        pieces.append(like_THV.new_zeros(len(like_THV) - at, *like_THV.shape[1:]))
    return torch.cat(pieces) if len(pieces) != 1 else pieces[0]

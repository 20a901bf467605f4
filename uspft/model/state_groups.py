"""A layer with a state computed in groups of heads: some key heads with all value heads that share
them.

A group's convolution and delta rule see all tokens. The initial states of fragments are saved, and
the backward recomputes everything else one group at a time. The gradient of a group's values
overwrites the rule's output.

Shapes, as suffixes: t this rank's tokens, T those of its Ulysses group; H value heads, G key heads;
K key dim, V value dim; C channels: a group's queries, keys and values, concatenated.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from uspft.blocks import joined
from uspft.families.projections import BEFORE
from uspft.model.group_call import BlockCall, GroupedBlock, put
from uspft.model.halves import BlockInput, Hook
from uspft.sequence import Heads
from uspft.sequence.mixing import StateExchange
from uspft.sequence.rows.heads import key_ranges
from uspft.sequence.states import Mixed, kept_of, mixed_backward, mixed_forward
from uspft.tensor.parts import cut

if TYPE_CHECKING:
    from uspft.blocks import HeadRange
    from uspft.sequence.mixing import Convolution


class StateCall(BlockCall):
    """One call of such a layer."""

    def __init__(self, block: GroupedBlock, *of: Any, keeps: bool) -> None:
        super().__init__(block, *of, keeps=keeps)
        layer = block.attention
        if counted := getattr(layer, "uspft_heads", None):
            counted(layer, ())  # its hook, which sets the numbers of heads, may not have run yet
        self.heads = Heads(layer.num_v_heads, layer.num_k_heads, layer.head_v_dim)
        self.key_dim, self._each = layer.head_k_dim, self.heads.query // self.heads.kv
        self.key_groups = key_ranges(self.heads.kv, self.bound.world.layout.ulysses)
        self._hook: Hook | None = None

    def values(self, keys: HeadRange) -> HeadRange:
        """Return the value heads that share a range of key heads."""
        return keys[0] * self._each, keys[1] * self._each

    def exchange(self, keys: HeadRange) -> StateExchange:
        number, world = keys[1] - keys[0], self.bound.world
        return StateExchange(number * self._each, number, self.bound.share, world.mesh.ulysses)

    def before(self, x: Tensor, tile: slice, entry: BlockInput | None = None) -> list[Tensor]:
        """Return the convolution's inputs q, k [n, G, K] and v [n, H, V], and g and β [n, H]."""
        hook = Hook(self.bound.softcap)
        self.run_up_to(hook, x, tile, entry)
        assert hook.mixed
        found, hook.mixed, self._hook = [*hook.mixed], None, hook
        return found

    def made(self, x: Tensor, keys: HeadRange) -> list[Tensor]:
        """Return a group's input of the convolution [t, C], and its g and β [t, H]."""
        values, some = [self.values(keys)], self.block.some
        places = some.projections(self.heads, values, range(*keys), BEFORE)

        def parts(found: list[Tensor]) -> list[Tensor]:
            return [torch.cat([one.flatten(1) for one in found[:3]], dim=1), *found[3:]]

        return self.made_of(x, places, form=parts)

    def mixed(self, made: Sequence[Tensor], keys: HeadRange) -> Mixed:
        """Return a group's input of the delta rule; differentiable."""
        (qkv, g, beta), layer, key = made, self.block.attention, self.key_dim
        assert self._hook and self._hook.convolves
        taps, convolution = self._hook.convolves
        (a, b), (c, d), value = keys, self.values(keys), self.heads.dim
        second, third = self.heads.kv * key, 2 * self.heads.kv * key
        channels = [(at + a * key, at + b * key) for at in (0, second)]
        channels.append((third + c * value, third + d * value))
        weight = cut(layer.conv1d.weight.squeeze(1), [joined(channels)])
        run: Convolution = partial(convolution, weight=weight)  # type: ignore[call-arg]
        found = self.bound.of_layer(id(layer)).convolve(qkv.t()[None], taps, run)[0].t()
        q, k, v = found.split([last - first for first, last in channels], dim=1)
        q, k = (one.unflatten(1, (-1, key)) for one in (q, k))
        return Mixed(q, k, v.unflatten(1, (-1, value)), g, beta)

    @property
    def rule(self) -> tuple[Any, ...]:
        """The arguments of mixed_forward and mixed_backward other than tensors."""
        assert self._hook and self._hook.mixes
        return self.bound.share.chains, self._hook.mixes, self.bound.world.mesh.ring

    def all_out(self, x: Tensor) -> list[Tensor]:
        out = x.new_empty(x.shape[1], self.heads.query, self.heads.dim)
        found = [out]
        for keys in self.key_groups:
            exchange = self.exchange(keys)
            inside = exchange.there(self.mixed(self.made(x, keys), keys))
            own, kept = inside.v, list[Tensor]()
            if exchange.own:
                own, kept = mixed_forward(inside, *self.rule)
            del inside
            put(out, [self.values(keys)], exchange.back(own))
            found += kept
            del own, kept
        self._hook = None  # it references a weight that ZeRO releases
        return found

    def begin_backward(self, x: Tensor, found: list[Tensor], dh: Tensor) -> None:
        super().begin_backward(x, found, dh)
        self._kept = [*found]
        """The tensors saved for the rule's backward, of all groups."""
        found.clear()
        self._others: list[Tensor] = []
        """The gradients of queries, keys and gates, of all groups."""

    def groups(self) -> None:
        for keys in self.key_groups:
            self._take(keys)

    def _take(self, keys: HeadRange) -> None:
        """Compute the backward of a group."""
        values, exchange = self.values(keys), self.exchange(keys)
        places = self.leaves_of(self.block.attention.conv1d)
        convolution = [self.leaves[n] for n in places]
        made = [one.requires_grad_() for one in self.made(self._x, keys)]
        with torch.enable_grad():
            inside = exchange.there(self.mixed(made, keys))
        made[0].data = made[0].data.new_empty(0)  # the graph has saved what it needs
        ways = [*map(torch.autograd.graph.get_gradient_edge, inside)]
        taken = Mixed(*(one.detach() for one in inside))
        del inside
        dout = exchange.slope_there(self.out_slope([values], range(*keys)))
        if exchange.own:
            kept = [self._kept.pop(0) for _ in range(kept_of(self.bound.share.chains))]
            slopes = mixed_backward(taken, kept, dout, *self.rule)
            del kept
        else:
            slopes = tuple(map(torch.zeros_like, taken))
        del dout, taken
        found = [*torch.autograd.grad(ways, [*made, *convolution], slopes)]
        del ways, slopes, made
        dqkv, *gates = found[:3]
        self.sum_up(places, found[3:])
        self._put(dqkv, gates, keys)

    def _put(self, dqkv: Tensor, gates: Sequence[Tensor], keys: HeadRange) -> None:
        """Write the gradients of a group into those of all groups."""
        heads, (a, b), (c, d), key = self.heads, keys, self.values(keys), self.key_dim
        if not self._others:
            like, number = dqkv.new_empty, len(dqkv)
            self._others = [like(number, heads.kv, key) for _ in range(2)]
            self._others += [like(number, heads.query, dtype=one.dtype) for one in gates]
        dq, dk, dv = dqkv.split([(b - a) * key, (b - a) * key, (d - c) * heads.dim], dim=1)
        for whole, part in zip(self._others[:2], (dq, dk), strict=True):
            whole[:, a:b] = part.unflatten(1, (-1, key))
        for whole, part in zip(self._others[2:], gates, strict=True):
            whole[:, c:d] = part
        self._out[:, c:d] = dv.unflatten(1, (-1, heads.dim))

    def slopes_before(self, tile: slice, made: list[Tensor]) -> list[Tensor]:
        dq, dk, *gates = (one[tile] for one in self._others)
        return [dq, dk, self._out[tile].clone(), *gates]

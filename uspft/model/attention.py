"""The only hook into transformers' attention: a function that passes q, k, v to the bound
algorithm.

transformers calls it by name. The world and the share are passed with each call as `uspft=`, so the
function has no state and two worlds can use one model. There is no mask: transformers makes none
for an implementation that registers no mask function.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from uspft.model.recompute import Kept, Recompute, attend_once
from uspft.sequence import Rule
from uspft.sequence.chunk_attention import forget_own
from uspft.sequence.states import Mixed
from uspft.tensor.sums import own_tokens_of_sum

if TYPE_CHECKING:
    from torch import nn

    from uspft.model.offload import HostShelf, Item
    from uspft.sequence import Inside, Share
    from uspft.sequence.kept_keys import LayerKeys, LayerStates, RowKeys
    from uspft.sequence.mixing import Convolution
    from uspft.sequence.states import StateRule
    from uspft.world import World

NAME = "uspft"
IGNORED = {"position_ids", "cache_position", "use_cache", "output_attentions", "is_causal"}
IGNORED |= {"output_router_logits"}
"""Arguments that may be ignored: positions are in q and k already, and attention is causal."""


@dataclass
class _Between:
    """How blocks are entered and left; shared by all copies of a Bound."""

    summed: bool = True
    """Whether a block's output is summed over ranks."""
    tile: bool = False
    """Whether a block's input is a tile of each tensor rank's tokens."""


class Bound:
    """What one forward call of the model passes to the attention of every layer.

    tokens: as in Batch. recompute: what of attention checkpointed layers recompute before their
    backward; None if layers are not checkpointed. shelf: host memory for what these save; None: it
    stays on the device.
    """

    def __init__(
        self,
        world: World,
        share: Share,
        tokens: Tensor,
        *,
        recompute: Recompute | None,
        shelf: HostShelf | None = None,
        real: Tensor | None = None,
        keys: RowKeys | None = None,
    ) -> None:
        """real [T]: which tokens are not padding; None if nobody asks. keys: saved of earlier
        chunks, if the tokens are a chunk of rows."""
        self._keys = keys
        self.real = torch.empty(0) if real is None else real
        self.world, self.share, self.tokens, self.shelf = world, share, tokens, shelf
        self.memory: dict[int, Kept] = {}
        self._layer, self._between = 0, _Between()
        self.begun: set[int] = set()
        """The layers that have run with it: a layer that runs again is being recomputed."""
        self._outputs: dict[int, list[Tensor] | list[Item]] = {}
        self.forgets = recompute in (None, "attention")
        """Whether the results of attention in groups of heads are not saved for recomputation."""
        # Without an exchange of heads `exchange` is the same as `nothing`.
        self._inside = recompute == "exchange" and world.layout.ulysses > 1

    def once(self) -> Bound:
        """Return a copy for layers that are not checkpointed and save everything."""
        found = copy(self)
        found.forgets, found.shelf = True, None
        return found

    def of_layer(self, layer: int) -> Bound:
        """Return a copy for a layer with a state. layer: as in attend."""
        found = copy(self)
        found._layer = layer
        return found

    def attend(self, layer: int, qkv: tuple[Tensor, Tensor, Tensor], rule: Rule) -> Tensor:
        """Compute the attention of one layer: q [T, H, D], k and v [T, G, D] → [T, H, D].

        layer: a number that identifies the layer across calls.
        """

        earlier = None if self._keys is None else self._keys.layers[layer]

        def run(inputs: tuple[Tensor, ...], inside: Inside | None = None) -> Tensor:
            q, k, v, *sinks = inputs
            own = replace(rule, sinks=sinks[0]) if sinks else rule
            return self.world.attend((q, k, v), self.share, own, inside, earlier)

        inputs = qkv if rule.sinks is None else (*qkv, rule.sinks)
        return self._remembering(layer, run, inputs, earlier)

    def _remembering(
        self, layer: int, run: Any, inputs: tuple[Tensor, ...], keys: LayerKeys | None = None
    ) -> Tensor:
        """Return run(inputs), whose results are saved if the layer will be recomputed; without a
        backward nothing is saved.

        run: also takes an optional wrapper for what runs between exchanges of heads. keys: saved of
        earlier chunks.
        """
        once = not (torch.is_grad_enabled() and any(x.requires_grad for x in inputs))
        if self.shelf and not once:
            self.shelf.below(next(x for x in inputs if x.requires_grad))
        found: Tensor
        if once or self.forgets:
            found = run(inputs)
            return found
        if keys is not None and layer in self.memory:
            forget_own(self.share, keys)
        remembered = partial(attend_once, self.memory, layer, shelf=self.shelf)
        found = run(inputs, remembered) if self._inside else remembered(run, inputs)
        return found

    def remember(self, layer: int, found: list[Tensor]) -> None:
        """Save the results of a layer's attention in groups of heads for its recomputation, unless
        attention is to be recomputed too."""
        if self.shelf and not self.forgets:
            with self.shelf.together():
                self._outputs[layer] = [self.shelf.keep(one) for one in found]
        elif not self.forgets:
            self._outputs[layer] = [*found]

    def recalled(self, layer: int) -> list[Tensor] | None:
        """Return and remove the saved results of a layer; None if there are none."""
        kept: Any = self._outputs.pop(layer, None)
        return [*map(self.shelf.get, kept)] if self.shelf and kept is not None else kept

    @property
    def _states(self) -> LayerStates | None:
        """The states that chunks of rows pass on in this layer, if the tokens are a chunk."""
        return None if self._keys is None else self._keys.states[self._layer]

    def convolve(self, x: Tensor, taps: int, convolution: Convolution) -> Tensor:
        """Return a causal convolution [1, C, T] of this rank's tokens, each document by itself."""
        return self.world.convolve(x, self.share, taps, convolution, self._states)

    def mix(self, x: Mixed, rule: StateRule) -> Tensor:
        """Return the output [T, H, V] of a layer with a state, each document by itself."""
        states = self._states

        def run(inputs: tuple[Tensor, ...], inside: Inside | None = None) -> Tensor:
            return self.world.mix(Mixed(*inputs), self.share, rule, inside, states)

        return self._remembering(self._layer, run, x)

    def enter(self, x: Tensor) -> Tensor:
        """Return a block's input (of its column-split matrices) from hidden states between
        blocks."""
        tokens = self.ranks * x.shape[1] if self._between.tile else len(self.tokens)
        return self.world.tensor.enter(x, tokens, self.world.mesh.columns)

    @contextmanager
    def in_tiles(self, *, summed: bool = True) -> Iterator[None]:
        """Let blocks take a tile of each rank's tokens within the `with` block. summed: False skips
        the sum of outputs, if only gradients are needed."""
        self._between.summed, self._between.tile = summed, self.ranks > 1
        try:
            yield
        finally:
            self._between.summed, self._between.tile = True, False

    def leave(self, x: Tensor) -> Tensor:
        """Return hidden states between blocks from this rank's output of a block's row-split
        matrix."""
        if self._between.summed:
            return self.world.tensor.leave(x, self.world.mesh.columns)
        if self.ranks == 1:
            return x
        return own_tokens_of_sum(x[0], self.world.mesh.columns, summed=False)[None]

    @property
    def ranks(self) -> int:
        """The number of tensor ranks with different tokens between blocks; 1 if all have
        the same."""
        return self.world.mesh.columns.size if self.world.tensor.splits_tokens else 1

    @property
    def copies(self) -> int:
        """In how many interleaved groups blocks with split matrices process their tokens."""
        return self.world.tensor.copies if self.world.mesh.columns.size > 1 else 1

    @property
    def softcap(self) -> float | None:
        """The soft-cap of scores, in every layer."""
        return self.world.kernel.softcap


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    uspft: Bound | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """Compute attention across ranks: query [1, H, T, D], key, value [1, G, T, D] → [1, T, H, D].

    sliding_window: how many keys a query sees, its own counted. s_aux [H]: the sinks. Raises
    RuntimeError for any argument that it would have to ignore, naming it.
    """
    unknown = sorted(k for k, v in rest.items() if v is not None and k not in IGNORED)
    unknown += ["attention_mask"] * (attention_mask is not None) + ["dropout"] * (dropout != 0.0)
    unknown += ["is_causal"] * (rest.get("is_causal") is False)
    if unknown:
        raise RuntimeError(
            f"{type(module).__name__} asks attention for {', '.join(unknown)}, "
            "which uspft does not support"
        )
    if uspft is None:
        raise RuntimeError(f"{type(module).__name__} was called without a share (uspft=)")
    if softcap != uspft.softcap:
        raise RuntimeError(
            f"{type(module).__name__} asks attention for softcap {softcap}, "
            f"and its kernel was made with {uspft.softcap}"
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    # A copy: under ZeRO-3 the parameter's storage is released after the layer.
    sinks = (
        None
        if s_aux is None
        else s_aux.to(torch.promote_types(s_aux.dtype, torch.float32), copy=True)
    )
    rule = Rule(scaling, sliding_window, sinks)
    return uspft.attend(id(module), (q, k, v), rule)[None], None


AttentionInterface.register(NAME, attention)

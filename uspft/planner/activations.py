"""The bytes of activations on one rank, by a formula that agrees with what is counted.

benchmarks/memory/ counts the storages that are alive, and this adds up the same tensors: what each
layer keeps until its backward, and beside it the most that is at work at once, which is a layer in
its backward or the loss. What an attention kernel allocates inside is not in it.

Sizes are numbers of elements in 16 bits that a token has; float32 counts twice, int64 four times.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from uspft.families import FAMILIES, ModelShape
from uspft.families.projections import NORMED_HEADS
from uspft.planner.in_flight import backward_elements
from uspft.planner.products import head_projection
from uspft.sequence.rows.heads import split_heads

if TYPE_CHECKING:
    from uspft.config.algorithms import AlgorithmRow
    from uspft.config.recipe import MemoryBlock
    from uspft.layout import Layout

KNOWN = ("llama", "mistral", "qwen2", "qwen3")
"""The model types whose layers the formula knows."""
ELEMENT = 2


@dataclass(frozen=True)
class Activations:
    """The bytes of one forward and backward on a rank."""

    layers: int
    input_bytes: float
    """What one layer takes."""
    kept_bytes: float
    """What each layer keeps until its backward, its input among it."""
    layer_bytes: float
    """The most that a layer needs beside it in its backward."""
    loss_bytes: float
    """The most that the loss needs, with the last norm."""
    offloaded: bool = False
    """Whether what layers keep waits on the host."""

    def of_layers(self, layers: int) -> Activations:
        """Return what a model of so many layers needs."""
        return replace(self, layers=layers)

    @property
    def peak_bytes(self) -> float:
        """The most that is on the device."""
        if not self.offloaded:
            return self.layers * self.kept_bytes + max(self.layer_bytes, self.loss_bytes)
        # The layer at work has what it keeps; the input of the one below comes when less is there.
        return max(self.kept_bytes + self.layer_bytes, self.loss_bytes)

    @property
    def host_bytes(self) -> float:
        """What waits in the host's pinned memory."""
        return self.layers * self.kept_bytes if self.offloaded else 0.0


def unknown_activations(
    shape: ModelShape, layout: Layout, tokens: int, memory: MemoryBlock, row: AlgorithmRow
) -> list[str]:
    """Return what there is of layers and their layout that the formula does not know.

    The arguments are those of `activations`.
    """
    window = shape.window
    found = {
        "layers that are not checkpointed": not memory.gradient_checkpointing,
        f"layers of {shape.model_type}": shape.model_type not in KNOWN,
        "matrices that ranks divide": layout.tensor > 1,
        "a window shorter than the row": window is not None and window < tokens * layout.context,
        "keys that all come at once": row.all_at_once and layout.ring > 1,
    }
    return [what for what, here in found.items() if here]


def activations(
    shape: ModelShape,
    layout: Layout,
    tokens: int,
    memory: MemoryBlock,
    row: AlgorithmRow,
    *,
    stages: int = 0,
) -> Activations | None:
    """Return what a rank with so many tokens in one forward needs, where all weights train.

    memory: `auto` among its values counts as what it is without a need to save memory. row: of the
    table, for the algorithm that shares rows. stages: `exchange_stages`, 0 for auto.
    Returns None where there is something that the formula does not know.
    """
    if unknown_activations(shape, layout, tokens, memory, row):
        return None
    d, inner = shape.hidden_size, shape.intermediate_size
    comes_in = stages if "exchange_stages" in row.options else None
    tile = memory.mlp_tile_tokens if isinstance(memory.mlp_tile_tokens, int) else tokens
    attention = _attention(shape, layout, memory.recompute, comes_in)
    attention = attention.beside(_norms_of_heads(shape, tiled=tile < tokens))
    positions = 2 * shape.head_dim + 4
    if tile < tokens:
        # Gradients of the layer's output, of the MLP's input and the norm's; both norms' results.
        held = tokens * (5 * d + attention.alive + positions)
        of_mlp = max(tile * (6 * inner + 2 * d) + 7 * inner * d, 9 * inner * d)
        most = held + max(of_mlp, tile * 14 * d)
        last = 4 * d
    else:
        held = tokens * (9 * d + attention.alive + positions + 4)
        most = held + tokens * max(6 * inner, 8 * d - 2)
        last = 6 * d + 2
    backward = tokens * (2 * d + attention.backward + positions)
    whole = tokens * (last + positions) * ELEMENT + _logits_bytes(shape, tokens, memory)
    return Activations(
        shape.layers,
        tokens * d * ELEMENT,
        tokens * (d + attention.kept) * ELEMENT,
        max(most, backward) * ELEMENT,
        whole,
        memory.offload_activations == "cpu",
    )


@dataclass(frozen=True)
class _Attention:
    """The elements that a token has of attention."""

    kept: float
    """Kept until the backward."""
    alive: float
    """There beside it when the MLP is at work."""
    backward: float
    """There beside it in attention's own backward."""

    def beside(self, more: float) -> _Attention:
        """Return it with what stays from before attention until behind its backward."""
        return replace(self, alive=self.alive + more, backward=self.backward + more)


def _attention(shape: ModelShape, layout: Layout, recompute: str, stages: int | None) -> _Attention:
    """stages: as of `backward_elements`."""
    ulysses, dim = layout.ulysses, shape.head_dim
    shares = split_heads(shape.heads, shape.kv_heads, ulysses)
    heads, kv = (max(b - a for a, b in part) for part in (shares.query, shares.kv))
    out, own, lse = shape.heads * dim, shape.kv_heads * dim, 2 * ulysses * heads
    inner, keys = ulysses * heads * dim, ulysses * kv * dim
    received = inner + 2 * keys
    if recompute == "attention":
        gathered = out if ulysses > 1 else 0
        kept, alive, again = 0, received + inner + lse + gathered, received + inner + lse
    elif ulysses == 1:
        kept, alive, again = out + lse, received, received
    elif recompute == "exchange":
        kept, alive, again = inner + lse, received + out, received
    else:
        kept, alive, again = received + inner + lse + out, 0, inner
    if layout.ring > 1:
        # The output's gradient, beside which all others are made.
        backward = inner + backward_elements(layout.ring, inner, 2 * keys, stages)
    elif ulysses > 1:
        # Beside the gradients of what came are the output's and what it came in, or gradients of
        # keys, summed where several ranks copy a head; the log-sum-exp is let go of then.
        sent = 4 * keys + (4 * own if keys > own else 2 * keys)
        backward = 2 * inner + max(inner + 2 * own, sent - lse)
    else:
        most = 2 * keys if recompute == "attention" else max(inner, 2 * keys)
        backward = 2 * inner + most
    return _Attention(kept, alive, again + backward)


def _norms_of_heads(shape: ModelShape, *, tiled: bool) -> int:
    """Return what norms of queries and keys keep of a token until behind attention's backward.

    It is their input; without tiles that in float32, what is normed, and the scale of each head.
    Their own backward needs less than others, up to queries of four times the hidden size.
    """
    normed = FAMILIES[shape.model_type].projections is NORMED_HEADS
    heads = shape.heads + shape.kv_heads if normed else 0
    return heads * (shape.head_dim if tiled else 3 * shape.head_dim + 2)


def _logits_bytes(shape: ModelShape, tokens: int, memory: MemoryBlock) -> float:
    """Return what tiles of logits need, and the gradient of the head, which is summed in float32
    (model/loss.py)."""
    asked = memory.loss_tile_tokens
    tile = min(asked if isinstance(asked, int) else tokens, tokens)
    head = head_projection(shape)
    logits, weight = tile * head.outputs, head.parameters
    # Logits of one tile are there when those of the next are made.
    both = (10 if tile < tokens else 6) * logits
    # Of a single tile the gradient is there beside the whole row's, with labels, losses and sums.
    more = (shape.hidden_size + 8) * ELEMENT * tile if tile == tokens else 0
    return 4 * weight + max(both, 6 * logits + 2 * weight) + more

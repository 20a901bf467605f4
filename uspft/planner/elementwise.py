"""The bytes that a step reads and writes in element-wise operations and reductions, which are all
operations except matrix products and attention.

Each torch operation reads its inputs and writes its outputs: a norm is a cast, a square, a mean, a
product, a cast, and the product with its weight. Tests compare the counts with torch's dispatcher.
The sum of the head's gradients over tiles is counted with the products.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from uspft.families import Blocks
from uspft.planner.layer_kinds import Norms, layer_kind
from uspft.planner.memory.operations import WIDE
from uspft.planner.products import (
    attention_projections,
    head_projection,
    inner_features,
    inner_matrices,
    layer_modules,
    state_projections,
)
from uspft.planner.step_shape import StepShape
from uspft.planner.trained import EXPERT_WORDS


class BothWays(NamedTuple):
    """Bytes of a forward, and of a backward without recomputation."""

    forward: float
    backward: float

    def times(self, count: float) -> BothWays:
        """Return both multiplied by a factor."""
        return BothWays(count * self.forward, count * self.backward)


class Moved(NamedTuple):
    """Bytes of a forward and backward on a rank."""

    per_token: float
    per_pass: float = 0.0

    def of(self, tokens: float) -> float:
        return self.per_token * tokens + self.per_pass


def layer_moved(step: StepShape, blocks: Blocks, columns: int) -> Moved:
    """Return the bytes of a layer's forward, recomputation and backward on one rank. columns: the
    degree of tensor parallelism."""
    parts = _by_part(step, blocks, columns)
    each = sum(step.options.forwards * one.forward + one.backward for one in parts.values())
    if step.options.checkpointing and not layer_kind(step.model).norms.behind_mlp:
        # Recomputation stops before the last residual sum, which saves nothing.
        each -= 3 * step.options.element * _between(step, columns)
    if not (tile := step.options.mlp_tile):
        return Moved(each)
    tiled = _tiled(step, blocks, columns, parts, tile)
    return Moved(each + tiled.per_token, tiled.per_pass)


def _between(step: StepShape, columns: int) -> float:
    """Return a rank's share of a token's hidden features between blocks: all of them under
    Megatron's tensor parallelism without use_seq_parallel."""
    divided = step.options.use_seq_parallel or step.options.slices is not None
    return step.model.hidden_size / (columns if divided else 1)


def norm_bytes(element: int, *, wide: bool, trains: bool) -> BothWays:
    """Return the bytes of a norm per element. wide: whether the product with the weight is in
    float32. trains: whether the weight trains."""
    cast = element + WIDE if element < WIDE else 0
    own = WIDE if wide else element
    forward = 2 * cast + 5 * WIDE + 2 * own
    return BothWays(forward, 2 * cast + 17 * WIDE + 2 * own + 4 * own * trains)


def _by_part(step: StepShape, blocks: Blocks, columns: int) -> dict[str, BothWays]:
    """Return the bytes per token of each part of a layer with these blocks, on one tensor rank. All
    choices of experts are taken to be equally likely. columns: as in `layer_moved`."""
    e, of, kind = step.options.element, blocks.sizes(step.model), layer_kind(step.model)
    between, entered = _between(step, columns), step.model.hidden_size
    mixing = state_projections(of) if blocks.state else attention_projections(of)
    parts = {name: one.on(columns) for name, one in mixing.items()}
    into = {name: one.outputs for name, one in parts.items() if one.splits == "outputs"}
    (mixed,) = (one.inputs for one in parts.values() if one.splits == "inputs")
    if blocks.state:
        # The features that pass through a convolution, its activation and the norms of heads.
        heads, normed = sum(into.values()), 0
        turned = float(heads)
    else:
        query, key, value = mixed, *(into.get(f"self_attn.{one}_proj", 0) for one in "kv")
        turned = (query + key) * kind.turned_share * bool(kind.turned)
        heads = query + key + value
        normed = (query + key) * (kind.normed_heads or kind.normed_together)
        normed += value * kind.normed_values
    number = sum(map(bool, Norms() if blocks.state else kind.norms))
    norm = norm_bytes(e, wide=kind.wide_norms, trains=step.options.lora is None)
    fused = 0 if kind.fused else 3 * e * entered
    inner = inner_matrices(of, experts=blocks.experts)[-1].on(columns)
    met, joined = inner.per_token * inner.inputs, kind.fused or blocks.experts
    found = {
        "norms": norm.times(number * between + normed),
        "positions": BothWays(10 * e * turned, 14 * e * turned),
        "heads": BothWays(0.0, 4 * e * heads + 2 * fused),
        "residuals": BothWays(6 * e * between, 6 * e * between + fused),
        "mlp": BothWays(5 * e * met, (13 if joined else 9) * e * met),
    }
    if kind.gated or blocks.state:
        found["gates"] = BothWays(5 * e * mixed, 9 * e * mixed)
    if kind.scaled:
        found["scales"] = BothWays(4 * e * between, 4 * e * between)
    if blocks.experts:
        found["dispatch"] = _dispatched(step, inner.per_token)
        if shared := inner_features(of, columns, experts=True):
            around = 3 * e * entered
            found["shared expert"] = BothWays(5 * e * shared + around, 9 * e * shared + around)
    if step.options.lora:
        words = EXPERT_WORDS if blocks.experts else ()
        for name, one in layer_modules(of, blocks).items():
            if step.options.lora.adapts(name, words):
                part, before = one.on(columns), found.get("adapters", BothWays(0.0, 0.0))
                more = 5 * part.outputs, 2 * part.outputs + 3 * part.inputs
                found["adapters"] = BothWays(
                    *(b + e * m for b, m in zip(before, more, strict=True))
                )
    return found


def _dispatched(step: StepShape, met: int) -> BothWays:
    """Return the bytes per token in the dispatch to its experts and back. met: their number."""
    e, hidden = step.options.element, step.model.hidden_size
    wide = layer_kind(step.model).wide_scores
    s = WIDE if wide else e  # the dtype in which rows are weighted and summed
    rows, cast = met * hidden, s + e if s > e else 0
    forward = (3 * e + 4 * s) * rows + (s + cast) * hidden
    return BothWays(forward, (2 * e + 10 * s + cast) * rows + (s + 3 * e + cast) * hidden)


def _tiled(
    step: StepShape, blocks: Blocks, columns: int, parts: Mapping[str, BothWays], tile: int
) -> Moved:
    """Return the bytes added by a layer's tiles of tokens: norms and MLP are recomputed for each
    tile's gradients, outputs are written into a whole tensor, and weights' gradients are summed in
    float32."""
    e, between = step.options.element, _between(step, columns)
    again = parts["norms"].forward + (0.0 if step.options.checkpointing else parts["mlp"].forward)
    copies = 2 * e * between * (3 + 3 + 2 * step.options.checkpointing)
    if step.options.lora:
        return Moved(again + copies)
    matrices = inner_matrices(blocks.sizes(step.model), experts=blocks.experts)
    weights = sum(one.on(columns).parameters for one in matrices)
    added = weights * (2 * WIDE + e)
    # The first tile's gradients are cast, not added, and in the end the sum is cast back.
    return Moved(again + copies + added / tile, 2 * (WIDE + e) * weights - added)


def outside_moved(step: StepShape, columns: int) -> Moved:
    """Return the bytes of a pass outside of the layers, on one tensor rank: the embedding, the last
    norm, and the loss with its head. columns: as in `layer_moved`."""
    model, e, hidden = step.model, step.options.element, step.model.hidden_size
    words = head_projection(model).on(columns).outputs
    cast, trains = (e + WIDE if e < WIDE else 0), step.options.lora is None
    norm = norm_bytes(e, wide=layer_kind(model).wide_norms, trains=trains)
    # A tile's logits: maximum, difference from it, exponentials, their sum, probabilities.
    logits = 2 * cast + 8 * WIDE
    if model.full.get("final_logit_softcapping"):
        logits += 19 * WIDE
    elif model.full.get("logits_scaling", 1.0) != 1.0:
        logits += 4 * WIDE
    # selected, of the head, written to their positions, times a factor, written back
    rows = (2 + 2 + 2 + 2 + 4) * e
    table = words * hidden * trains
    loss = words * logits + hidden * rows
    embedding = hidden * (2 + 3 * trains) * e
    of_tables = table * (WIDE + cast + 2 * e) + table * e * (1 + 3 * model.tied)
    return Moved(_between(step, columns) * sum(norm) + loss + embedding, of_tables)


class GradientBytes(NamedTuple):
    """The bytes that DeepSpeed reads and writes per trained element to sum gradients and to update.

    The first number of a pair is for each element that the rank stores, the second for each element
    that it updates (its ZeRO shard).
    """

    first: tuple[float, float]
    """In a step's first pass."""
    later: tuple[float, float]
    """In each later pass."""
    averaged: float
    """Per stored element, after gradients are summed over ranks."""
    once: tuple[float, float]
    """Once a step: the norm, clipping, AdamW and the rounded weights."""


GRADIENT_BYTES_OF: dict[tuple[int, bool], GradientBytes] = {
    (0, False): GradientBytes((20, 0), (20, 0), 8, (34, 28)),
    (1, False): GradientBytes((34, 0), (26, 0), 8, (20, 34)),
    (2, False): GradientBytes((24, 22), (24, 18), 0, (0, 70)),
    (3, False): GradientBytes((22, 8), (22, 12), 0, (0, 70)),
    (0, True): GradientBytes((16, 0), (12, 0), 8, (0, 40)),
    (1, True): GradientBytes((32, 0), (12, 0), 0, (0, 72)),
    (2, True): GradientBytes((24, 8), (24, 20), 0, (0, 72)),
    (3, True): GradientBytes((24, 8), (24, 12), 0, (0, 72)),
}
"""By the ZeRO stage and whether weights are float32, as counted in DeepSpeed 0.19."""


ADAMW_BYTES = 30
"""AdamW reads weight, gradient and two moments in float32, writes all but the gradient, and rounds
the weight to 16 bits."""


def update_bytes(step: StepShape, held: float, ranks: int, passes: int) -> float:
    """Return the bytes that summing gradients and the update read and write in a step.

    held: the trained elements that a rank stores. ranks: how many ranks store the same, which from
    stage 1 on divide the update. passes: the step's forward and backward passes.
    """
    if step.scatters:  # not DeepSpeed: products add to the float32 sums themselves
        return ADAMW_BYTES * held / ranks
    of = GRADIENT_BYTES_OF[step.options.zero_stage, step.options.element == WIDE]
    each = [
        first + (passes - 1) * later + once
        for first, later, once in zip(of.first, of.later, of.once, strict=True)
    ]
    whole = each[0] + of.averaged * (ranks > 1)
    return held * (whole + each[1] / (ranks if step.options.zero_stage else 1))

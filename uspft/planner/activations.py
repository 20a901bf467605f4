"""The bytes of activations on one rank as they run, on a tape: each layer, and from behind the last
its norm, the head and the loss, that of experts' balance too (model/causal.py, model/loss.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from uspft.planner.copies_memory import LayerOfCopies
from uspft.planner.expert_memory import logit_bytes
from uspft.planner.group_memory import LayerInGroups
from uspft.planner.layer_memory import Layer, enter, norm
from uspft.planner.layer_sizes import LayerSizes
from uspft.planner.mesh_memory import all_features
from uspft.planner.operations import INDEX, WIDE, LayerTape
from uspft.planner.state_memory import StateLayer
from uspft.planner.tape import GradientStorages, Tensor


@dataclass(frozen=True)
class LayerBytes:
    """What a layer takes on the device; what waits on the host where it does."""

    kept: float
    """Until its backward."""
    most: float
    """What is alive at the most while it runs, with what it keeps."""
    held: float = 0.0
    """What of it stays on the device in any case."""
    lets_go: bool = False
    """Whether nothing that it keeps has its input, where it is not checkpointed."""


@lru_cache(maxsize=4096)
def layer_bytes(sizes: LayerSizes, *, reached: bool = True, beside: int = 0) -> LayerBytes:
    """Return what a layer takes. reached: whether the gradient goes on below it. beside: how many
    tensors as large as its input transformers holds by itself until the last layer is done."""
    tape = LayerTape()
    size = sizes.between_bytes()
    hidden = [tape.leaf(size)]  # which is let go of as soon as it can be, as is its gradient
    if not reached:
        hidden = [Tensor(size, hidden[0].storage, None, 0)]
    plain = StateLayer if sizes.state else Layer
    kind = LayerOfCopies if sizes.copies > 1 else LayerInGroups if sizes.at_once else plain
    layer = kind(tape, sizes)
    if sizes.recompute is None:
        out = layer(hidden[0])
        before, forward = tape.live, tape.most
        hidden.clear()
        kept, lets_go = tape.live - out.size, tape.live < before
        forward += size * beside
        if out.node:
            out.storage = None
            tape.backward(out, tape.new(size))
        return LayerBytes(kept, max(forward, tape.most), lets_go=lets_go)
    with tape.first_run():
        out = layer(hidden[0])
    trains = out.node is not None
    del out
    tape.most += size * beside
    if isinstance(layer, LayerInGroups):
        layer.groups.waits()
    kept = tape.live
    if trains:
        # What came back from the host for the second run goes with it.
        then = hidden.clear if sizes.offloads else lambda: None
        tape.second_run(lambda: layer(hidden[0]), size, then)
    held = sum({id(one): one.size for one in tape.stays}.values())
    return LayerBytes(kept, tape.most, held) if trains else LayerBytes(0.0, tape.most)


@dataclass(frozen=True)
class HeadSizes:
    """The last norm, the head and the loss as a rank has them."""

    layer: LayerSizes
    vocabulary: int
    """The rows of the head that are here."""
    tile: int | None
    """Tokens; None for all at once."""
    trains: bool = True
    norm_trains: bool = True
    capped: bool = False
    """Whether logits have a soft-cap."""


@lru_cache(maxsize=4096)
def head_bytes(sizes: HeadSizes, *, reached: bool = True) -> LayerBytes:
    """Return what is alive from behind the last layer until before its backward (model/causal.py,
    model/loss.py): between forward and backward, and at the most. reached: whether the gradient
    goes on below it."""
    tape, s = LayerTape(), sizes.layer
    size = s.between_bytes()
    before = tape.leaf(size)
    if not reached:
        before = Tensor(size, before.storage, None, 0)
    hidden = norm(tape, s, before, s.between, trains=sizes.norm_trains)
    del before
    every = all_features(tape, hidden, s.tensor) if s.mesh_rows else enter(tape, s, hidden)
    every = tape.viewed(every)
    loss = _loss(tape, sizes, every)
    del every, hidden
    kept = tape.live
    if loss.node:
        loss.storage = None
        tape.backward(loss, tape.new(0.0))
    return LayerBytes(kept, tape.most)


def _loss(tape: LayerTape, sizes: HeadSizes, hidden: Tensor) -> Tensor:
    s = sizes.layer
    e, tokens = s.element, s.sharing.tokens
    tile = min(sizes.tile or tokens, tokens)
    rows = tape.remade(hidden, back=hidden.size)  # those that have a target
    weight = float(s.hidden * sizes.vocabulary)
    labels = tape.new(INDEX * tokens)
    table = Tensor(e * weight / (s.mesh_rows or 1), None, tape.parameter(sizes.trains).node, 0)
    table = all_features(tape, table, s.mesh_rows or 1)
    of_rows = tape.new(rows.size) if rows.node else None
    of_weight = tape.new(WIDE * weight) if sizes.trains else None
    logits: object = None
    bend: object = None
    scaled: object = None  # a tile's logits, until those of the next have been bent
    for _ in range(1 if tile == tokens else 2):
        number = float(tile * sizes.vocabulary)
        narrow = tape.new(e * number)
        logits = narrow if e == WIDE else tape.new(WIDE * number)
        del narrow
        if sizes.capped:
            bend = tape.new(WIDE * number)
        scaled = logits
        slope = tape.new(e * number) if e < WIDE else logits
        if of_rows:
            tape.new(float(e * tile * s.hidden))
        if of_weight:
            tape.new(e * weight)
        del slope
    del labels, bend, scaled
    made = [one for one in (of_rows, of_weight) if one]
    if of_weight and e < WIDE:
        made[-1] = tape.new(e * weight)
    del of_rows, of_weight
    rows_train = bool(rows.node)

    def backward(grads: GradientStorages) -> GradientStorages:
        found = [tape.new(one.size) for one in made]
        return [found[0] if rows_train else None, found[-1] if sizes.trains else None]

    return tape.record((rows, table), (0.0,), backward)[0]


def router_bytes(config: Mapping[str, Any], sizes: LayerSizes) -> float:
    """Return the bytes of the logits of a layer's router, which are kept where their loss is asked
    for; later their gradient's. config: the model's."""
    asked = sizes.experts and config.get("output_router_logits", False)
    return logit_bytes(sizes, sizes.sharing.tokens) if asked else 0.0


def balance_bytes(head: HeadSizes, routers: Sequence[float]) -> float:
    """Return what is alive at the most while routers' loss is made (model/router.py), beside their
    logits: the gradients that came with the loss, probabilities, and of a layer what they choose
    and its logits in float32."""
    s, (first, *_) = head.layer, [*filter(None, routers), 0.0]
    wide = WIDE / s.element
    gradients = s.inside_bytes() + s.element * s.hidden * head.vocabulary * head.trains
    return (gradients + wide * (sum(routers) + 2 * first)) if first else 0.0

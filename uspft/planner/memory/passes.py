"""The memory of one micro-batch's activations, by replaying on a tape what each layer allocates and
saves, and then the last norm, the head and the loss, with the router's auxiliary loss
(model/causal.py, model/loss.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from uspft.planner.memory.copies import LayerOfCopies
from uspft.planner.memory.experts import logit_bytes
from uspft.planner.memory.head_groups import LayerInGroups
from uspft.planner.memory.layer import Layer, enter, norm
from uspft.planner.memory.mesh import all_features
from uspft.planner.memory.operations import INDEX, WIDE, LayerTape
from uspft.planner.memory.sizes import LayerSizes, layers_of
from uspft.planner.memory.states import StateLayer
from uspft.planner.memory.tape import GradientStorages, Tensor
from uspft.planner.products import head_projection
from uspft.planner.trained import EMBEDDING, HEAD, LAST_NORM, outside_trains

if TYPE_CHECKING:
    from uspft.families import ModelShape
    from uspft.layout import Layout
    from uspft.planner.options import Options

BATCH_BYTES = 6 * 8
"""The bytes of a token in a batch: its id, label, position, index in the stream, row, and whether
it has a target, each int64."""


@dataclass(frozen=True)
class LayerBytes:
    """The bytes of a layer's activations."""

    kept: float
    """What is saved until the layer's backward, on the host if activations are offloaded."""
    most: float
    """The peak while the layer runs, with what it saves."""
    held: float = 0.0
    """The part of `kept` that stays on the device even with offloading."""
    lets_go: bool = False
    """Whether the layer, if not checkpointed, saves no tensor that needs its input's memory."""


@lru_cache(maxsize=4096)
def layer_bytes(sizes: LayerSizes, *, reached: bool = True, beside: int = 0) -> LayerBytes:
    """Return the bytes of a layer. reached: whether its input needs a gradient. beside: the number
    of tensors of its input's size that transformers keeps until the last layer has run."""
    tape = LayerTape()
    size = sizes.between_bytes()
    hidden = [tape.leaf(size)]  # a list, so that it can be freed as early as in a run
    if not reached:
        hidden = [Tensor(size, hidden[0].storage)]
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
        # The input copied back from the host is freed after recomputation.
        then = hidden.clear if sizes.offloads else lambda: None
        tape.second_run(lambda: layer(hidden[0]), size, then)
    held = sum({id(one): one.size for one in tape.stays}.values())
    return LayerBytes(kept, tape.most, held) if trains else LayerBytes(0.0, tape.most)


@dataclass(frozen=True)
class HeadSizes:
    """The sizes of the last norm, the head and the loss on a rank."""

    layer: LayerSizes
    vocabulary: int
    """The head's rows on this rank."""
    tile: int | None
    """The tokens of a tile of the loss; None: all tokens at once."""
    trains: bool = True
    norm_trains: bool = True
    capped: bool = False
    """Whether logits have a soft-cap."""


@lru_cache(maxsize=4096)
def head_bytes(sizes: HeadSizes, *, reached: bool = True) -> LayerBytes:
    """Return the bytes of the last norm, the head and the loss (model/causal.py, model/loss.py):
    between forward and backward, and the peak. reached: whether their input needs a gradient."""
    tape, s = LayerTape(), sizes.layer
    size = s.between_bytes()
    before = tape.leaf(size)
    if not reached:
        before = Tensor(size, before.storage)
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
    rows = tape.remade(hidden, back=hidden.size)  # the rows with a target
    weight = float(s.hidden * sizes.vocabulary)
    labels = tape.new(INDEX * tokens)
    table = Tensor(e * weight / (s.mesh_rows or 1), None, tape.parameter(sizes.trains).node, 0)
    table = all_features(tape, table, s.mesh_rows or 1)
    of_rows = tape.new(rows.size) if rows.node else None
    of_weight = tape.new(WIDE * weight) if sizes.trains else None
    logits: object = None
    bend: object = None
    scaled: object = None  # a tile's logits, alive until the next tile's are scaled
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


def balance_bytes(head: HeadSizes, routers: Sequence[float]) -> float:
    """Return the peak bytes of the routers' loss (model/router.py), in addition to their logits:
    the gradients from the loss, probabilities, and for one layer its choices and its logits in
    float32."""
    s, (first, *_) = head.layer, [*filter(None, routers), 0.0]
    wide = WIDE / s.element
    gradients = s.inside_bytes() + s.element * s.hidden * head.vocabulary * head.trains
    return (gradients + wide * (sum(routers) + 2 * first)) if first else 0.0


class ChunkKeys(NamedTuple):
    """The bytes of a chunk's keys and values in a layer, for later chunks."""

    kept: float
    """The bytes saved in addition to what the layer saves anyway."""
    first: float
    """The bytes of the gradients from the next chunk alone."""
    summed: float
    """The bytes of the float32 sum of gradients from all later chunks."""


@dataclass(frozen=True)
class PassBytes:
    """The bytes of one micro-batch, or of its largest chunk, by layer, on a rank with every
    layer."""

    layers: tuple[LayerBytes, ...]
    head: LayerBytes
    """Of everything after the last layer, including the loss."""
    any_head: LayerBytes
    """The part of that which does not depend on a chunk's size, such as the gradient of the head's
    weight."""
    hidden: float
    """Of the hidden states between layers, which stages send to each other."""
    angles: float
    """Of the rotary cosines and sines of a stage's forward."""
    embedded: float = 0.0
    """Of the embedding's output, if it stays alive in addition to what the first layer saves."""
    offloads: bool = False
    """Whether what layers save is moved to the host."""
    keeps_input: tuple[bool, ...] = ()
    """For each layer whether what it saves includes its input."""
    bare: tuple[LayerBytes, ...] = ()
    """The first layers again, for a stage without the embedding whose input needs no gradient:
    layers up to the first that trains."""

    routers: tuple[float, ...] = ()
    """Of each layer's router logits, which are saved if the loss of routers is used; empty in
    stages."""
    keys: tuple[ChunkKeys, ...] = ()
    """Of each layer's keys, if a micro-batch passes through stages in chunks."""

    @property
    def first(self) -> int:
        """The first layer that trains; earlier stages save nothing, since they have no backward."""
        return max(0, len(self.bare) - 1)


def pass_bytes(
    shape: ModelShape, layout: Layout, row_tokens: int, options: Options, behind: float = 0.0
) -> tuple[PassBytes, float]:
    """Return the bytes of one micro-batch by layer, and of its batch. behind: as in RowSharing."""
    kinds = layers_of(shape, layout, row_tokens, options, behind)
    outside = outside_trains(options.lora, options.freeze)
    # With checkpointing transformers makes the embedding's output require a gradient.
    reached, each = outside[EMBEDDING] or options.checkpointing, list[LayerBytes]()
    known: dict[tuple[int, bool, int], LayerBytes] = {}
    offloads = kinds[0].offloads
    # A frozen embedding's output is a leaf, which stays alive as long as the graph.
    copied = kinds[0].tensor > 1 or offloads or kinds[0].kind.scaled
    leaf = options.checkpointing and not outside[EMBEDDING] and copied
    embedded = kinds[0].inside_bytes() if leaf else 0.0
    if offloads and all(one is not kinds[0] for one in kinds[1:]):
        kinds[0] = replace(kinds[0], first=True)
    for sizes in kinds:
        # transformers' forward keeps a reference to the first layer's input, and to its unscaled
        # form.
        scaled, apart = sizes.kind.scaled, not leaf or sizes.tensor > 1
        beside = (scaled and apart) + (offloads and bool(each) and (scaled or apart))
        if sizes.recompute is None:
            beside = (bool(each) and each[0].lets_go) + (scaled and options.element < WIDE)
        key = id(sizes), reached, beside
        known[key] = known.get(key) or layer_bytes(sizes, reached=reached, beside=beside)
        each.append(known[key])
        reached = reached or bool(sizes.trained or sizes.adapted)
    head = HeadSizes(
        kinds[-1],
        head_projection(shape).on(layout.mesh_columns).outputs,
        options.loss_tile,
        trains=outside[HEAD] if not shape.tied else outside[EMBEDDING],
        norm_trains=outside[LAST_NORM],
        capped=shape.full.get("final_logit_softcapping") is not None,
    )
    loss = head_bytes(head, reached=reached)
    any_head = LayerBytes(0.0, 0.0)
    if layout.pipeline > 1:  # negligible for a single token
        one_token = replace(head.layer, sharing=replace(head.layer.sharing, tokens=1))
        any_head = head_bytes(replace(head, layer=one_token), reached=reached)
    tokens = kinds[0].sharing.tokens
    angles = tokens * kinds[0].kind.angle_bytes(shape.head_dim, options.element)
    # Without checkpointing a norm saves its input if that is float32 anyway.
    keeps = tuple((one.recompute or options.element == WIDE) and not offloads for one in kinds)
    trains = [bool(one.trained or one.adapted) for one in kinds]
    first = 0 if outside[EMBEDDING] or not any(trains) else trains.index(True)
    alone = kinds[: first + 1] if first else []
    asked = bool(shape.full.get("output_router_logits", False))
    routers = tuple(logit_bytes(one, tokens) * asked if one.experts else 0.0 for one in kinds)
    balanced = max(loss.most, balance_bytes(head, routers))
    one = PassBytes(
        tuple(each),
        LayerBytes(loss.kept, balanced),
        any_head,
        kinds[0].between_bytes(),
        float(angles),
        embedded,
        offloads,
        tuple(map(bool, keeps)),
        tuple(layer_bytes(sizes, reached=False, beside=not sizes.recompute) for sizes in alone),
        routers,
    )
    return one, float(BATCH_BYTES * tokens)


def chunk_keys(layer: LayerSizes) -> ChunkKeys:
    """Return the bytes of the largest chunk's keys and values in a layer, or of the state that it
    passes to the next chunk; the state's gradient is not counted. layer: of that chunk."""
    if layer.state:
        of = layer.state.sizes
        return ChunkKeys(float(of.values * of.key_dim * of.value_dim * WIDE), 0.0, 0.0)
    how, seen = layer.sharing, 1.0
    if how.row.window:
        seen = min(1.0, how.row.window.keys / (how.tokens * how.row.ulysses))
    pair = seen * how.bytes(2 * how.row.ulysses * how.widest[1])
    # They are attention's saved ones, unless it saves none, or an exchange has copied them.
    kept, wide = pair if layer.recompute or how.row.ulysses > 1 else 0.0, pair * WIDE / how.element
    return ChunkKeys(kept, pair if how.row.ring == 1 else wide, wide)

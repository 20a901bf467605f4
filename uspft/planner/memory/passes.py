"""The memory of one micro-batch's activations, and the bytes that its operations read and write, by
replaying on a tape what each layer allocates and saves, and then the last norm, the head and the
loss, with the router's auxiliary loss (model/causal.py, model/loss.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from uspft.config.algorithms import WHOLE
from uspft.families import Blocks, layer_blocks
from uspft.layout import Layout
from uspft.planner.memory.copies import LayerOfCopies
from uspft.planner.memory.experts import logit_bytes
from uspft.planner.memory.head_groups import LayerInGroups
from uspft.planner.memory.layer import Layer, enter, norm
from uspft.planner.memory.mesh import all_features
from uspft.planner.memory.operations import INDEX, WIDE, LayerTape, NormKind
from uspft.planner.memory.sizes import LayerSizes, index_bytes, layers_of
from uspft.planner.memory.states import StateLayer
from uspft.planner.memory.tape import GradientStorages, Tensor
from uspft.planner.options import RECOMPUTES, Options
from uspft.planner.products import head_projection, outside_modules
from uspft.planner.trained import (
    EMBEDDING,
    HEAD,
    LAST_NORM,
)

if TYPE_CHECKING:
    from uspft.families import ModelShape

_PROJECTION_NORM = "per_layer_projection_norm"
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
    lent: float = 0.0
    """What stays alive until the forward of the last layer has run, for other layers (Gemma 4)."""
    moved: float = 0.0
    """What operations read and write, forward and backward, except products, attention and
    transfers; with groups of heads or copies it is not counted."""


class LaterLayers(NamedTuple):
    """What is alive in a layer's backward because of layers behind it (Gemma 4)."""

    embeddings: bool = False
    """Whether the embeddings of all layers have received a gradient."""
    keys: bool = False
    """Whether the keys and values that the layer uses with others have."""
    others: float = 0.0
    """The bytes of other layers' keys and values, or of the gradients of these."""


NOTHING_LATER = LaterLayers()


@lru_cache(maxsize=4096)
def layer_bytes(
    sizes: LayerSizes,
    *,
    reached: bool = True,
    beside: float = 0.0,
    embeddings: bool = True,
    later: LaterLayers = NOTHING_LATER,
) -> LayerBytes:
    """Return the bytes of a layer. reached: whether its input needs a gradient. beside: the bytes
    of what else transformers keeps until the last layer has run. embeddings: whether the embeddings
    of all layers need a gradient."""
    tape = LayerTape(sizes.element)
    size = sizes.between_bytes()
    hidden = [tape.leaf(size)]  # a list, so that it can be freed as early as in a run
    if not reached:
        hidden = [Tensor(size, hidden[0].storage)]
    plain = StateLayer if sizes.state else Layer
    kind = LayerOfCopies if sizes.copies > 1 else LayerInGroups if sizes.at_once else plain
    layer = kind(tape, sizes)
    layer.shares(embeddings=embeddings, keys=reached)

    def received() -> list[Tensor]:
        """Return the tensors beside the output that have received gradients."""
        return [layer.embeddings] * later.embeddings + layer.pair * later.keys

    if sizes.recompute is None:
        out = layer(hidden[0])
        lent, forward = tape.live, tape.most + beside
        layer.lent.clear()  # by transformers behind the last layer
        before = tape.live
        hidden.clear()
        kept, lets_go = tape.live - out.size, tape.live < before
        if out.node:
            out.storage, others = None, tape.new(later.others)
            tape.backward(out, tape.new(size), received())
            del others
        most = max(forward, tape.most)
        return LayerBytes(kept, most, kept, lets_go=lets_go, lent=lent - before, moved=tape.moved)
    with tape.first_run():
        out = layer(hidden[0])
    out.storage, trains = None, out.node is not None
    tape.most += beside
    if isinstance(layer, LayerInGroups):
        layer.groups.waits()
    kept = tape.live
    if trains:
        # The input that came back from the host is freed with the second run.
        then, others = hidden.clear if sizes.offloads else lambda: None, tape.new(later.others)
        tape.second_run([out, *received()], lambda: layer(hidden[0]), then)
        del others
    held = sum(one.size for one in tape.stays) + sizes.pair_bytes * sizes.lends
    kept, held = (kept, held) if trains else (0.0, 0.0)
    return LayerBytes(kept, tape.most, held, moved=tape.moved)


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
    scaled: bool = False
    """Whether logits are multiplied by a constant."""


@lru_cache(maxsize=4096)
def head_bytes(sizes: HeadSizes, *, reached: bool = True) -> LayerBytes:
    """Return the bytes of the last norm, the head and the loss (model/causal.py, model/loss.py):
    between forward and backward, and the peak. reached: whether their input needs a gradient."""
    tape, s = LayerTape(sizes.layer.element), sizes.layer
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
    return LayerBytes(kept, tape.most, moved=tape.moved)


def _loss(tape: LayerTape, sizes: HeadSizes, hidden: Tensor) -> Tensor:
    s = sizes.layer
    e, tokens = s.element, s.sharing.tokens
    tile = min(sizes.tile or tokens, tokens)
    rows = tape.taken(hidden, hidden.size)  # those with a target
    weight = float(s.hidden * sizes.vocabulary)
    labels = tape.new(INDEX * tokens)
    table = Tensor(e * weight / (s.mesh_rows or 1), None, tape.parameter(sizes.trains).node, 0)
    table = all_features(tape, table, s.mesh_rows or 1)
    of_rows = tape.new(rows.size) if rows.node else None
    of_weight = tape.new(WIDE * weight) if sizes.trains else None
    cast = (e + WIDE) * (e < WIDE)
    # Of a logit: its maximum, the difference, the exponential, their sum, the probability; a cap
    # and its slope; a factor and its slope.
    each = 2 * cast + WIDE * (8 + 19 * sizes.capped + 4 * sizes.scaled)
    tape.moves(tokens * sizes.vocabulary * each)
    tape.moves(2 * rows.size * bool(of_rows) + (WIDE + cast) * weight * sizes.trains)
    logits: object = None
    bend: object = None
    scaled: object = None  # a tile's logits, alive until the next tile's are scaled
    for part in (tile, min(tile, tokens - tile)) if tile < tokens else (tile,):
        number = float(part * sizes.vocabulary)
        narrow = tape.new(e * number)
        logits = narrow if e == WIDE else tape.new(WIDE * number)
        del narrow
        if sizes.capped:
            bend = tape.new(WIDE * number)
        scaled = logits
        slope = tape.new(e * number) if e < WIDE else logits
        if of_rows:
            tape.new(float(e * part * s.hidden))
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

    moves = 0.0, 2 * sum(one.size for one in made)  # times the factor of the loss
    return tape.record((rows, table), (0.0,), backward, moves=moves)[0]


def embedding_moved(sizes: LayerSizes, head: HeadSizes, *, trains: bool, tied: bool) -> float:
    """Return the bytes that the embedding's look-up reads and writes, forward and backward.

    sizes: of the first layer. trains: whether the embedding does. tied: whether its gradient is
    added to that of the head.
    """
    out, table = sizes.inside_bytes(), sizes.element * sizes.hidden * head.vocabulary
    # times a constant, and 0 for other ranks' words
    more = 2 * out * (sizes.kind.scaled + (sizes.tensor > 1))
    return 2 * out + more + (3 * out + more + table * (1 + 3 * tied)) * trains


@lru_cache(maxsize=256)
def embeddings_bytes(sizes: LayerSizes, table: float, *, reached: bool) -> LayerBytes:
    """Return the bytes of what makes the embeddings of all layers (Gemma 4), and of these, which
    stay until the first layer's backward has run.

    sizes: of the first layer, with what trains of the modules that make them. table: the bytes of
    the embedding table's gradient. reached: whether the hidden states before the first layer need
    a gradient.
    """
    tape, s = LayerTape(sizes.element), sizes
    size, every = s.between_bytes(), s.between_bytes(s.embeddings)
    known = (s.recompute or s.wide == 1) and not s.offloads  # in what the first layer keeps
    hidden = tape.new(0.0 if known else size)
    x = tape.leaf(size, hidden) if reached else Tensor(size, hidden)
    words = tape.parameter("embed_tokens_per_layer" in s.trained)
    of_words = tape.remade(tape.record((words,), (every,), lambda grads: [tape.new(table)])[0])
    of_hidden = tape.remade(Layer(tape, s).project(x, "per_layer_model_projection"))
    how = NormKind(wide=True, powered=s.kind.powered_norms)
    number, trains = s.between * s.embeddings / s.embedding, _PROJECTION_NORM in s.trained
    normed = tape.rms_norm(of_hidden, number, how, trains=trains)
    del of_hidden
    made = tape.remade(tape.added(normed, of_words))
    del normed, of_words, hidden
    x.storage = None
    kept = tape.live
    if made.node:
        made.storage = None
        tape.backward(made, tape.new(every), [x])
    return LayerBytes(kept, tape.most, moved=tape.moved)


def later_layers(kinds: Sequence[LayerSizes]) -> list[LaterLayers]:
    """Return what is alive in each layer's backward because of the layers behind it."""
    if not kinds[0].embedding:
        return [NOTHING_LATER] * len(kinds)
    lenders = {number: of for number, of in enumerate(kinds) if of.lends}
    last = {of.keys_of: number for number, of in enumerate(kinds)}
    found, again = list[LaterLayers](), False
    for number, of in enumerate(kinds):
        again, others = again or of.recompute is not None, 0.0
        for lender, pair in lenders.items():
            held = again and number < lender  # for the second runs of checkpointed layers
            waits = lender < number < last[lender] and of.keys_of != lender
            others += pair.pair_bytes * (held or waits)
        keys = of.keys_of is not None and number < last[of.keys_of]
        found.append(LaterLayers(number + 1 < len(kinds), keys, others))
    return found


def balance_bytes(head: HeadSizes, routers: Sequence[float]) -> float:
    """Return the peak bytes of the routers' loss (model/router.py), in addition to their logits:
    the gradients from the loss, probabilities, and for one layer its choices and its logits in
    float32."""
    s, (first, *_) = head.layer, [*filter(None, routers), 0.0]
    wide = WIDE / s.element
    gradients = s.inside_bytes() + s.element * s.hidden * head.vocabulary * head.trains
    return (gradients + wide * (sum(routers) + 2 * first)) if first else 0.0


class Moved(NamedTuple):
    """The bytes that the operations of a forward and backward on a rank read and write."""

    per_token: float
    per_pass: float = 0.0

    def of(self, tokens: float) -> float:
        return self.per_token * tokens + self.per_pass


def moved_bytes(
    shape: ModelShape, rows: int, columns: int, experts: int, options: Options
) -> dict[Blocks | None, Moved]:
    """Return what operations read and write, except products, attention and transfers: the mean of
    the layers with these blocks, and under None what is outside of the layers.

    rows, columns: of the mesh; without one, rows are 1 and columns the tensor-parallel degree.
    experts: the degree of expert parallelism. Groups of heads and copies are taken to move as much
    as a plain layer, whichever part of it is recomputed.
    """
    plain = replace(options, algorithm=WHOLE, at_once=None, copies=1, recompute=RECOMPUTES[-1])
    plain = replace(plain, micro_batch=1, first_layers=None, offload_activations=False)
    on_mesh = rows * columns > 1 and options.slices is not None
    layout = Layout(
        columns, ring=rows, data=experts, mesh_rows=rows, blocks=on_mesh, experts=experts
    )
    tokens = 2 * columns * (options.mlp_tile or 1)
    row = rows * tokens
    few, more = (_moved(pass_bytes(shape, layout, n * row, plain)[0], shape) for n in (1, 2))

    def linear(few: float, more: float) -> Moved:
        return Moved((more - few) / tokens, 2 * few - more)

    return {blocks: linear(few[blocks], more[blocks]) for blocks in few}


def _moved(one: PassBytes, shape: ModelShape) -> dict[Blocks | None, float]:
    found: dict[Blocks | None, list[float]] = {None: [one.embedded.moved + one.head.moved]}
    for blocks, layer in zip(layer_blocks(shape), one.layers, strict=True):
        found.setdefault(blocks, []).append(layer.moved)
    return {blocks: sum(every) / len(every) for blocks, every in found.items()}


class ChunkKeys(NamedTuple):
    """The bytes of a chunk's keys and values in a layer, which later chunks use."""

    size: float
    kept: float
    """The bytes saved in addition to what the layer saves anyway."""
    first: float
    """The bytes of the gradients from the next chunk alone."""
    summed: float
    """The bytes of the float32 sum of gradients from all later chunks."""

    @property
    def without_backward(self) -> ChunkKeys:
        """Those of a layer without a backward, which saves nothing else."""
        return ChunkKeys(self.size, self.size, 0.0, 0.0)


@dataclass(frozen=True)
class PassBytes:
    """The activation memory of one micro-batch, or of a chunk of it, on a rank that has every
    layer."""

    layers: tuple[LayerBytes, ...]
    head: LayerBytes
    """Of the last norm, the head and the loss."""
    hidden: float
    """Of the hidden states between layers, which stages send one another."""
    angles: float
    """Of the cosines and sines of rotary embeddings, which each forward of a stage computes."""
    embedded: LayerBytes = LayerBytes(0.0, 0.0)
    """Of the embedding's output, if the first layer does not save it, and of what makes the
    embeddings of each layer (Gemma 4)."""
    offloads: bool = False
    """Whether what layers save is offloaded to the host."""
    keeps_input: tuple[bool, ...] = ()
    """For each layer whether it saves its input."""
    bare: tuple[LayerBytes, ...] = ()
    """The first layers in a stage without the embedding, where their input needs no gradient: those
    that do not train, and the first that does."""
    routers: tuple[float, ...] = ()
    """Of the logits of each layer's router, which stay for the routers' loss; 0 in stages."""
    keys: tuple[ChunkKeys, ...] = ()
    """For each layer, if micro-batches go through stages in chunks."""

    @property
    def first(self) -> int:
        """The first layer that trains; earlier stages save nothing, since they have no backward."""
        return max(0, len(self.bare) - 1)


def _bare(sizes: LayerSizes) -> LayerBytes:
    """Return the bytes of a layer whose input needs no gradient. One that trains and is not
    checkpointed runs beside this input."""
    beside = (sizes.trains and not sizes.recompute) * sizes.between_bytes()
    return layer_bytes(sizes, reached=False, beside=beside)


def pass_bytes(
    shape: ModelShape, layout: Layout, row_tokens: int, options: Options, behind: float = 0.0
) -> tuple[PassBytes, float]:
    """Return the bytes of one micro-batch by layer, and of its batch. behind: as in RowSharing."""
    kinds = layers_of(shape, layout, row_tokens, options, behind)
    # With checkpointing transformers makes the embedding's output require a gradient.
    outside = options.trains.outside
    reached, each = EMBEDDING in outside or options.checkpointing, list[LayerBytes]()
    known, lent = dict[tuple[object, ...], LayerBytes](), 0.0
    offloads = kinds[0].offloads
    # A frozen embedding's output is a leaf, which stays alive as long as the graph.
    copied = kinds[0].tensor > 1 or offloads or kinds[0].kind.scaled
    leaf = options.checkpointing and EMBEDDING not in outside and copied
    stays, entry = kinds[0].inside_bytes() if leaf else 0.0, LayerBytes(0.0, 0.0)
    if offloads and all(one is not kinds[0] for one in kinds[1:]):
        kinds[0] = replace(kinds[0], first=True)
    of_embeddings = options.trains.of_embeddings(shape)
    embeddings = bool(kinds[0].embedding) and (reached or bool(of_embeddings))
    if kinds[0].embedding:
        table = float(next(iter(outside_modules(shape).values())).parameters)
        made_by = replace(kinds[0], trained=of_embeddings.weights, adapted=of_embeddings.adapters)
        entry = embeddings_bytes(made_by, options.element * table, reached=reached)
    for sizes, later in zip(kinds, later_layers(kinds), strict=True):
        # transformers' forward holds what the first layer takes, and what was scaled to it.
        scaled, apart = sizes.kind.scaled, not leaf or sizes.tensor > 1
        beside = (scaled and apart) + (offloads and bool(each) and (scaled or apart))
        if sizes.recompute is None:
            beside = (bool(each) and each[0].lets_go) + (scaled and options.element < WIDE)
        held = beside * sizes.between_bytes() + lent
        key = id(sizes), reached, held, later
        known[key] = known.get(key) or layer_bytes(
            sizes, reached=reached, beside=held, embeddings=embeddings, later=later
        )
        each.append(known[key])
        reached, lent = reached or sizes.trains or embeddings, lent + each[-1].lent
    head = HeadSizes(
        kinds[-1],
        head_projection(shape).on(layout.mesh_columns).outputs,
        options.loss_tile,
        trains=(EMBEDDING if shape.tied else HEAD) in outside,
        norm_trains=LAST_NORM in outside,
        capped=shape.full.get("final_logit_softcapping") is not None,
        scaled=shape.full.get("logits_scaling", 1.0) != 1.0,
    )
    loss = head_bytes(head, reached=reached)
    tokens = kinds[0].sharing.tokens
    angles = tokens * kinds[0].kind.angle_bytes(shape.head_dim, options.element)
    embedded = entry.moved + embedding_moved(
        kinds[0], head, trains=EMBEDDING in outside, tied=shape.tied
    )
    # Without checkpointing a norm saves its input if that is float32 anyway.
    keeps = tuple((one.recompute or options.element == WIDE) and not offloads for one in kinds)
    trains = [bool(one.trained or one.adapted) for one in kinds]
    # If only the last norm or the head trains, the last stage is the first that does.
    first = 0 if EMBEDDING in outside else [*trains[:-1], True].index(True)
    alone = kinds[: first + 1] if first else []
    asked = bool(shape.full.get("output_router_logits", False))
    routers = tuple(logit_bytes(one, tokens) * asked if one.experts else 0.0 for one in kinds)
    balanced = max(loss.most, balance_bytes(head, routers))
    one = PassBytes(
        tuple(each),
        LayerBytes(loss.kept, balanced, moved=loss.moved),
        kinds[0].between_bytes(),
        float(angles),
        LayerBytes(stays + entry.kept, stays + entry.most, held=stays + entry.kept, moved=embedded),
        offloads,
        tuple(map(bool, keeps)),
        tuple(map(_bare, alone)),
        routers,
        tuple(map(_chunk_keys, kinds)) if options.schedule.chunks > 1 else (),
    )
    return one, BATCH_BYTES * tokens + index_bytes(layout, options, tokens)


def _chunk_keys(layer: LayerSizes) -> ChunkKeys:
    """Return the bytes of a chunk's keys and values in a layer, or of the state that it passes to
    the next chunk; the state's gradient is not counted."""
    if layer.state:
        of = layer.state.sizes
        size = float(of.values * of.key_dim * of.value_dim * WIDE)
        return ChunkKeys(size, size, 0.0, 0.0)
    how, seen = layer.sharing, 1.0
    if how.row.window:
        seen = min(1.0, how.row.window.keys / (how.tokens * how.row.ulysses))
    pair = seen * how.bytes(2 * how.row.ulysses * how.widest[1])
    # They are attention's saved ones, unless it saves none, or an exchange has copied them.
    kept, wide = pair if layer.recompute or how.row.ulysses > 1 else 0.0, pair * WIDE / how.element
    return ChunkKeys(pair, kept, pair if how.row.ring == 1 else wide, wide)

"""The bytes of activations on one rank: each layer and the loss, as they run, on a tape.

Functions follow the code that they stand for line by line: transformers' layers, peft's
projections, and what model/ and tensor/ put between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial

from uspft.planner.attention_memory import Remembered, Sharing, attend, attend_over_heads
from uspft.planner.operations import (
    WIDE,
    added,
    bent,
    dropped,
    linear,
    multiplied,
    remade,
    rms_norm,
    tiled,
    turned,
    viewed,
)
from uspft.planner.tape import GradientStorages, RunBackward, Storage, Tape, Tensor


@dataclass(frozen=True)
class LayerSizes:
    """A layer as a rank has it."""

    sharing: Sharing
    """Of attention, whose tokens are those inside of blocks."""
    hidden: int
    inner: int
    tensor: int = 1
    """Megatron's ranks."""
    splits_tokens: bool = False
    """Whether those have different tokens between blocks."""
    normed_heads: bool = False
    qkv_bias: bool = False
    trained: frozenset[str] = frozenset()
    """The names inside a layer of modules whose weights train."""
    adapted: frozenset[str] = frozenset()
    """Those of projections that have an adapter."""
    rank: int = 0
    """Of adapters."""
    dropout: bool = False
    tile: int | None = None
    """Tokens; None where MLPs and norms take all at once."""
    recompute: str | None = None
    """What of attention is made again; None where the layer is not checkpointed."""
    offloads: bool = False

    @property
    def element(self) -> int:
        return self.sharing.element

    @property
    def between(self) -> int:
        """The tokens between blocks."""
        tokens = self.sharing.tokens
        return -(-tokens // self.tensor) if self.splits_tokens else tokens

    def hidden_bytes(self, tokens: int) -> float:
        return float(tokens * self.hidden * self.element)


class Layer:
    """A layer on a tape."""

    def __init__(self, tape: Tape, sizes: LayerSizes) -> None:
        self.tape, self.sizes = tape, sizes
        self._remembered: Remembered | None = None
        self.below: Storage | None = None
        """The input of the layer below, where it waits on the host and has come."""
        if sizes.recompute in ("nothing", "exchange"):
            exchanges = sizes.sharing.ulysses > 1 and sizes.recompute == "nothing"
            self._remembered = Remembered(tape, wanted=not exchanges)

    def __call__(self, hidden: Tensor) -> Tensor:
        residual = hidden
        hidden = self._norm(hidden, "input_layernorm")
        hidden = self._attention(hidden)
        hidden = added(self.tape, residual, hidden)
        residual = hidden
        hidden = self._norm(hidden, "post_attention_layernorm")
        hidden = self._mlp(hidden)
        return added(self.tape, residual, hidden)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return norm(self.tape, self.sizes, x, self.sizes.between, trains=self._trains(name))

    def _trains(self, name: str) -> bool:
        return name in self.sizes.trained

    def _project(self, x: Tensor, name: str, takes: int, gives: int) -> Tensor:
        """Return a projection of x, with its adapter's."""
        tape, s = self.tape, self.sizes
        element, size = s.element, x.size / takes * gives
        weight = float(element * takes * gives)
        bias = float(element * gives) if s.qkv_bias and name.startswith("self_attn") else 0.0
        made = linear(tape, x, size, weight, trains=self._trains(name), bias=bias)
        if name not in s.adapted:
            return made
        return added(tape, made, remade(tape, self._adapted(x, takes, size, gives)))

    def _adapted(self, x: Tensor, takes: int, size: float, gives: int) -> Tensor:
        """Return what an adapter's two factors make of x."""
        tape, s = self.tape, self.sizes
        thin = linear(
            tape,
            dropped(tape, x, x.size / s.element) if s.dropout else x,
            x.size / takes * s.rank,
            float(s.element * takes * s.rank),
            trains=True,
        )
        return linear(tape, thin, size, float(s.element * s.rank * gives), trains=True)

    def _leave(self, x: Tensor) -> Tensor:
        """Return the sum of what ranks have made of a block."""
        tape, s = self.tape, self.sizes
        if s.tensor == 1:
            return x
        if not s.splits_tokens:
            return tape.record((x,), (x.size,), lambda: lambda grads: grads)[0]
        every, own = viewed(tape, x), s.hidden_bytes(s.between)
        before = x.size

        def backward() -> RunBackward:
            return lambda grads: [tape.new(before)]

        return tape.record((every,), (own,), backward)[0]

    def _attention(self, x: Tensor) -> Tensor:
        tape, s = self.tape, self.sizes
        how = s.sharing
        queries, keys = how.heads * how.dim, how.kv_heads * how.dim
        inner = enter(tape, s, x)
        query = viewed(tape, self._project(inner, "self_attn.q_proj", s.hidden, queries))
        query = self._norm_of_heads(query, "self_attn.q_norm", how.heads)
        key = viewed(tape, self._project(inner, "self_attn.k_proj", s.hidden, keys))
        key = self._norm_of_heads(key, "self_attn.k_norm", how.kv_heads)
        value = viewed(tape, self._project(inner, "self_attn.v_proj", s.hidden, keys))
        query, key = turned(tape, query), turned(tape, key)
        out = self._attend([query, key, value])
        return self._leave(self._project(out, "self_attn.o_proj", queries, s.hidden))

    def _norm_of_heads(self, x: Tensor, name: str, heads: int) -> Tensor:
        s = self.sizes
        if not s.normed_heads:
            return x
        number = s.sharing.tokens * heads
        return norm(self.tape, s, x, number, trains=self._trains(name))

    def _attend(self, qkv: list[Tensor]) -> Tensor:
        tape, how = self.tape, self.sizes.sharing
        calls = [self._fetch if self.sizes.offloads else None, None, None]
        qkv = [viewed(tape, one, then) for one, then in zip(qkv, calls, strict=True)]
        inner = partial(attend, tape, how=how)
        remembered = self._remembered
        if remembered and self.sizes.recompute == "exchange":
            return attend_over_heads(tape, qkv, how, partial(remembered, inner))
        whole = partial(attend_over_heads, tape, how=how, inner=inner)
        return remembered(whole, qkv) if remembered else whole(qkv)

    def _fetch(self) -> None:
        self.below = self.tape.new(self.sizes.hidden_bytes(self.sizes.between))

    def _mlp(self, x: Tensor) -> Tensor:
        tape, s = self.tape, self.sizes
        inner = enter(tape, s, x)
        if s.tile and s.tile < s.sharing.tokens:
            share = s.tile / s.sharing.tokens
            trains = any(name.startswith("mlp.") for name in s.trained | s.adapted)
            made = tiled(
                tape,
                [inner],
                lambda parts: self._dense(parts[0]),
                share,
                WIDE / s.element,
                trains=trains,
            )
        else:
            made = self._dense(inner)
        return self._leave(made)

    def _dense(self, x: Tensor) -> Tensor:
        s = self.sizes
        return self._project(
            multiplied(
                self.tape,
                bent(self.tape, self._project(x, "mlp.gate_proj", s.hidden, s.inner)),
                self._project(x, "mlp.up_proj", s.hidden, s.inner),
            ),
            "mlp.down_proj",
            s.inner,
            s.hidden,
        )


def enter(tape: Tape, sizes: LayerSizes, x: Tensor) -> Tensor:
    """Return what a block, or the head, takes of what lies between (tensor/megatron.py)."""
    if sizes.tensor == 1:
        return x
    if not sizes.splits_tokens:
        return viewed(tape, x)
    part = viewed(tape, x)
    every, own = sizes.hidden_bytes(sizes.sharing.tokens), x.size
    return tape.record((part,), (every,), lambda: lambda grads: [tape.new(own)])[0]


def norm(tape: Tape, sizes: LayerSizes, x: Tensor, number: float, *, trains: bool) -> Tensor:
    """Return the norm of x, a tile at a time where that is asked for. number: of what it norms."""
    wide = WIDE / sizes.element
    tile, tokens = sizes.tile, sizes.between if x.size else 1
    if tile and tile < tokens:
        share = tile / tokens
        module = lambda parts: rms_norm(  # noqa: E731
            tape, parts[0], wide * parts[0].size, number * share, trains=trains
        )
        return tiled(tape, [x], module, share, wide, trains=trains)
    return rms_norm(tape, x, wide * x.size, number, trains=trains)


@dataclass(frozen=True)
class LayerBytes:
    """What a layer takes on the device; what waits on the host where it does."""

    kept: float
    """Until its backward."""
    most: float
    """What is alive at the most while it runs, with what it keeps."""


@lru_cache(maxsize=4096)
def layer_bytes(sizes: LayerSizes, *, reached: bool = True) -> LayerBytes:
    """Return what a layer takes. reached: whether the gradient goes on below it."""
    tape = Tape()
    size = sizes.hidden_bytes(sizes.between)
    hidden = [tape.leaf(size)]  # which is let go of as soon as it can be, as is its gradient
    if not reached:
        hidden = [Tensor(size, hidden[0].storage, None, 0)]
    layer = Layer(tape, sizes)
    if sizes.recompute is None:
        out = layer(hidden[0])
        hidden.clear()
        kept = tape.live - out.size
        if out.node:
            out.storage = None
            tape.backward(out, tape.new(size))
        return LayerBytes(kept, tape.most)
    with tape.first_run():
        out = layer(hidden[0])
    trains = out.node is not None
    del out
    kept = tape.live
    if trains:
        # What came back from the host for the second run goes with it.
        then = hidden.clear if sizes.offloads else lambda: None
        tape.second_run(lambda: layer(hidden[0]), size, then)
    return LayerBytes(kept if trains else 0.0, tape.most)


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


@lru_cache(maxsize=4096)
def head_bytes(sizes: HeadSizes, *, reached: bool = True) -> LayerBytes:
    """Return what is alive from behind the last layer until before its backward (model/causal.py,
    model/loss.py): between forward and backward, and at the most. reached: whether the gradient
    goes on below it."""
    tape, s = Tape(), sizes.layer
    size = s.hidden_bytes(s.between)
    before = tape.leaf(size)
    if not reached:
        before = Tensor(size, before.storage, None, 0)
    hidden = norm(tape, s, before, s.between, trains=sizes.norm_trains)
    del before
    every = viewed(tape, enter(tape, s, hidden))
    del hidden
    loss = _loss(tape, sizes, every)
    del every
    kept = tape.live
    if loss.node:
        loss.storage = None
        tape.backward(loss, tape.new(0.0))
    return LayerBytes(kept, tape.most)


INDEX = 8
"""The bytes of a number of int64, as labels are."""


def _loss(tape: Tape, sizes: HeadSizes, hidden: Tensor) -> Tensor:
    s = sizes.layer
    e, tokens = s.element, s.sharing.tokens
    tile = min(sizes.tile or tokens, tokens)
    rows = _selected(tape, hidden)
    weight = float(s.hidden * sizes.vocabulary)
    labels = tape.new(INDEX * tokens)
    of_rows = tape.new(rows.size) if rows.node else None
    of_weight = tape.new(WIDE * weight) if sizes.trains else None
    logits: object = None
    for _ in range(1 if tile == tokens else 2):
        number = float(tile * sizes.vocabulary)
        narrow = tape.new(e * number)
        logits = narrow if e == WIDE else tape.new(WIDE * number)
        del narrow
        slope = tape.new(e * number) if e < WIDE else logits
        if of_rows:
            tape.new(float(e * tile * s.hidden))
        if of_weight:
            tape.new(e * weight)
        del slope
    del labels
    made = [one for one in (of_rows, of_weight) if one]
    if of_weight and e < WIDE:
        made[-1] = tape.new(e * weight)
    del of_rows, of_weight
    held = [*made]
    del made

    def backward() -> RunBackward:
        kept = [*held]
        held.clear()

        def run(grads: GradientStorages, kept: list[Storage] = kept) -> GradientStorages:
            found = [tape.new(one.size) for one in kept]
            return [found[0] if rows_train else None, found[-1] if sizes.trains else None]

        return run

    rows_train = bool(rows.node)
    return tape.record((rows, tape.parameter(sizes.trains)), (0.0,), backward)[0]


def _selected(tape: Tape, x: Tensor) -> Tensor:
    """Return the tokens of x that have a target."""
    size = x.size

    def backward() -> RunBackward:
        def run(grads: GradientStorages) -> GradientStorages:
            zeros = tape.new(size)
            found = tape.new(size)
            del zeros
            return [found]

        return run

    return tape.record((x,), (size,), backward)[0]

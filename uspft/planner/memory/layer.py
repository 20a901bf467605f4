"""The memory of a layer, by replaying its forward on a tape.

Functions follow the code that they simulate line by line: transformers' layers, peft's projections,
and the hooks of model/ and tensor/. Sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from uspft.planner.layer_kinds import SHARED_EXPERT, SHARED_GATE
from uspft.planner.memory.attention import InnerAttention, Remembered, attend, attend_over_heads
from uspft.planner.memory.experts import ExpertsMemory, chosen
from uspft.planner.memory.mesh import ProductOnMesh
from uspft.planner.memory.operations import Angles, LayerTape, NormKind
from uspft.planner.memory.sizes import LayerSizes
from uspft.planner.memory.tape import Storage, Tensor

_EMBEDDED = ("", "post_per_layer_input_norm")
"""The norms before and after what a layer adds for its own embedding of each token."""


class Layer:
    """A layer on a tape."""

    def __init__(self, tape: LayerTape, sizes: LayerSizes) -> None:
        self.tape, self.sizes = tape, sizes
        self._remembered: Remembered | None = None
        self.below: Storage | None = None
        """The input of the layer below, once it is copied back from the host."""
        self.embeddings = Tensor(0.0)
        """The embeddings of all layers, of which each adds its own (Gemma 4)."""
        self.pair: list[Tensor] = []
        """The keys and values that the layer uses with others (Gemma 4)."""
        self.lent: list[Storage | None] = []
        """Those of the first run, which are stored for the other layers."""
        self._made: dict[str, Tensor] = {}
        """The outputs of projections into a block on a mesh, which are computed together."""
        if sizes.recompute in ("nothing", "exchange"):
            exchanges = sizes.sharing.row.ulysses > 1 and sizes.recompute == "nothing"
            self._remembered = Remembered(tape, wanted=not exchanges)

    def __call__(self, hidden: Tensor) -> Tensor:
        s = self.sizes
        if s.experts and any(s.kind.norms_beside):
            hidden = self._with_gradient(hidden, trains=s.trains)
        size = s.between_bytes(s.embedding)
        own = self.tape.parted(self.embeddings, [size]) if s.embedding else []
        hidden = self.first_half(hidden)
        hidden = self.second_half(hidden)
        if not own:
            return hidden
        return self._added(hidden, partial(self._embedded, own.pop()), _EMBEDDED)

    def _embedded(self, own: Tensor, x: Tensor) -> Tensor:
        """Return what a layer adds for its own embedding of each token."""
        made = self.tape.bent(self.project(x, "per_layer_input_gate"))
        return self.project(self.tape.multiplied(made, own), "per_layer_projection")

    def shares(self, *, embeddings: bool, keys: bool) -> None:
        """Take the embeddings of all layers, and the keys and values of another layer, whose bytes
        are counted elsewhere. embeddings, keys: whether these need gradients."""
        s, leaf, none = self.sizes, self.tape.leaf, self.tape.new(0.0)
        size, half = s.between_bytes(s.embeddings), s.pair_bytes / 2
        self.embeddings = leaf(size, none) if embeddings else Tensor(size, none)
        for _ in range(2 * s.borrows):
            self.pair.append(leaf(half, none) if keys else Tensor(half, none))

    def first_half(self, hidden: Tensor) -> Tensor:
        """Return the residual plus the output of attention, or of a layer with a state."""
        return self._added(hidden, self._attention, self.sizes.kind.norms[:2])

    def second_half(self, hidden: Tensor) -> Tensor:
        """Return the residual plus the output of the MLP, or of the experts."""
        return self._added(hidden, partial(self._mlp, hidden), self.sizes.kind.norms[2:])

    def _added(
        self, residual: Tensor, block: Callable[[Tensor], Tensor], norms: Sequence[str]
    ) -> Tensor:
        """Return the residual plus a block's output. norms: before and after the block."""
        hidden = self.norm(residual, norms[0])
        return self.plus(residual, self.norm(block(hidden), norms[1]))

    def plus(self, residual: Tensor, made: Tensor) -> Tensor:
        """Return the residual plus a block's output, multiplied by a constant in some families."""
        return self.tape.added(residual, self.tape.remade(made) if self.sizes.kind.scaled else made)

    def norm(self, x: Tensor, name: str) -> Tensor:
        s = self.sizes
        return norm(self.tape, s, x, s.between, trains=self._trains(name)) if name else x

    def _trains(self, name: str) -> bool:
        return name in self.sizes.trained

    def _any_trains(self, *prefixes: str) -> bool:
        """Tell whether any weight or adapter trains in modules whose names begin with a prefix."""
        of = tuple(filter(None, prefixes))
        return any(one.startswith(of) for one in self.sizes.trained | self.sizes.adapted)

    def project(self, x: Tensor, name: str) -> Tensor:
        """Return a projection of x, including its adapter."""
        tape, s = self.tape, self.sizes
        takes, gives = s.matrix(name)
        size, made = x.size / takes * gives, round(s.made_share(name) * gives)
        if not made:
            return Tensor(size, tape.new(0.0))

        def among_zeros(found: Tensor) -> Tensor:
            rest = Tensor(size - found.size)
            return tape.joined([found, rest]) if made < gives else found

        found = among_zeros(self._product(x, name, takes, made))
        if name not in s.adapted:
            return found
        part = x.size / takes * made
        return tape.added(
            found, tape.remade(among_zeros(self._adapted(x, name, takes, part, made)))
        )

    def _product(self, x: Tensor, name: str, takes: int, gives: int) -> Tensor:
        tape, s = self.tape, self.sizes
        block = name.partition(".")[0]
        if not s.mesh_rows:
            biased = s.kind.qkv_bias and block == "self_attn"
            weight, bias = (float(s.element * n * gives) for n in (takes, biased))
            size = x.size / takes * gives
            return tape.linear(x, size, weight, trains=self._trains(name), bias=bias)
        every = s.into(block)
        number = 2 * (block == "mlp") + (name not in every)
        mesh = s.mesh_rows, s.tensor, s.slices[number]
        product = ProductOnMesh(tape, s.element, s.sharing.tokens, s.hidden, *mesh)
        if name not in every:
            return product.outward(tape.viewed(x), takes, trains=self._trains(name))
        if name not in self._made:
            outputs = [s.matrix(one)[1] for one in every]
            made = product.inward(tape.viewed(x), outputs, [*map(self._trains, every)])
            self._made = dict(zip(every, made, strict=True))
        return self._made.pop(name)

    def _adapted(self, x: Tensor, name: str, takes: int, size: float, gives: int) -> Tensor:
        """Return the output of an adapter's A and B for x."""
        tape, s = self.tape, self.sizes
        given = tape.dropped(x, x.size / s.element) if s.dropout else x
        sizes = x.size / takes * s.rank, float(s.element * takes * s.rank)
        thin = self._factor(given, f"{name}.lora_A", *sizes)
        del given
        return self._factor(thin, f"{name}.lora_B", size, float(s.element * s.rank * gives))

    def _factor(self, x: Tensor, name: str, size: float, weight: float) -> Tensor:
        return self.tape.linear(x, size, weight, trains=True)

    def _enter(self, x: Tensor) -> Tensor:
        """Return a block's input, gathered from the hidden states between blocks."""
        return x if self.sizes.mesh_rows else enter(self.tape, self.sizes, x)

    def _leave(self, x: Tensor) -> Tensor:
        """Return a block's output, summed over tensor ranks."""
        tape, s = self.tape, self.sizes
        if s.tensor == 1 or s.mesh_rows:
            return x
        if not s.splits_tokens:
            return tape.copied(x)
        return tape.received(tape.viewed(x), s.between_bytes())

    def taken(self, x: Tensor, out: Tensor) -> Tensor:
        """Return the output projection's input. x: the block's input, of which gates are projected.
        out: attention's output."""
        tape, s = self.tape, self.sizes
        if not s.kind.gated:
            return out
        query, other = tape.halves(self.project(x, "self_attn.q_proj"))
        gate = tape.remade(other)
        del other
        query = self._turned(query)
        return tape.multiplied(out, tape.gated(gate))

    def before(self, x: Tensor) -> list[Tensor]:
        """Return attention's inputs for a block's input."""
        return self._qkv(x, [])

    def _attention(self, x: Tensor) -> Tensor:
        inner = self._enter(x)
        out = self._attended(inner)
        return self._leave(self.project(out, self.sizes.out))

    def _attended(self, x: Tensor) -> Tensor:
        """Return the input of attention's output projection."""
        tape, how = self.tape, self.sizes.sharing
        gate: list[Tensor] = []
        whole = partial(attend_over_heads, tape, how=how)
        out = self._mix(self._qkv(x, gate), whole, partial(attend, tape, how=how))
        return tape.multiplied(out, tape.gated(gate.pop())) if gate else out

    def _mix(
        self, parts: list[Tensor], whole: Callable[..., Tensor], inner: InnerAttention
    ) -> Tensor:
        """Return the output of attention or of the delta rule, if they are not checkpointed apart.
        whole: computes it with the all-to-alls of heads. inner: computes what is between these."""
        calls = [self._fetch if self.sizes.offloads else None, *[None] * (len(parts) - 1)]
        parts = [self.tape.viewed(one, then) for one, then in zip(parts, calls, strict=True)]
        kept = self._remembered
        if kept and self.sizes.recompute == "exchange":
            return whole(parts, inner=partial(kept, inner))
        around = partial(whole, inner=inner)
        return kept(around, parts) if kept else around(parts)

    def _fetch(self) -> None:
        self.below = self.tape.new(self.sizes.between_bytes() * (not self.sizes.first))

    def _qkv(self, x: Tensor, gate: list[Tensor]) -> list[Tensor]:
        """Return queries, keys and values. gate: receives the output's gate, if there is one."""
        tape, s = self.tape, self.sizes
        if s.kind.normed_values:
            return self._each_turned(x)
        if s.kind.fused:
            every = self.project(x, "self_attn.qkv_proj")
            heads, kv = s.sharing.heads, s.sharing.kv_heads
            each = every.size / (heads + 2 * kv)
            query, key, value = (tape.sliced(every, n * each) for n in (heads, kv, kv))
            del every
        else:
            query = self._normed(self.project(x, "self_attn.q_proj"), "q", s.sharing.heads, gate)
            key = self._normed(self.project(x, "self_attn.k_proj"), "k", s.sharing.kv_heads)
            value = tape.viewed(self.project(x, "self_attn.v_proj"))
        again = s.kind.angle_bytes(s.sharing.dim, s.element) * s.sharing.tokens
        own = tape.new(again) if s.kind.turned is LayerTape.turned_in_pairs else None
        return [self._turned(query, own), self._turned(key, own), value]

    def _turned(self, x: Tensor, own: Storage | None = None) -> Tensor:
        """Return queries or keys with rotary embeddings. own: the layer's own copy of these."""
        kind, by = self.sizes.kind, Angles(self.sizes.kind.turned_share, own)
        return kind.turned(self.tape, x, by) if kind.turned else x

    def _each_turned(self, x: Tensor) -> list[Tensor]:
        """Return queries, keys and values, each transposed as soon as it is computed (Gemma 4)."""
        tape, s = self.tape, self.sizes
        heads = s.sharing.kv_heads
        query = self._normed(self.project(x, "self_attn.q_proj"), "q", s.sharing.heads)
        query = self._turned(query)
        if s.borrows:
            return [query, *self.pair]
        made = self.project(x, "self_attn.k_proj")
        alike = s.kind.keys_are_values
        value = tape.viewed(made if alike else self.project(x, "self_attn.v_proj"))
        key = self._normed(made, "k", heads)
        del made
        key = self._turned(key)
        number = s.sharing.tokens * heads
        value = norm(tape, s, value, number, trains=False, split=False, weighs=False)
        if s.lends:
            self.pair = [replace(one, storage=None) for one in (key, value)]
            self.lent = self.lent or [key.storage, value.storage]
        return [query, key, value]

    def _normed(
        self, found: Tensor, kind: str, heads: int, gate: list[Tensor] | None = None
    ) -> Tensor:
        """Return projected queries or keys, normed if the layer norms them. gate: as in _qkv."""
        tape, s = self.tape, self.sizes
        name = f"self_attn.{kind}_norm"
        trains, tokens = self._trains(name), s.sharing.tokens
        if s.kind.normed_together:
            some = s.some_heads or s.tensor > 1
            found = norm(tape, s, found, tokens, trains=trains, split=some)
        if s.kind.gated and gate is not None:
            found, other = tape.halves(found)
            gate.append(tape.remade(other))
            del other
        found = tape.viewed(found)
        if s.kind.normed_heads:
            found = norm(tape, s, found, tokens * heads, trains=trains, split=False)
        return found

    def _mlp(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return the output of the MLP, or of the experts, for x, the normed residual."""
        tape, s = self.tape, self.sizes
        if not s.experts:
            return self._of_every(x)
        x = self._with_gradient(x, trains=self._any_trains("mlp."))
        behind_mlp, before, behind = s.kind.norms_beside
        every = None
        if s.inner and not s.kind.shared_last:
            every = self.norm(self._of_every(x), behind_mlp)
        # Their router sees tokens as they are between blocks.
        taken = tape.flattened(residual) if before else x
        index, scores = chosen(tape, taken, s)
        given = [self.norm(taken, before), index, scores]
        del taken, index, scores
        given = [enter(tape, s, one) for one in given]
        made = ExpertsMemory(tape, s)(*given)
        del given
        made = self.norm(self._leave(made), behind)
        if not s.inner:
            return made
        every = every or self._of_every(x)
        if s.mlp == SHARED_EXPERT:
            every = tape.multiplied(every, tape.gated(self.project(x, SHARED_GATE)))
        return tape.added(made, every)

    def _with_gradient(self, x: Tensor, *, trains: bool) -> Tensor:
        """Return the input of the module that has the experts, which asks for a gradient where any
        of the module's weights trains (model/experts.py)."""
        leaf = trains and x.storage and not x.node
        return self.tape.leaf(x.size, x.storage) if leaf else x

    def _of_every(self, x: Tensor) -> Tensor:
        """Return the output of the MLP that every token uses."""
        return self._leave(self.in_tiles(self._enter(x)))

    def in_tiles(self, x: Tensor) -> Tensor:
        """Return the MLP's output, computed in tiles if the options say so."""
        s = self.sizes
        if not s.tile:
            return self._dense(x)
        share = min(1.0, s.tile / s.sharing.tokens)
        trains = self._any_trains(f"{s.mlp}.")
        run = lambda parts: self._dense(parts[0])  # noqa: E731
        return self.tape.tiled([x], run, share, trains=trains)

    def _dense(self, x: Tensor) -> Tensor:
        tape, name = self.tape, self.sizes.mlp
        if self.sizes.kind.fused:
            gate, up = tape.halves(self.project(x, "mlp.gate_up_proj"))
            up = tape.multiplied(up, tape.bent(gate))
            return self.project(up, "mlp.down_proj")
        return self.project(
            tape.multiplied(
                tape.bent(self.project(x, f"{name}.gate_proj")),
                self.project(x, f"{name}.up_proj"),
            ),
            f"{name}.down_proj",
        )


def enter(tape: LayerTape, sizes: LayerSizes, x: Tensor) -> Tensor:
    """Return the input of a block or of the head from hidden states between blocks
    (tensor/megatron.py)."""
    if sizes.tensor == 1:
        return x
    if not sizes.splits_tokens:
        return tape.viewed(x)
    return tape.received(tape.viewed(x), x.size / sizes.between * sizes.sharing.tokens)


def norm(
    tape: LayerTape,
    sizes: LayerSizes,
    x: Tensor,
    number: float,
    *,
    trains: bool,
    split: bool | None = None,
    weighs: bool = True,
) -> Tensor:
    """Return the norm of x, in tiles if the options say so. number: how many norms that is. split:
    whether its features are split over ranks; None: hidden features. weighs: whether it has a
    weight."""
    tile = sizes.tile
    tokens = sizes.between if split is None else sizes.sharing.tokens
    some = bool(sizes.mesh_rows) if split is None else split
    kind = sizes.kind
    how = NormKind(kind.wide_norms or some, some, weighs, kind.powered_norms)
    if tile and tile < tokens and not split:
        share = tile / tokens
        module = lambda parts: tape.rms_norm(parts[0], number * share, how, trains=trains)  # noqa: E731
        return tape.tiled([x], module, share, trains=trains)
    return tape.rms_norm(x, number, how, trains=trains)

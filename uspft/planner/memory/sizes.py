"""A layer on a rank: the sizes, options and degrees that determine its memory."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from uspft.families import NO_KEYS, ModelShape, StateSizes, layer_windows, state_sizes
from uspft.families.projections import BEHIND, STATE_LAYER
from uspft.pipeline.stages import first_layers
from uspft.planner.expert_traffic import ranks_met
from uspft.planner.layer_kinds import LLAMA, SHARED_EXPERT, SHARED_GATE, LayerKind, layer_kinds
from uspft.planner.memory.in_flight import ROWS_WALKED, BytesPerToken, RowSharing, Window
from uspft.planner.memory.operations import INDEX, WIDE
from uspft.planner.products import (
    inner_features,
    inner_matrices,
    state_projections,
)
from uspft.planner.stages import stages_of
from uspft.planner.step_shape import DrawnRows
from uspft.planner.trained import kinds_of_layers
from uspft.sequence.rows.heads import HeadSplit, split_heads

if TYPE_CHECKING:
    from uspft.layout import Layout
    from uspft.planner.options import Options

OUT = "self_attn.o_proj"
OUTWARD = {"self_attn": OUT, "mlp": "mlp.down_proj"}
"""The projection out of each block that may be on a mesh."""
FRAGMENTS = 2
"""Fragments of a document on a ring rank: one near its beginning and one near its end."""


@dataclass(frozen=True)
class Sharing:
    """How ranks share a row's attention, with the heads of a tensor rank."""

    element: int
    tokens: int
    """Tokens of this rank."""
    heads: int
    kv_heads: int
    dim: int
    row: RowSharing
    sinks: bool
    flash: bool
    """As in Options."""
    index: float | None = None
    """The bytes that a layer itself saves of the index that sorts received tokens: with offloading
    each layer has a copy of it; None: they are sorted already."""

    @property
    def widest(self) -> tuple[int, int]:
        """The query and KV heads of the Ulysses rank with most."""
        return self._split.widest

    @property
    def _split(self) -> HeadSplit:
        return split_heads(self.heads, self.kv_heads, self.row.ulysses)

    @property
    def whole(self) -> BytesPerToken:
        """The bytes per token for all heads, as of the Ulysses rank with most."""
        ranks, per_kv = self.row.ulysses, self.heads // self.kv_heads
        members = (self._split.groups(member, per_kv) for member in range(ranks))
        ranges = max(members, key=lambda of: (len(of) > 1, of[-1][0][1] if of else 0))
        calls = [self.token(ranks * (b - a), ranks * (d - c)) for (a, b), (c, d) in ranges]
        queries, keys = (ranks * each for each in self.widest)
        return self.token(queries, keys)._replace(calls=tuple(calls) if len(calls) > 1 else ())

    def bytes(self, heads: float) -> float:
        """Return the bytes of this many heads of this rank's tokens."""
        return float(heads * self.dim * self.tokens * self.element)

    def token(self, queries: int, keys: int) -> BytesPerToken:
        """Return the bytes per token for this many query and KV heads."""
        query, pair = (self.bytes(each) / self.tokens for each in (queries, 2 * keys))
        return BytesPerToken(query, pair, 4.0 * queries, 4 // self.element, self.sinks)


@dataclass(frozen=True)
class StateHeads:
    """The heads of a layer with a state, on a rank."""

    element: int
    tokens: int
    """Tokens of this rank."""
    sizes: StateSizes
    """The sizes on this tensor rank."""
    ulysses: int
    ring: int
    into: tuple[tuple[str, int], ...]
    """The names of the projections into it, with their output features."""
    out: str
    """The name of the projection out of it."""
    index: float | None = None
    """As in Sharing."""
    rows: int = 1
    """The rows of a micro-batch, each one document."""

    @property
    def norm(self) -> str:
        return "o_norm" if self.separate else "norm"

    @property
    def grouped(self) -> bool:
        """Whether one projection has everything of a key head, as in Qwen3-Next."""
        return f"{STATE_LAYER}.in_proj_qkvz" in dict(self.into)

    @property
    def separate(self) -> bool:
        """Whether queries, keys and values have separate projections, as in OLMo Hybrid."""
        return f"{STATE_LAYER}.q_proj" in dict(self.into)

    @property
    def inside(self) -> StateSizes:
        """The heads of the Ulysses rank with most, times the number of Ulysses ranks."""
        values, keys = split_heads(self.sizes.values, self.sizes.keys, self.ulysses).widest
        return self.sizes._replace(keys=self.ulysses * keys, values=self.ulysses * values)

    @property
    def fragments(self) -> int:
        """The fragments of documents on a rank; of each that extends over several ranks, FRAGMENTS.
        One of two ranks has these adjacent, as a single larger one."""
        if self.ring == 2:
            return max(FRAGMENTS, self.rows)
        return self.rows * (FRAGMENTS if self.ring > 1 else 1)

    @property
    def state(self) -> float:
        """The bytes of the states of one Ulysses rank's heads."""
        of = self.inside
        return float(WIDE * of.values * of.key_dim * of.value_dim) / self.ulysses

    @property
    def passes(self) -> float:
        """The bytes of a fragment's matrices M, by which it passes on a state."""
        return self.state / self.sizes.value_dim * self.sizes.key_dim

    @property
    def others(self) -> float:
        """The bytes of the summaries of other ranks' fragments before (or after) this rank's;
        adjacent fragments of one rank count as one."""
        return self.rows * max(1, FRAGMENTS * (self.ring - 2)) * (self.state + self.passes)

    def group(self, keys: int) -> StateHeads:
        """Return the sizes for only `keys` key heads, with their value heads."""
        share, values = keys / self.sizes.keys, keys * (self.sizes.values // self.sizes.keys)
        into = tuple((name, round(share * features)) for name, features in self.into)
        return replace(self, sizes=self.sizes._replace(keys=keys, values=values), into=into)

    def bytes(self, features: float, element: int = 0) -> float:
        """Return the bytes of this many features of this rank's tokens."""
        return float(features * self.tokens * (element or self.element))

    def taken(self, of: StateSizes) -> list[float]:
        """Return the bytes of queries, keys, values and both gates."""
        keys, values = of.keys * of.key_dim, of.values * of.value_dim
        parts = [self.bytes(one) for one in (keys, keys, values)]
        return [*parts, self.bytes(of.values, WIDE), self.bytes(of.values)]

    @property
    def values(self) -> int:
        return self.sizes.values * self.sizes.value_dim


@dataclass(frozen=True)
class Experts:
    """The experts of a layer on a rank."""

    inner: int
    """Inner features of each expert on this rank."""
    number: int
    met: int
    """How many of them a token uses."""
    ranks: int
    """The number of ranks that divide them."""
    met_ranks: float
    """To how many other ranks a token is sent, on average."""

    def sent(self, tokens: float) -> float:
        """Return the rows sent, and received, for this many tokens: one per rank with some of a
        token's experts, each rank equally likely."""
        if self.ranks == 1:
            return tokens
        return tokens * self.met_ranks * self.ranks / max(1, self.ranks - 1)


@dataclass(frozen=True)
class LayerSizes:
    """A layer as a rank has it."""

    sharing: Sharing
    """Of attention; its tokens are those inside of blocks."""
    hidden: int
    inner: int
    """Features of the MLP, or of the expert that every token uses; 0 without either."""
    kind: LayerKind = LLAMA
    tensor: int = 1
    """Tensor parallel ranks, or mesh columns."""
    splits_tokens: bool = False
    """Whether Megatron's tensor ranks have different tokens between blocks."""
    mesh_rows: int = 0
    """0 without a mesh."""
    slices: tuple[int, ...] = (1, 1, 1, 1)
    """The slices of each product on a mesh: into attention, out of it, into the MLP, out of it."""
    experts: Experts | None = None
    trained: frozenset[str] = frozenset()
    """The names of modules in the layer whose weights train."""
    adapted: frozenset[str] = frozenset()
    """The names of projections with an adapter."""
    rank: int = 0
    """The adapters' rank."""
    dropout: bool = False
    state: StateHeads | None = None
    """The heads of a layer with a state and no attention."""
    tile: int | None = None
    """Tokens per tile; None: MLPs and norms are not tiled."""
    at_once: int | None = None
    """How many query heads of a KV head are computed at once; None for all heads."""
    recompute: str | None = None
    """What of attention is recomputed; None if the layer is not checkpointed."""
    offloads: bool = False
    copies: int = 1
    """The number of interleaved groups of tokens (`fine_grain_interleave`)."""
    puts_off: bool = True
    """Whether copies delay weights' gradients, whose inputs stay alive while the layer runs."""
    embedding: int = 0
    """The features of a layer's own embedding of a token (Gemma 4); 0 if it has none."""
    embeddings: int = 0
    """Those of the embeddings of all layers, which are one tensor."""
    keys_of: int | None = None
    """The layer whose keys and values several layers use, if this is one of them."""
    borrows: bool = False
    """Whether that is another layer."""
    first: bool = False
    """Whether there is no layer below whose input is copied back from the host."""
    some_heads: bool = False
    """Whether norms over all heads see only a tensor rank's, if `tensor` does not imply that."""
    use: str = ""
    """BEFORE or BEHIND, if projections compute only features used before or after attention and
    zeros for the rest; empty for both."""

    @property
    def element(self) -> int:
        return self.sharing.element

    @property
    def wide(self) -> float:
        """The size of float32 divided by that of the weights' dtype."""
        return WIDE / self.element

    @property
    def between(self) -> int:
        """The tokens between blocks."""
        tokens = self.sharing.tokens
        return -(-tokens // self.tensor) if self.splits_tokens else tokens

    @property
    def features(self) -> int:
        """The features per token between blocks."""
        return self.hidden // self.tensor if self.mesh_rows else self.hidden

    @property
    def trains(self) -> bool:
        """Whether any weight of the layer trains."""
        return bool(self.trained or self.adapted)

    @property
    def lends(self) -> bool:
        """Whether other layers use its keys and values."""
        return self.keys_of is not None and not self.borrows

    @property
    def pair_bytes(self) -> float:
        """The bytes of its keys and values."""
        return 2 * self.sharing.bytes(self.sharing.kv_heads)

    @property
    def block(self) -> str:
        """The name of the module that mixes tokens."""
        return STATE_LAYER if self.state else "self_attn"

    @property
    def out(self) -> str:
        """The name of its output projection."""
        return self.state.out if self.state else OUT

    def inside(self, block: str) -> int:
        """Return the input features of a block's output projection."""
        if block == STATE_LAYER and self.state:
            return self.state.values
        if block == "per_layer_projection":
            return self.embedding
        return self.sharing.heads * self.sharing.dim if block == "self_attn" else self.inner

    @property
    def in_halves(self) -> bool:
        """Whether the MLP with its norm and residual is one autograd function."""
        return bool(self.at_once) and not (self.tensor > 1 and self.kind.norms.behind_attention)

    @property
    def whole_first(self) -> bool:
        """Whether attention with its norms and residual is one too."""
        return self.in_halves and not (self.splits_tokens and (self.kind.gated or self.state))

    @property
    def gathers(self) -> bool:
        """Whether that function itself gathers the tokens of tensor ranks."""
        return self.whole_first and self.splits_tokens and self.tensor > 1

    def of_tile(
        self, some: Sharing | StateHeads | None = None, use: str = "", *, split: bool = False
    ) -> LayerSizes:
        """Return the layer's sizes for a tile of tokens. some: other heads, as Sharing or
        StateHeads. use: as in the field. split: whether the tile is split over tensor ranks."""
        sharing = some if isinstance(some, Sharing) else self.sharing
        state = some if isinstance(some, StateHeads) else self.state
        tokens = min(self.tile or sharing.tokens, sharing.tokens)
        of = replace(sharing, tokens=tokens)
        state = state and replace(state, tokens=tokens)
        ranks = self.tensor if split else 1
        alone = replace(self, sharing=of, state=state, tile=None, tensor=ranks, splits_tokens=split)
        return replace(alone, at_once=None, use=use, some_heads=self.tensor > 1)

    def weights(self, name: str, takes: int, gives: int) -> float:
        """Return the bytes of a projection's weights that train."""
        own = takes * gives if name in self.trained else 0
        return float(self.element * (own + self.rank * (takes + gives) * (name in self.adapted)))

    def between_bytes(self, features: int | None = None) -> float:
        """Return the bytes of the hidden states between blocks, or of so many features there."""
        each = self.features if features is None else features
        return float(self.between * each * self.element)

    def inside_bytes(self) -> float:
        """Return the bytes of all features of the tokens inside of blocks."""
        return float(self.sharing.tokens * self.hidden * self.element)

    def outputs(self, block: str) -> dict[str, int]:
        """Return the output features of each projection into a block."""
        how = self.sharing
        queries, keys = how.heads * how.dim, how.kv_heads * how.dim
        if block == "self_attn" and self.kind.fused:
            return {"self_attn.qkv_proj": queries + 2 * keys}
        if block == STATE_LAYER and self.state:
            return dict(self.state.into)
        if block == "self_attn":
            both = (1 + self.kind.gated) * queries
            kinds = {"q": both, "k": keys} | ({} if self.kind.keys_are_values else {"v": keys})
            return {f"self_attn.{one}_proj": size for one, size in kinds.items()}
        if block.startswith("per_layer"):
            gate, model = "per_layer_input_gate", "per_layer_model_projection"
            return {gate: self.embedding, model: self.embeddings}
        if self.kind.fused:
            return {"mlp.gate_up_proj": 2 * self.inner}
        into = {f"{self.mlp}.gate_proj": self.inner, f"{self.mlp}.up_proj": self.inner}
        return into | ({SHARED_GATE: 1} if self.mlp == SHARED_EXPERT else {})

    def made_share(self, name: str) -> float:
        """Return the share of a projection's features that are computed, not zeros."""
        if not self.use or name == self.out:
            return 1.0
        behind = float(name in (f"{STATE_LAYER}.in_proj_z", f"{STATE_LAYER}.g_proj"))
        if name == "self_attn.q_proj" and self.kind.gated:
            behind = 0.5
        elif name == f"{STATE_LAYER}.in_proj_qkvz" and self.state:
            behind = self.state.values / dict(self.state.into)[name]
        return behind if self.use == BEHIND else 1.0 - behind

    @property
    def mlp(self) -> str:
        """The name of the MLP that every token uses."""
        return self.kind.shared if self.experts else "mlp"


def layers_of(
    shape: ModelShape, layout: Layout, row_tokens: int, options: Options, behind: float = 0.0
) -> list[LayerSizes]:
    """Return the sizes of every layer on a rank; equal layers are one object. behind: as in
    RowSharing."""
    tokens, columns = -(-options.micro_batch * row_tokens // layout.context), layout.mesh_columns
    windows, lora = layer_windows(shape), options.trains.lora
    everywhere, index = len(set(windows)) == 1, saved_index(layout, options, tokens)
    again = _checkpointed(shape, layout, row_tokens, options)
    row = _row(layout, options, behind)
    down = inner_matrices(shape, experts=shape.routed)[-1].on(layout.tensor)
    met = ranks_met(shape, layout.experts)
    experts = Experts(down.inputs, down.copies, down.per_token, layout.experts, met)
    known: dict[tuple[object, ...], LayerSizes] = {}
    found = []
    own, kinds = shape.layers - shape.borrowers, kinds_of_layers(shape, options.trains)
    lenders = {window: number for number, window in enumerate(windows[:own]) if shape.borrowers}
    of_layers = zip(layer_kinds(shape), windows, kinds, strict=True)
    for number, (kind, window, (of_layer, trained)) in enumerate(of_layers):
        lender = lenders.get(window)
        shared = lender if number >= own or number == lender else None
        key = id(kind), window, id(trained), number in again, shared, of_layer.borrows
        if key not in known:
            of, seen = of_layer.sizes(shape), None
            if window not in (None, NO_KEYS) and window < row_tokens:
                seen = Window(window, row_tokens, everywhere)
            heads, kv = (-(-each // columns) for each in (of.heads, of.kv_heads))
            known[key] = LayerSizes(
                Sharing(
                    options.element,
                    tokens,
                    heads,
                    kv,
                    of.head_dim,
                    row._replace(window=seen),
                    kind.sinks,
                    options.flash,
                    index,
                ),
                shape.hidden_size,
                inner_features(of, columns, experts=bool(kind.router)),
                kind,
                columns,
                options.use_seq_parallel and not layout.is_mesh,
                mesh_rows=layout.mesh_rows if layout.is_mesh else 0,
                slices=options.slices or (1, 1, 1, 1),
                experts=experts if kind.router else None,
                trained=trained.weights,
                adapted=trained.adapters,
                rank=lora.rank if lora else 0,
                dropout=bool(lora and lora.dropout),
                state=_heads(shape, layout, options, tokens) if window == NO_KEYS else None,
                tile=options.mlp_tile,
                at_once=options.at_once,
                recompute=options.recompute if number in again else None,
                offloads=options.offload_activations and options.checkpointing,
                copies=options.copies if columns > 1 and not layout.is_mesh else 1,
                puts_off=options.zero_stage < 3,
                embedding=shape.layer_features,
                embeddings=shape.layers * shape.layer_features,
                keys_of=shared,
                borrows=of_layer.borrows,
            )
        found.append(known[key])
    return found


def _checkpointed(
    shape: ModelShape, layout: Layout, row_tokens: int, options: Options
) -> Collection[int]:
    """Return the layers that are checkpointed."""
    if not options.checkpointing or options.first_layers is None:
        return range(shape.layers) if options.checkpointing else ()
    stages = stages_of(shape, DrawnRows.whole(row_tokens), layout.pipeline, options)
    return first_layers(options.first_layers, stages)


def _row(layout: Layout, options: Options, behind: float) -> RowSharing:
    """Return how ranks share a row, without windows."""
    stages = options.exchange_stages if "exchange_stages" in options.algorithm.options else None
    every = options.algorithm.all_at_once
    stages = 1 if every else stages
    keeps = stages is not None and options.keeps_keys and not every
    of = layout.ulysses, layout.ring, stages, not every, behind
    return RowSharing(*of, rows=min(options.micro_batch, ROWS_WALKED), keeps=keeps)


def index_bytes(layout: Layout, options: Options, tokens: int) -> float:
    """Return the bytes of the index by which a Ulysses rank sorts the tokens that it receives into
    the order of rows (sequence/ulysses.py), and of its inverse; 0 for a single row, whose tokens
    arrive sorted. tokens: of one rank."""
    several = min(options.micro_batch, layout.ulysses) > 1
    return float(2 * INDEX * layout.ulysses * tokens) if several else 0.0


def saved_index(layout: Layout, options: Options, tokens: int) -> float | None:
    """Return what a layer saves of the index, or of its inverse, as in Sharing."""
    size = index_bytes(layout, options, tokens)
    return size / 2 * options.offload_activations if size else None


def _heads(shape: ModelShape, layout: Layout, options: Options, tokens: int) -> StateHeads:
    """Return the heads of a model's layers with a state.

    tokens: of one rank.
    """
    sizes, columns = state_sizes(shape), layout.mesh_columns
    assert sizes
    every = {name: one.on(columns) for name, one in state_projections(shape).items()}
    into = tuple((name, one.outputs) for name, one in every.items() if one.splits == "outputs")
    (out,) = every.keys() - dict(into)
    degrees = layout.ulysses, layout.ring
    index = saved_index(layout, options, tokens)
    rows = options.micro_batch
    return StateHeads(options.element, tokens, sizes.on(columns), *degrees, into, out, index, rows)

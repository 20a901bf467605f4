"""A layer on a rank: the sizes, options and degrees that determine its memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from uspft.families import (
    FAMILIES,
    NO_KEYS,
    ModelShape,
    StateSizes,
    layer_blocks,
    layer_windows,
    state_sizes,
)
from uspft.families.projections import (
    BEHIND,
    COLUMNS,
    GATED_QUERY,
    INNER,
    KV,
    QUERY,
    ROWS,
    SHARED,
    STATE_GROUP,
    STATE_LAYER,
    STATE_VALUE,
    Projection,
)
from uspft.pipeline.stages import first_layers
from uspft.planner.expert_traffic import ranks_met
from uspft.planner.layer_kinds import LayerKind, layer_kinds
from uspft.planner.memory.in_flight import ROWS_WALKED, BytesPerToken, RowSharing, Window
from uspft.planner.memory.operations import INDEX, WIDE
from uspft.planner.products import (
    PROJECTION_WORDS,
    SHARED_GATE,
    inner_features,
    inner_matrices,
    state_features,
)
from uspft.planner.stages import stages_of
from uspft.planner.step_shape import DrawnRows
from uspft.planner.trained import trained_layers
from uspft.sequence.rows.heads import HeadSplit, split_heads

if TYPE_CHECKING:
    from uspft.layout import Layout
    from uspft.planner.options import Options

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
    index: float | None = None
    """As in Sharing."""
    rows: int = 1
    """The rows of a micro-batch, each one document."""

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
        values = keys * (self.sizes.values // self.sizes.keys)
        return replace(self, sizes=self.sizes._replace(keys=keys, values=values))

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
    kind: LayerKind
    family: str
    """The model type."""
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
    def table(self) -> Mapping[str, Projection]:
        """How the family's projections are divided."""
        return FAMILIES[self.family].projections

    @property
    def out(self) -> str:
        """The name of its output projection."""
        (found,) = (name for name in self._of(self.block) if self.table[name].dim == ROWS)
        return found

    def _of(self, block: str) -> list[str]:
        """Return the names of a block's projections that tensor ranks divide."""
        every = (name for name in self.table if name.startswith(f"{block}."))
        absent = ("self_attn.v_proj",) if self.kind.keys_are_values else ()
        return [name for name in every if name.endswith(PROJECTION_WORDS) and name not in absent]

    def into(self, block: str) -> list[str]:
        """Return the names of the projections into a block that tensor ranks divide."""
        return [name for name in self._of(block) if self.table[name].dim == COLUMNS]

    def matrix(self, name: str) -> tuple[int, int]:
        """Return the input and output features of a projection on this rank."""
        each, every, whole = self.embedding, self.embeddings, self.features
        alone = {"input_gate": (whole, each), "projection": (each, whole)}
        alone |= {"model_projection": (whole, every), SHARED_GATE: (whole, 1)}
        if (known := name.removeprefix("per_layer_")) in alone:
            return alone[known]
        one, rows = self.table[name], self._rows
        split = sum(rows[unit] for unit in one.blocks)
        return (whole, split) if one.dim == COLUMNS else (split, whole)

    @property
    def _rows(self) -> dict[str, int]:
        """The features on this rank of what tensor ranks divide."""
        how = self.sharing
        queries, inner = how.heads * how.dim, self.inner
        found = {QUERY: queries, GATED_QUERY: 2 * queries, INNER: inner, SHARED: inner}
        found[KV] = how.kv_heads * how.dim
        return found | (state_features(self.state.sizes) if self.state else {})

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

    def weights(self, name: str) -> float:
        """Return the bytes of a projection's weights that train."""
        takes, gives = self.matrix(name)
        own = takes * gives if name in self.trained else 0
        return float(self.element * (own + self.rank * (takes + gives) * (name in self.adapted)))

    def between_bytes(self, features: int | None = None) -> float:
        """Return the bytes of the hidden states between blocks, or of so many features there."""
        each = self.features if features is None else features
        return float(self.between * each * self.element)

    def inside_bytes(self) -> float:
        """Return the bytes of all features of the tokens inside of blocks."""
        return float(self.sharing.tokens * self.hidden * self.element)

    def made_share(self, name: str) -> float:
        """Return the share of a projection's features that are computed, not zeros."""
        if not self.use or name == self.out:
            return 1.0
        behind, units = float(name.endswith((".in_proj_z", ".g_proj"))), self.table[name].blocks
        if GATED_QUERY in units:
            behind = 0.5
        elif STATE_GROUP in units:
            behind = self._rows[STATE_VALUE] / self._rows[STATE_GROUP]
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
    windows, lora = layer_windows(shape), options.lora
    trains = trained_layers(shape, lora, options.freeze)
    everywhere, index = len(set(windows)) == 1, saved_index(layout, options, tokens)
    again = _checkpointed(shape, layout, row_tokens, options)
    row = _row(layout, options, behind)
    down = inner_matrices(shape, experts=shape.routed)[-1].on(layout.tensor)
    met = ranks_met(shape, layout.experts)
    experts = Experts(down.inputs, down.copies, down.per_token, layout.experts, met)
    known: dict[tuple[object, ...], LayerSizes] = {}
    found, of_states = [], state_sizes(shape)
    degrees, rows = (layout.ulysses, layout.ring), options.micro_batch
    state = of_states and StateHeads(
        options.element, tokens, of_states.on(columns), *degrees, index, rows
    )
    own, blocks = shape.layers - shape.borrowers, layer_blocks(shape)
    lenders = {window: number for number, window in enumerate(windows[:own]) if shape.borrowers}
    of_layers = zip(layer_kinds(shape), windows, trains, blocks, strict=True)
    for number, (kind, window, trained, of_layer) in enumerate(of_layers):
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
                shape.model_type,
                columns,
                options.use_seq_parallel and not layout.is_mesh,
                mesh_rows=layout.mesh_rows if layout.is_mesh else 0,
                slices=options.slices or (1, 1, 1, 1),
                experts=experts if kind.router else None,
                trained=trained.weights,
                adapted=trained.adapters,
                rank=lora.rank if lora else 0,
                dropout=bool(lora and lora.dropout),
                state=state if window == NO_KEYS else None,
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

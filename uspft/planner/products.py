"""The matrices of a model that tokens are multiplied by, from its config alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from uspft.families import FAMILIES, Blocks, ModelShape, StateSizes, layer_blocks, state_sizes
from uspft.families.projections import (
    COLUMNS,
    FUSED,
    GATED_QUERY,
    STATE_GATE,
    STATE_GATES,
    STATE_GROUP,
    STATE_KEY,
    STATE_LAYER,
    STATE_OWN,
    STATE_VALUE,
)
from uspft.planner.layer_kinds import SHARED_EXPERT, SHARED_EXPERTS, Norms, layer_kind

SplitSide = Literal["inputs", "outputs", "none"]
PROJECTION_WORDS = ("_proj", "_qkv", "_qkvz", "_z", "_b", "_a", "_ba")
"""The endings of the names of projections in layers with a state."""
SHARED_GATE = f"{SHARED_EXPERT}_gate"
EXPERTS = ("mlp.experts.", "block_sparse_moe.experts.", "experts.")
"""The beginnings of the names of experts: in most families, in GraniteMoe, and in Gemma 4."""


@dataclass(frozen=True)
class ProductShape:
    """The shape of a matrix of a layer, or of the same matrix in each of `copies` experts.

    splits: the side that tensor ranks divide, in whole units such as the width of a head.
    """

    inputs: int
    outputs: int
    splits: SplitSide = "none"
    unit: int = 1
    per_token: int = 1
    """The number of copies that one token is multiplied by."""
    copies: int = 1

    @property
    def parameters(self) -> int:
        return self.inputs * self.outputs * self.copies

    @property
    def met(self) -> int:
        """The number of parameters that one token is multiplied by."""
        return self.inputs * self.outputs * self.per_token

    def on(self, tensor: int) -> ProductShape:
        """Return the largest part of the matrix on a tensor rank.

        Heads are never cut; with fewer heads than ranks they are replicated.
        """
        if self.splits == "none":
            return self
        whole = self.inputs if self.splits == "inputs" else self.outputs
        part = -(-(whole // self.unit) // tensor) * self.unit
        sizes = (part, self.outputs) if self.splits == "inputs" else (self.inputs, part)
        return ProductShape(*sizes, self.splits, self.unit, self.per_token, self.copies)


def attention_projections(shape: ModelShape) -> dict[str, ProductShape]:
    """Return by name the projections of a layer with attention."""
    hidden, dim = shape.hidden_size, shape.head_dim
    table = FAMILIES[shape.model_type].projections
    # A gated query projection has as many features again, which gate attention's output.
    gated = 1 + ("self_attn.q_proj" in table and GATED_QUERY in table["self_attn.q_proj"].blocks)
    keys = ProductShape(hidden, shape.kv_heads * dim, "outputs", dim)
    found = {
        "self_attn.q_proj": ProductShape(hidden, gated * shape.heads * dim, "outputs", gated * dim)
    }
    if not shape.borrows_keys:
        found["self_attn.k_proj"] = keys
        if not shape.keys_are_values:
            found["self_attn.v_proj"] = keys
    return found | {"self_attn.o_proj": ProductShape(shape.heads * dim, hidden, "inputs", dim)}


def inner_matrices(shape: ModelShape, *, experts: bool) -> list[ProductShape]:
    """Return the gate, up and down projections of the MLP, or of the experts."""
    hidden, inner, of = shape.hidden_size, shape.intermediate_size, (1, 1)
    if experts:
        inner = int(shape.full.get("moe_intermediate_size") or inner)
        of = shape.met_experts, shape.experts
    into = ProductShape(hidden, inner, "outputs", 1, *of)
    return [into, into, ProductShape(inner, hidden, "inputs", 1, *of)]


def mlp_projections(shape: ModelShape, *, experts: bool) -> dict[str, ProductShape]:
    """Return by name the projections of a layer's MLP; or of its router, experts and shared
    expert."""
    found, at, beside = dict[str, ProductShape](), "mlp.", dict[str, ProductShape]()
    if experts:
        router = layer_kind(shape).router
        found[router] = ProductShape(shape.hidden_size, shape.experts)
        at, beside = _experts_at(router), shared_projections(shape)
    names = (f"{at}gate_proj", f"{at}up_proj", f"{at}down_proj")
    return found | dict(zip(names, inner_matrices(shape, experts=experts), strict=True)) | beside


def shared_projections(shape: ModelShape) -> dict[str, ProductShape]:
    """Return the projections of the shared expert by name, with its gate; several shared experts
    are one wider one without a gate. Empty if the model has no shared expert."""
    hidden, inner = shape.hidden_size, shape.shared_features
    if not inner:
        return {}
    one = bool(shape.full.get("shared_expert_intermediate_size"))
    block = SHARED_EXPERT if one else "mlp" if shape.beside_mlp else SHARED_EXPERTS
    into, out = (ProductShape(hidden, inner, "outputs"), ProductShape(inner, hidden, "inputs"))
    named = {f"{block}.gate_proj": into, f"{block}.up_proj": into, f"{block}.down_proj": out}
    return named | ({SHARED_GATE: ProductShape(hidden, 1)} if one else {})


def inner_features(shape: ModelShape, tensor: int, *, experts: bool) -> int:
    """Return the inner features of the MLP or of the shared expert on a tensor rank; 0 if a layer
    has neither. experts: whether the layer has experts."""
    every = mlp_projections(shape, experts=experts).values()
    alone = (one for one in every if one.splits == "inputs" and one.copies == 1)
    return sum(one.on(tensor).inputs for one in alone)


def state_features(sizes: StateSizes) -> dict[str, int]:
    """Return the features of each unit that tensor ranks divide in a layer with a state."""
    keys, values = sizes.keys * sizes.key_dim, sizes.values * sizes.value_dim
    found = {STATE_KEY: keys, STATE_VALUE: values, STATE_GATE: sizes.values}
    return found | {STATE_GROUP: 2 * keys + 2 * values, STATE_GATES: 2 * sizes.values}


def state_projections(shape: ModelShape) -> dict[str, ProductShape]:
    """Return the projections of a layer with a state by name, except those of its MLP.

    Tensor ranks divide them in units of a key head and its value heads.
    """
    sizes, hidden = state_sizes(shape), shape.hidden_size
    if sizes is None:
        return {}
    rows, found = state_features(sizes), {}
    for name, one in FAMILIES[shape.model_type].projections.items():
        if not name.startswith(f"{STATE_LAYER}.") or not name.endswith(PROJECTION_WORDS):
            continue
        features = sum(rows[block] for block in one.blocks)
        side: SplitSide = "outputs" if one.dim == COLUMNS else "inputs"
        both = (hidden, features) if one.dim == COLUMNS else (features, hidden)
        found[name] = ProductShape(*both, side, features // sizes.keys)
    return found


def _state_modules(shape: ModelShape) -> dict[str, ProductShape]:
    """Return the parameters of a layer with a state other than projections, as shapes."""
    sizes = state_sizes(shape)
    assert sizes
    each, channels = sizes.values // sizes.keys, sizes.channels
    gates = ProductShape(1, sizes.values, "outputs", each)
    norm = "o_norm" if shape.model_type == "olmo_hybrid" else "norm"
    convolution = ProductShape(sizes.taps, channels, "outputs", channels // sizes.keys)
    return {
        f"{STATE_LAYER}.conv1d": convolution,
        **{f"{STATE_LAYER}.{name}": gates for name in STATE_OWN},
        f"{STATE_LAYER}.{norm}": ProductShape(1, sizes.value_dim),
    }


def block_projections(shape: ModelShape, blocks: Blocks) -> list[ProductShape]:
    """Return the projections of a layer that has these blocks."""
    return list(named_projections(blocks.sizes(shape), blocks).values())


def named_projections(shape: ModelShape, blocks: Blocks) -> dict[str, ProductShape]:
    """Return the projections of a layer with these blocks by name, fused ones split up. shape: with
    the layer's sizes."""
    mixing = state_projections(shape) if blocks.state else attention_projections(shape)
    return mixing | mlp_projections(shape, experts=blocks.experts) | added_projections(shape)


def layer_modules(shape: ModelShape, blocks: Blocks) -> dict[str, ProductShape]:
    """Return the modules with weights of a layer with these blocks by name, each with its matrix or
    vector. shape: with the layer's sizes."""
    kind, found = layer_kind(shape), named_projections(shape, blocks)
    if kind.fused:
        _fuse(found, "self_attn.", ("q_proj", "k_proj", "v_proj"), "qkv_proj")
    if kind.fused or blocks.experts:
        at = _experts_at(kind.router) if blocks.experts else "mlp."
        _fuse(found, at, ("gate_proj", "up_proj"), "gate_up_proj")
    norms = Norms() if blocks.state else kind.norms
    vectors = {name: shape.hidden_size for name in norms if name}
    if blocks.experts and any(kind.norms_beside):
        vectors |= dict.fromkeys((*kind.norms_beside, "router.scale"), shape.hidden_size)
        vectors["router.per_expert_scale"] = shape.experts
    if shape.layer_features:
        vectors["post_per_layer_input_norm"] = shape.hidden_size
    if blocks.state:
        found |= _state_modules(shape)
    elif kind.normed_heads or kind.normed_together:
        for one in "q" if shape.borrows_keys else "qk":
            heads = shape.heads if one == "q" else shape.kv_heads
            features = shape.head_dim * (heads if kind.normed_together else 1)
            vectors[f"self_attn.{one}_norm"] = features
    return found | {name: ProductShape(1, features) for name, features in vectors.items()}


def _fuse(found: dict[str, ProductShape], at: str, names: Sequence[str], name: str) -> None:
    """Replace these matrices by one that concatenates their outputs."""
    every = [found.pop(f"{at}{one}") for one in names]
    found[f"{at}{name}"] = replace(every[0], outputs=sum(one.outputs for one in every))


def _experts_at(router: str) -> str:
    """Return the prefix of the names of a layer's experts, which are next to its router or, in
    Gemma 4, next to the MLP."""
    at = f"{router.rpartition('.')[0]}.experts."
    return at if at in EXPERTS else "experts."


def matrices_of_experts(router: str) -> tuple[str, str]:
    """Return the names of a layer's matrices into and out of experts. router: the router's name."""
    at = _experts_at(router)
    return f"{at}gate_up_proj", f"{at}down_proj"


def added_projections(shape: ModelShape) -> dict[str, ProductShape]:
    """Return by name the projections through which a layer adds its per-layer embedding of a token
    (Gemma 4); empty if it has none."""
    hidden, own = shape.hidden_size, shape.layer_features
    if not own:
        return {}
    into, out = ProductShape(hidden, own), ProductShape(own, hidden)
    return {"per_layer_input_gate": into, "per_layer_projection": out}


def outside_modules(shape: ModelShape) -> dict[str, ProductShape]:
    """Return by name the modules that compute per-layer embeddings (Gemma 4), the look-up table
    first; empty if layers have none."""
    own = shape.layer_features
    if not own:
        return {}
    words, every = int(shape.full["vocab_size_per_layer_input"]), shape.layers * own
    return {
        "model.embed_tokens_per_layer": ProductShape(words, every),
        "model.per_layer_model_projection": ProductShape(shape.hidden_size, every),
        "model.per_layer_projection_norm": ProductShape(1, own),
    }


def head_projection(shape: ModelShape) -> ProductShape:
    """Return the matrix of the output head, whose vocabulary tensor ranks divide."""
    return ProductShape(shape.hidden_size, shape.vocab_size, "outputs")


def expert_parameters(shape: ModelShape) -> int:
    """Return the number of parameters of one layer's experts."""
    return sum(one.parameters for one in inner_matrices(shape, experts=True))


def met_parameters(shape: ModelShape) -> int:
    """Return the number of parameters that a token is multiplied by, as MFU counts them.

    The embedding look-up is left out, and only the experts that a token is sent to count.
    """
    layers = sum(
        count * sum(one.met for one in block_projections(shape, blocks))
        for blocks, count in Counter(layer_blocks(shape)).items()
    )
    outside = [*outside_modules(shape).values()][1:2]  # neither look-up nor norm
    return layers + head_projection(shape).met + sum(one.met for one in outside)


def step_flops(
    parameters: int,
    tokens: int,
    attention_pairs: int,
    heads: tuple[int, int, int],
    *,
    frozen: int = 0,
) -> float:
    """Return the forward and backward FLOPs of a step.

    parameters: their number, frozen ones included, without the embedding look-up. tokens: tokens of
    the step. attention_pairs: the visible (query, key) pairs of one layer, which depend on
    documents and on the causal mask. heads: layers, query heads, head dim. frozen: the number of
    frozen parameters.

    A parameter costs 6 FLOPs per token, or 4 if it is frozen and has no gradient of its own. A pair
    costs 12 · heads · dim in each layer: 2 for each of two products forward and four backward.
    """
    layers, query_heads, dim = heads
    products = 6.0 * parameters - 2.0 * frozen
    return products * tokens + 12.0 * layers * query_heads * dim * attention_pairs


def gathered_elements(model: ModelShape, tensor: int) -> float:
    """Return the elements per token that a tensor rank sends, in one direction, to the ranks that
    share its KV head.

    That happens only in fused projections, where each row is stored once; otherwise a KV head's
    matrices are replicated on the ranks that share it, and the result is 0.
    """
    if FAMILIES[model.model_type].projections is not FUSED or tensor <= model.kv_heads:
        return 0.0
    sharing = tensor / model.kv_heads
    return 2 * model.head_dim * (sharing - 1) / sharing

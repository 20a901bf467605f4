"""Tensor parallelism of a transformers model: the split of every parameter, and the hooks that
gather and sum activations at blocks' entries and exits.

transformers' own modules compute; a split projection is one with fewer features. The layout comes
with each call of a layer, and nothing is stored between calls.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import nn

from uspft.families.projections import (
    BETWEEN,
    COLUMNS,
    GATED_QUERY,
    HEAD,
    INNER,
    KV,
    QUERY,
    ROWS,
    SHARED,
    STATE_GATE,
    STATE_GATES,
    STATE_GROUP,
    STATE_KEY,
    STATE_LAYER,
    STATE_VALUE,
    VOCABULARY,
    Projection,
)
from uspft.families.table import FAMILIES, shared_features
from uspft.model.copies import LayerInCopies
from uspft.model.divided import Call, divide_module, use_part
from uspft.model.experts import ExpertSplits, splits_of_experts
from uspft.model.hf_config import heads_of
from uspft.model.linear import divide_states
from uspft.model.loss import Vocabulary
from uspft.model.recompute import before_each_run
from uspft.parameters.names import is_table, layer_of, plain_name, ranks_of
from uspft.parameters.shards import MatrixSplit, Shards, used_of_stored, used_ranges

if TYPE_CHECKING:
    from uspft.layout import Layout
    from uspft.parameters.shards import Holders
    from uspft.world import World


def shards_under(
    model: Any,
    names: Collection[str],
    world: World,
    *,
    tensor_of_rows: int = 1,
    moves: bool = False,
) -> Shards:
    """Return which ranks store which parts of a model on the meta device under a world's layout.

    names: of its parameters, in files. tensor_of_rows: the largest tensor degree of
    rows, if higher than the layout's. moves: whether weights move between layouts: then tied
    embeddings are stored, and get gradients, in both the first and the last stage.
    """
    how: Any = {"splits_tokens": world.tensor.splits_tokens, "tensor_of_rows": tensor_of_rows}
    found, stages = shards_of(model, names, world.layout, **how), world.stages
    if stages is None:
        return found
    tied = moves and model.config.tie_word_embeddings
    ends = frozenset(filter(is_table, names)) if tied else frozenset[str]()
    return replace(found, stages=ranks_of(names, stages), at_both_ends=ends)


def shards_of(
    model: Any,
    names: Iterable[str],
    layout: Layout,
    *,
    splits_tokens: bool = False,
    tensor_of_rows: int = 1,
) -> Shards:
    """Return the shards of a model on meta in a layout.

    names: of its parameters, in files. splits_tokens: whether tensor ranks see different tokens
    between blocks (use_seq_parallel); on a mesh they always do. tensor_of_rows: the largest tensor
    degree of any strategy, if it exceeds the layout's. Raises RuntimeError for a parameter that the
    family's table must list and does not: on a mesh any but norms, else one inside a block; and for
    strategies that would divide more than a mesh does.
    """
    mesh = layout.is_mesh
    if mesh and tensor_of_rows > layout.tensor:
        raise RuntimeError("matrices on a mesh serve rows of one mesh")
    of_experts, experts = splits_of_experts(model)
    experts = experts if layout.experts > 1 else {}
    if not mesh and max(layout.tensor, tensor_of_rows) == 1:
        return Shards(layout, experts=experts)
    columns, rows, inside = splits_of(model, names, of_experts, on_mesh=mesh)
    tokens = mesh or splits_tokens
    return Shards(layout, columns, rows, experts, inside=inside, splits_tokens=tokens)


class ParameterSplits(NamedTuple):
    """How the parameters of a model are divided, by their names in files."""

    columns: dict[str, MatrixSplit]
    """Over mesh columns, or over Megatron's ranks."""
    rows: dict[str, MatrixSplit]
    """Matrices over mesh rows."""
    inside: frozenset[str]
    """The replicated parameters between the projections of a block."""


def splits_of(
    model: Any, names: Iterable[str], of_experts: ExpertSplits, *, on_mesh: bool
) -> ParameterSplits:
    """Return how a mesh, or Megatron's ranks, divide a model's parameters, which may be on meta.

    names: of its parameters, in files. of_experts: how tensor ranks divide those of experts. Raises
    RuntimeError as `shards_of` does.
    """
    blocks = {name.partition(".")[0] for name in table_of(model) if "." in name}
    columns, rows = dict[str, MatrixSplit](), dict[str, MatrixSplit]()
    inside = set[str]()
    for name in (one for one in names if one not in of_experts):
        owner, _, kind = name.rpartition(".")
        owner, _, adapter = owner.partition(".lora_")
        found, is_norm = projection_of(model, owner), "norm" in owner.rpartition(".")[2]
        found = found or projection_of(model, name)
        # Megatron replicates what is outside blocks; a mesh splits norms there too.
        known = is_norm if on_mesh else not blocks & set(owner.split("."))
        if found is None and not known:
            family = model.config.model_type
            raise RuntimeError(f"families/projections.py does not say how {family} divides {name}")
        config = config_of(model, name)
        over_columns, over_rows = _splits(config, found, adapter[:1] or kind, on_mesh=on_mesh)
        if over_columns:
            columns[name] = over_columns
        elif found and found is not BETWEEN:
            inside.add(name)
        if over_rows and not is_norm:
            rows[name] = over_rows
    columns |= {name: split for name, split in of_experts.items() if split}
    return ParameterSplits(columns, rows, frozenset(inside | of_experts.keys() - columns.keys()))


def _splits(
    config: Any, found: Projection | None, kind: str, *, on_mesh: bool
) -> tuple[MatrixSplit | None, MatrixSplit | None]:
    """Return a parameter's split over mesh columns (or Megatron's tensor ranks), and its split over
    mesh rows; None: ranks along that axis replicate it.

    found: the parameter's projection; None: it is outside of blocks, as a norm is. kind: "weight",
    "bias", another parameter's own name, or an adapter's "A" or "B", whose product is split like
    the adapted weight.
    """
    if found is None:
        return features_of(config, COLUMNS) if on_mesh else None, None
    if not found.blocks:
        return None, None
    # A row-split projection's bias is added once, on one rank.
    dim = {"bias": COLUMNS, "A": ROWS, "B": COLUMNS}.get(kind, found.dim)
    if dim != found.dim:
        return features_of(config, dim) if on_mesh else None, None
    over_rows = features_of(config, ROWS + COLUMNS - dim) if on_mesh and kind == "weight" else None
    return split_along(config, found, dim), over_rows


def features_of(config: Any, dim: int) -> MatrixSplit:
    """Return how a mesh divides the features between blocks, which are a parameter's dimension."""
    return MatrixSplit(dim, (config.hidden_size,), in_order=True)


def config_of(model: Any, name: str) -> Any:
    """Return the config of a parameter's layer; of the first layer if it is in none. name: in
    files."""
    number = layer_of(name) or 0
    found = model.config.per_layer_config[number]
    if FAMILIES[found.model_type].two_sizes:  # MLPs have two sizes too
        found = copy.copy(found)
        found.intermediate_size = model.base_model.layers[number].mlp.intermediate_size
    return found


class _Block(NamedTuple):
    """A kind of unit that is never cut, such as heads: their number, and the rows of all."""

    number: int
    rows: int


def split_along(config: Any, found: Projection, dim: int) -> MatrixSplit:
    """Return the split of a projection's parameter along a dimension.

    In a fused projection each row of a KV head is stored once, even if several ranks share the
    head.
    """
    blocks = _blocks(config)
    stacked = [blocks[block] for block in found.blocks]
    sizes, counts = tuple(one.rows for one in stacked), tuple(one.number for one in stacked)
    if KV in found.blocks[1:]:
        counts = counts[:1] + sizes[1:]
    return MatrixSplit(dim, sizes, counts)


def _blocks(config: Any) -> dict[str, _Block]:
    heads, kv_heads, dim = heads_of(config)
    singles = {
        HEAD: heads,
        INNER: getattr(config, "intermediate_size", None) or 0,
        SHARED: shared_features(vars(config)),
        VOCABULARY: config.vocab_size,
    }
    found = {
        QUERY: _Block(heads, heads * dim),
        GATED_QUERY: _Block(heads, 2 * heads * dim),
        KV: _Block(kv_heads, kv_heads * dim),
        **{name: _Block(size, size) for name, size in singles.items()},
    }
    if FAMILIES[config.model_type].states:
        units, gates = config.linear_num_key_heads, config.linear_num_value_heads
        keys, values = units * config.linear_key_head_dim, gates * config.linear_value_head_dim
        rows = {STATE_KEY: keys, STATE_VALUE: values, STATE_GATE: gates}
        rows |= {STATE_GROUP: 2 * keys + 2 * values, STATE_GATES: 2 * gates}
        found |= {name: _Block(units, number) for name, number in rows.items()}
    return found


def table_of(model: Any) -> Mapping[str, Projection]:
    """Return the table of how the projections of a model's family are split."""
    return FAMILIES[model.config.model_type].projections


def projection_of(model: Any, name: str) -> Projection | None:
    """Return the table's entry for a module or a parameter, by the last words of its name."""
    table, words = table_of(model), name.split(".")
    every = (table.get(".".join(words[-count:])) for count in (1, 2, 3))
    return next((found for found in every if found), None)


def vocabulary_of(world: World, tokens: int, held: Layout | None) -> Vocabulary | None:
    """Return the part of the vocabulary that this rank computes; None: all of it.

    held: the layout in which ranks store matrices; None: always that of the call.
    """
    group = world.mesh.columns
    if group.size == 1:
        return None
    split, ways = MatrixSplit(COLUMNS, (tokens,)), held.mesh_columns if held else group.size
    ((first, stop),) = used_ranges(split, group.index, group.size, ways)
    part = used_of_stored(split, group.index, group.size, ways)
    # On a mesh the used part is cut out before.
    offset = part[0][0] if part and not world.layout.is_mesh else 0
    return Vocabulary(first, stop - first, group, offset)


def split_model(
    model: Any, holders: Holders, *, moves: bool = False, copies: bool = False
) -> list[Call]:
    """Make a model that is filled with this rank's shards compute with them.

    Its layers and its head must then be called with the world of their rows. moves: whether weights
    move between layouts, so that a rank stores just what a call uses. copies: whether layers split
    their tokens into copies that take turns, in calls that ask for it. Returns what holds each
    layer's current call; nothing where no matrices are divided.
    """
    shards, calls = holders.shards, list[Call]()
    if not shards.splits:
        return calls
    held, table = None if moves else shards.layout, table_of(model)
    names = names_of_modules(model)
    splits = by_module(names, shards.splits)
    for layer in model.base_model.layers:
        call = Call(held)
        here: dict[str, Any] = dict(layer.named_modules())
        for name, projection in table.items():
            block, _, last = name.rpartition(".")
            owner = here.get(block) if block else None  # none where other layers have experts
            if owner is None:
                continue
            found = getattr(owner, last, None)
            if not isinstance(found, nn.Parameter | nn.Conv1d):
                divide_module(owner, (block, last), projection, splits, call)
                continue
            if isinstance(found, nn.Conv1d):
                owner, last = found, "weight"
            use_part(owner, last, shards.splits[f"{names[id(owner)]}.{last}"], call)
        if copies:
            layer.forward = LayerInCopies(layer, table, call)
        if state := here.get(STATE_LAYER):
            divide_states(state, call)
        before_each_run(layer, call.begin)
        calls.append(call)
    return calls


def names_of_modules(model: nn.Module) -> dict[int, str]:
    """Return the names of a model's modules in files, by their identity."""
    return {id(module): plain_name(name) for name, module in model.named_modules()}


def by_module(
    names: Mapping[int, str], splits: Mapping[str, MatrixSplit]
) -> dict[int, MatrixSplit]:
    """Return how the weights of modules are divided, by the identity of the modules.

    names: of modules, in files. splits: by the names of parameters.
    """
    found = ((module, splits.get(f"{name}.weight")) for module, name in names.items())
    return {module: split for module, split in found if split}

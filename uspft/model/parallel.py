"""A transformers model whose matrices are divided among ranks: what each rank holds, and the hooks
by which blocks are entered and left.

transformers' own modules compute: a projection with some of its rows or columns is one with fewer
features. What a layer is called with says how its row is split; nothing is kept between calls.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from uspft.families.projections import (
    COLUMNS,
    INNER,
    KV,
    QUERY,
    ROWS,
    VOCABULARY,
    Projection,
)
from uspft.families.table import FAMILIES
from uspft.model.dropout import TokenDropout
from uspft.model.loss import Vocabulary
from uspft.parameters.fill import places
from uspft.parameters.names import plain_name
from uspft.parameters.shards import MatrixSplit, Shards
from uspft.tensor.megatron import summed
from uspft.tensor.parts import Range, part_index, part_range

if TYPE_CHECKING:
    from uspft.layout import Layout
    from uspft.model.attention import Bound
    from uspft.parameters.shards import Holders
    from uspft.world import World


def shards_of(model: Any, layout: Layout, *, splits_tokens: bool) -> Shards:
    """Return who holds what of a model on meta under a layout.

    splits_tokens: whether tensor ranks see different tokens between blocks, so that what is whole
    there has a piece of its gradient on each. Raises RuntimeError for a parameter inside a block of
    which the family's table says nothing.
    """
    if layout.tensor == 1:
        return Shards(layout)
    blocks = blocks_of(model.config)
    inside = {name.partition(".")[0] for name in table_of(model) if "." in name}
    splits: dict[str, MatrixSplit] = {}
    pieces: set[str] = set()
    for name in places(model):
        owner, _, kind = name.rpartition(".")
        owner, _, adapter = owner.partition(".lora_")
        found = projection_of(model, owner)
        if found is None and inside & set(owner.split(".")):
            kind = model.config.model_type
            raise RuntimeError(f"families/projections.py does not say how {kind} divides {name}")
        along = _dim(found, kind, adapter) if found else None
        if found and along is not None:
            stacked = [blocks[block] for block in found.blocks]
            sizes, counts = tuple(one.rows for one in stacked), tuple(one.number for one in stacked)
            splits[name] = MatrixSplit(along, sizes, counts)
            shared = min(counts) < layout.tensor
        else:
            shared = found is not None or splits_tokens
        if shared:
            pieces.add(name)
    return Shards(layout, splits, frozenset(pieces))


class _Block(NamedTuple):
    """What is divided in whole numbers: how many there are, and the rows of all of them."""

    number: int
    rows: int


def blocks_of(config: Any) -> dict[str, _Block]:
    """Return what a projection's blocks are, by their names in families/projections.py."""
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return {
        QUERY: _Block(heads, heads * dim),
        KV: _Block(kv_heads, kv_heads * dim),
        INNER: _Block(config.intermediate_size, config.intermediate_size),
        VOCABULARY: _Block(config.vocab_size, config.vocab_size),
    }


def table_of(model: Any) -> Mapping[str, Projection]:
    """Return how the family of a model is divided."""
    return FAMILIES[model.config.model_type].projections


def projection_of(model: Any, owner: str) -> Projection | None:
    """Return how a module's parameters are divided, by the last words of its name."""
    table, words = table_of(model), owner.split(".")
    return table.get(words[-1]) or table.get(".".join(words[-2:]))


def _dim(found: Projection, kind: str, adapter: str) -> int | None:
    """Return the dimension along which a parameter of a projection is divided; None where it is
    whole, and every rank computes a piece of its gradient.

    kind: weight or bias. adapter: A or B for those of an adapter, whose product is divided as the
    weight beside it.
    """
    if not found.blocks:
        return None
    if adapter:
        thin = {"A": ROWS, "B": COLUMNS}[adapter[0]]
        return found.dim if thin == found.dim else None
    if kind == "bias":  # a row-split projection's is added once, on one rank
        return COLUMNS if found.dim == COLUMNS else None
    return found.dim


def vocabulary_of(world: World, tokens: int) -> Vocabulary | None:
    """Return which of a vocabulary's tokens this rank has; None where it has all of them."""
    group = world.mesh.columns
    if group.size == 1:
        return None
    first, stop = part_range(tokens, part_index(group.index, group.size), group.size)
    return Vocabulary(first, stop - first, group)


def split_model(model: Any, holders: Holders) -> None:
    """Make a model that is filled with this rank's parts compute with them.

    Its layers and its head must then be called with the world of their rows.
    """
    shards = holders.shards
    degree = shards.layout.tensor
    if degree == 1:
        return
    here = part_index(shards.tensor_index(holders.rank), degree), degree
    move_padding(model, part_range(model.config.vocab_size, *here))
    kv_heads = model.config.num_key_value_heads
    names = {id(module): plain_name(name) for name, module in model.named_modules()}
    table = table_of(model)
    for layer in model.base_model.layers:
        call = Call()
        layer.register_forward_pre_hook(call.begin, with_kwargs=True)
        for name, projection in table.items():
            block, _, last = name.rpartition(".")
            if not block:
                continue
            owner = layer.get_submodule(block)
            module = owner.get_submodule(last)
            if projection.dim == ROWS:
                ranges = shards.splits[f"{names[id(module)]}.weight"].ranges(*here)
                owner.register_forward_pre_hook(call.enter, with_kwargs=True)
                _end_block(owner, last, ranges, call)
            elif projection.blocks and "norm" in last:
                sharing = -(-degree // kv_heads) if KV in projection.blocks else 1
                setattr(owner, last, SplitNorm(module, sharing, call))
            elif len(projection.blocks) > 1 and KV in projection.blocks:
                count_own_heads(owner, degree)


def move_padding(model: Any, here: Range) -> None:
    """Tell the embedding which of its own rows is the padding token's, which has no gradient."""
    embedding, (first, stop) = model.get_input_embeddings(), here
    padding = embedding.padding_idx
    if padding is not None:
        embedding.padding_idx = padding - first if first <= padding < stop else None


def count_own_heads(attention: Any, degree: int) -> None:
    """Tell an attention that cuts its fused projection by the config's heads how many are here."""
    attention.config = copy.copy(attention.config)
    attention.config.num_attention_heads //= degree
    attention.num_key_value_heads //= degree


def _end_block(owner: nn.Module, name: str, ranges: Sequence[Range], call: Call) -> None:
    """Make a row-split projection, which may have an adapter around it, the end of its block.

    ranges: the features that are here of what it takes.
    """
    module: Any = getattr(owner, name)
    for dropout in module.modules():
        if isinstance(dropout, TokenDropout):
            dropout.ranges = tuple(ranges)
    if getattr(module, "base_layer", module).bias is not None:
        if hasattr(module, "base_layer"):
            module.base_layer = RowLinear(module.base_layer, call)
        else:
            setattr(owner, name, RowLinear(module, call))
    getattr(owner, name).register_forward_hook(call.leave)


class Call:
    """What a layer was last called with; when it is recomputed, it is called again."""

    bound: Bound

    def begin(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Remember it, before the layer runs."""
        self.bound = kwargs["uspft"]

    def enter(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        """Give a block all tokens, before it runs."""
        if args:
            return (self.bound.enter(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self.bound.enter(kwargs["hidden_states"])}

    def leave(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
        """Sum what the ranks' row-split projections have made."""
        return self.bound.leave(out)


class RowLinear(nn.Module):
    """A row-split projection whose bias is added on one rank alone, before ranks are summed."""

    def __init__(self, linear: nn.Linear, call: Call) -> None:
        super().__init__()
        self.weight, self.bias, self._call = linear.weight, linear.bias, call

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's part of the projection; on the others the bias has a gradient of 0."""
        counts = self._call.bound.world.mesh.columns.index == 0
        return nn.functional.linear(x, self.weight, self.bias if counts else self.bias * 0.0)


class SplitNorm(nn.Module):
    """An RMS norm over features of which each rank has some, as OLMo 2's over all heads."""

    def __init__(self, norm: Any, sharing: int, call: Call, added: float = 0.0) -> None:
        """Take transformers' own norm.

        sharing: how many ranks have the same features. added: what its weight stands on, 1 where a
        new one is 0.
        """
        super().__init__()
        self.weight = norm.weight
        self._eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
        self._sharing, self._call, self._added = sharing, call, added

    def forward(self, x: Tensor) -> Tensor:
        """Return x [1, T, features here], normed over the features of all ranks, in its type."""
        group = self._call.bound.world.mesh.columns
        wide = x.to(torch.float32)
        squares = summed(wide.pow(2).sum(-1, keepdim=True), group) / self._sharing
        features = x.shape[-1] * group.size // self._sharing
        wide = wide * torch.rsqrt(squares / features + self._eps)
        weight = self.weight + self._added if self._added else self.weight
        return (weight * wide).to(x.dtype)

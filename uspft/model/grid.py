"""A transformers model whose matrices lie on a mesh of ranks, in blocks over both dimensions.

Tokens are divided over mesh rows, features over mesh columns, inside of blocks and between them.
Every projection, the embedding and every norm over features becomes a module of this file; what a
layer is called with says how its row is split.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn
from torch.func import functional_call

from uspft.families.projections import COLUMNS, KV, ROWS, Projection
from uspft.families.table import FAMILIES
from uspft.model.divided import Call, PartLinear, SplitNorm, part_of_product, used_by
from uspft.model.dropout import dropouts_in
from uspft.model.parallel import (
    enter_and_leave,
    move_padding,
    projection_of,
    share_heads,
    split_along,
    table_of,
)
from uspft.model.recompute import before_each_run
from uspft.parameters.names import places, plain_name
from uspft.parameters.shards import MatrixSplit, Shards
from uspft.tensor.parts import cut
from uspft.tensor.sums import summed

if TYPE_CHECKING:
    from uspft.layout import Layout
    from uspft.model.attention import Bound
    from uspft.parameters.shards import Holders
    from uspft.tensor import MeshAlgorithm


def shards_of(model: Any, layout: Layout, *, tensor_of_rows: int = 1) -> Shards:
    """Return who holds what of a model on meta under a layout.

    Raises RuntimeError for a parameter of which the family's table says nothing, and where
    tensor_of_rows asks for rows that divide matrices over more ranks than the layout.
    """
    if tensor_of_rows > layout.tensor:
        raise RuntimeError("matrices on a mesh serve rows of one mesh")
    columns: dict[str, MatrixSplit] = {}
    rows: dict[str, MatrixSplit] = {}
    every = places(model)
    for name, (parameter, _) in every.items():
        owner, _, kind = name.rpartition(".")
        owner, _, adapter = owner.partition(".lora_")
        found = projection_of(model, owner)
        if found is None and "norm" not in owner.rpartition(".")[2]:
            family = model.config.model_type
            raise RuntimeError(f"families/projections.py does not say how {family} divides {name}")
        if found is None or found.blocks:
            columns[name], over_rows = _splits(model.config, found, adapter[:1] or kind)
            if over_rows and parameter.ndim > 1:
                rows[name] = over_rows
    inside = frozenset(every.keys() - columns.keys())
    return Shards(layout, columns, rows, inside=inside, splits_tokens=True)


def _splits(
    config: Any, found: Projection | None, kind: str
) -> tuple[MatrixSplit, MatrixSplit | None]:
    """Return how a parameter is divided over mesh columns, and a matrix over mesh rows too.

    found: its projection; None for a norm over all features. kind: weight or bias, or A or B for an
    adapter's factors, which mesh rows hold whole.
    """
    if found is None:
        return _features(config, COLUMNS), None
    dim = {"weight": found.dim, "bias": COLUMNS, "A": ROWS, "B": COLUMNS}[kind]
    blocks = split_along(config, found, dim)
    if kind == "weight":
        return blocks, _features(config, ROWS + COLUMNS - dim)
    return (blocks if dim == found.dim else _features(config, dim)), None


def _features(config: Any, dim: int) -> MatrixSplit:
    return MatrixSplit(dim, (config.hidden_size,), in_order=True)


def split_model(model: Any, holders: Holders) -> None:
    """Make a model that is filled with this rank's parts compute with them.

    It must then be called with the world of its rows, which may be on a mesh or divide matrices in
    Megatron's way, where ranks hold enough for both.
    """
    held, config, base = holders.shards.layout, model.config, model.base_model
    model.parameter_names = {
        id(parameter): plain_name(name) for name, parameter in model.named_parameters()
    }
    added = 1.0 - FAMILIES[config.model_type].norm_start
    column = holders.shards.tensor_index(holders.rank) % held.mesh_columns
    move_padding(model, column, held.mesh_columns)
    call = Call(held)
    base.register_forward_pre_hook(call.begin, with_kwargs=True)
    base.norm = SplitNorm(base.norm, _features(config, COLUMNS), call, added)
    model.set_input_embeddings(SplitEmbedding(model.get_input_embeddings(), config, held))
    for layer in base.layers:
        call = Call(held)
        before_each_run(layer, call.begin)
        for name, norm in [*layer.named_children()]:
            if "norm" in name:
                setattr(layer, name, SplitNorm(norm, _features(config, COLUMNS), call, added))
        for name, found in table_of(model).items():
            block, _, last = name.rpartition(".")
            if not block or not found.blocks:
                continue
            owner = layer.get_submodule(block)
            split, _ = _splits(config, found, "weight")
            if "norm" in last:
                setattr(owner, last, SplitNorm(getattr(owner, last), split, call))
            else:
                _replace(owner, last, (block, found), config, call)
            if found.dim == ROWS:
                enter_and_leave(owner, last, block, call)
            elif len(found.blocks) > 1 and KV in found.blocks:
                share_heads(owner, last, split, call)


PRODUCT = {
    ("self_attn", COLUMNS): 0,
    ("self_attn", ROWS): 1,
    ("mlp", COLUMNS): 2,
    ("mlp", ROWS): 3,
}
"""The place of a block's first and last product in what `tensor_slices` names."""


def _replace(owner: Any, name: str, of: tuple[str, Projection], config: Any, call: Call) -> None:
    """Put another module in a projection's place, or in that of the one inside its adapter.

    of: the name of its block, and how it is divided.
    """
    module: Any = getattr(owner, name)
    (block, found), plain = of, getattr(module, "base_layer", module)
    splits = *_splits(config, found, "weight"), _splits(config, found, "bias")[0]
    number = PRODUCT[block, found.dim]
    if found.dim == COLUMNS and not hasattr(owner, "uspft_inward"):
        owner.uspft_inward = Inward(number, call)
    made: nn.Module
    if found.dim == COLUMNS:
        made = owner.uspft_inward.part(name, plain, splits)
    else:
        made = Outward(plain, splits, number, call)
    if plain is module:
        setattr(owner, name, made)
        return
    module.base_layer = made
    takes, _ = _splits(config, found, "A")
    call.dropouts += [(one, takes) for one in dropouts_in(module)]

    def sum_columns(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return summed(out, call.group) if call.on_mesh else out

    for table, kind in ((module.lora_A, "A"), (module.lora_B, "B")):
        for adapter, linear in table.items():
            table[adapter] = PartLinear(linear, _splits(config, found, kind)[0], call)
    for thin in module.lora_A.values():
        thin.register_forward_hook(sum_columns)


def products(bound: Bound) -> MeshAlgorithm:
    """Return the algorithm that multiplies the matrices of a call."""
    return cast("MeshAlgorithm", bound.world.tensor)


ThreeSplits = tuple[MatrixSplit, MatrixSplit | None, MatrixSplit]
"""How mesh columns and mesh rows divide a projection's weight, and columns its bias."""


def whole_table(weight: Tensor, bound: Bound, config: Any, held: Layout | None) -> Tensor:
    """Return all features of those rows of an embedding's or a head's weight that the rows of a
    call on a mesh use; differentiable. held: as of used_by."""
    tokens, features = MatrixSplit(COLUMNS, (config.vocab_size,)), _features(config, ROWS)
    used = used_by(bound, held, tokens, features)
    return products(bound).whole(cut(weight, used), bound.world.mesh)


class SplitEmbedding(nn.Module):
    """An embedding whose features mesh rows hold in parts, and all ranks of a row need whole."""

    def __init__(self, embedding: nn.Embedding, config: Any, held: Layout) -> None:
        super().__init__()
        self.weight = embedding.weight
        self._plain = (embedding,)  # in a tuple, it is no module of this one
        self._config, self._held = config, held
        self._padding = embedding.padding_idx

    def forward(self, tokens: Tensor, bound: Bound) -> Tensor:
        """Return all features of tokens [1, T], as transformers' own makes them, [1, T, d].

        On a mesh tokens are numbered among those that its rows use here, else among those held.
        """
        (plain,), weight, first = self._plain, self.weight, 0
        if bound.world.layout.is_mesh:
            used = used_by(bound, self._held, MatrixSplit(COLUMNS, (self._config.vocab_size,)))[0]
            first = used[0][0] if used else 0
            weight = whole_table(weight, bound, self._config, self._held)
        if self._padding is not None:
            here = 0 <= self._padding - first < len(weight)
            plain.padding_idx = self._padding - first if here else None
        made: Tensor = functional_call(plain, {"weight": weight}, (tokens,))
        return made


class Inward(nn.Module):
    """The projections into a block, which are computed together when the first of them is called.

    transformers calls them one after another with the same tensor. Their weights are this module's,
    so that ZeRO-3 fetches them together.
    """

    def __init__(self, product: int, call: Call) -> None:
        super().__init__()
        self._product, self._call = product, call
        self._names: list[str] = []
        self._splits: list[ThreeSplits] = []
        self._of: Tensor | None = None
        self._made: dict[str, Tensor] = {}

    def part(self, name: str, linear: Any, splits: ThreeSplits) -> InwardPart:
        """Take a projection's parameters; return the module that takes its place."""
        self._names.append(name)
        self._splits.append(splits)
        self.register_parameter(f"{name}_weight", linear.weight)
        self.register_parameter(f"{name}_bias", linear.bias)
        return InwardPart(self, name)

    def take(self, name: str, x: Tensor) -> Tensor:
        """Return what one of the projections makes of x [1, t, d/C], [1, t, o/C]."""
        if self._of is not x or name not in self._made:
            self._of, self._made = x, dict(zip(self._names, self(x), strict=True))
        found = self._made.pop(name)
        if not self._made:
            self._of = None
        return found

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return what each projection makes of x."""
        weights = [getattr(self, f"{name}_weight") for name in self._names]
        biases = [getattr(self, f"{name}_bias") for name in self._names]
        call = self._call
        made: Sequence[Tensor]
        if call.on_mesh:
            used = [call.used(columns, rows) for columns, rows, _ in self._splits]
            made = products(call.bound).inward(
                x[0], weights, call.bound.world.mesh, self._product, used
            )
        else:
            every = zip(weights, self._splits, strict=True)
            made = [part_of_product(x[0], (w, None), split[0], call) for w, split in every]
        return tuple(
            (one if bias is None else one + cut(bias, call.used(split[2])[:1]))[None]
            for one, bias, split in zip(made, biases, self._splits, strict=True)
        )


class InwardPart(nn.Module):
    """One of the projections into a block."""

    def __init__(self, together: Inward, name: str) -> None:
        super().__init__()
        self._together, self._name = (together,), name  # in a tuple, it is no module of this one

    def forward(self, x: Tensor) -> Tensor:
        """Return [1, t, o/C] of x [1, t, d/C] on a mesh; else this rank's part, of all features."""
        return self._together[0].take(self._name, x)


class Outward(nn.Module):
    """The projection out of a block."""

    def __init__(self, linear: nn.Linear, splits: ThreeSplits, product: int, call: Call) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self._splits, self._product, self._call = splits, product, call

    def forward(self, x: Tensor) -> Tensor:
        """Return [1, t, d/C] of x [1, t, i/C] on a mesh; else what this rank's rows make of it."""
        call, (columns, rows, of_bias) = self._call, self._splits
        bias: Tensor | None = self.bias
        if call.on_mesh:
            used, mesh = call.used(columns, rows), call.bound.world.mesh
            made = products(call.bound).outward(x[0], self.weight, mesh, self._product, used)
        else:
            made = part_of_product(x[0], (self.weight, None), columns, call)
            bias = bias * 0.0 if bias is not None and call.group.index else bias
        return (made if bias is None else made + cut(bias, call.used(of_bias)[:1]))[None]

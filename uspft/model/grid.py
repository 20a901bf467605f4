"""A transformers model whose matrices are split in blocks over both dimensions of a mesh of ranks.

Tokens are split over mesh rows, features over mesh columns, inside of blocks and between them.
Every projection, the embedding and every norm over features is replaced by a module of this file;
the arguments of a layer's call say how its row is split.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from torch import Tensor, nn
from torch.func import functional_call

from uspft.families.projections import COLUMNS, KV, ROWS
from uspft.families.table import FAMILIES
from uspft.model.divided import (
    Call,
    PartLinear,
    SplitNorm,
    enter_and_leave,
    part_of_product,
    share_heads,
    used_by,
)
from uspft.model.dropout import dropouts_in
from uspft.model.experts import splits_of_experts
from uspft.model.parallel import (
    by_module,
    features_of,
    names_of_modules,
    splits_of,
    table_of,
)
from uspft.model.recompute import before_each_run
from uspft.parameters.names import plain_name
from uspft.parameters.shards import MatrixSplit
from uspft.tensor.parts import cut
from uspft.tensor.sums import summed

if TYPE_CHECKING:
    from uspft.layout import Layout
    from uspft.model.attention import Bound
    from uspft.parameters.shards import Holders
    from uspft.tensor.meshslice import MeshSlice


def split_model(model: Any, holders: Holders) -> list[Call]:
    """Replace the modules of a model, loaded with this rank's shards, by modules that compute with
    them; return each layer's current call.

    The model must then be called with the world of its rows, which may be on a mesh or use
    Megatron's split, if ranks store enough for both.
    """
    shards, config, base = holders.shards, model.config, model.base_model
    held, names = shards.layout, names_of_modules(model)
    model.parameter_names = {
        id(parameter): plain_name(name) for name, parameter in model.named_parameters()
    }
    of_experts, _ = splits_of_experts(model)
    parameters = model.parameter_names.values()
    every = splits_of(model, parameters, of_experts, on_mesh=True)  # what is stored may differ
    columns, rows = by_module(names, every.columns), by_module(names, every.rows)
    biases = {id_: every.columns.get(f"{name}.bias") for id_, name in names.items()}
    splits = {
        id_: ProjectionSplits(one, rows.get(id_), biases[id_]) for id_, one in columns.items()
    }
    added = 1.0 - FAMILIES[config.model_type].norm_start
    call = Call(held)
    base.register_forward_pre_hook(call.begin, with_kwargs=True)
    base.norm = SplitNorm(base.norm, columns[id(base.norm)], call, added)
    model.set_input_embeddings(SplitEmbedding(model.get_input_embeddings(), config, held))
    calls = [Call(held) for _ in base.layers]
    for layer, call in zip(base.layers, calls, strict=True):
        before_each_run(layer, call.begin)
        for name, norm in [*layer.named_children()]:
            if "norm" in name:
                setattr(layer, name, SplitNorm(norm, columns[id(norm)], call, added))
        for name, found in table_of(model).items():
            block, _, last = name.rpartition(".")
            if not block or not found.blocks:
                continue
            owner = layer.get_submodule(block)
            module: Any = getattr(owner, last)
            split = columns[id(module)]
            if "norm" in last:
                setattr(owner, last, SplitNorm(module, split, call))
            else:
                _replace(owner, last, PRODUCT[block, found.dim], splits, call)
            if found.dim == ROWS:
                enter_and_leave(owner, last, block, call)
            elif len(found.blocks) > 1 and KV in found.blocks:
                share_heads(owner, last, split, call)
    return calls


class ProjectionSplits(NamedTuple):
    """How mesh columns and mesh rows split a projection's weight, and mesh columns its bias."""

    columns: MatrixSplit
    rows: MatrixSplit | None
    bias: MatrixSplit | None

    def added(self, made: Tensor, bias: Tensor | None, call: Call) -> Tensor:
        """Return a projection's output plus the part of its bias that the call uses."""
        if bias is None or self.bias is None:
            return made
        return made + cut(bias, call.used(self.bias)[:1])


PRODUCT = {
    ("self_attn", COLUMNS): 0,
    ("self_attn", ROWS): 1,
    ("mlp", COLUMNS): 2,
    ("mlp", ROWS): 3,
}
"""The index in `tensor_slices` of a block's first and last product."""


def _replace(
    owner: Any, name: str, product: int, splits: Mapping[int, ProjectionSplits], call: Call
) -> None:
    """Replace a projection, or the one inside its adapter, by another module.

    product: as in PRODUCT. splits: by the identity of a module.
    """
    module: Any = getattr(owner, name)
    plain = getattr(module, "base_layer", module)
    made: nn.Module
    if splits[id(plain)].columns.dim == ROWS:
        made = Outward(plain, splits[id(plain)], product, call)
    else:
        if not hasattr(owner, "uspft_inward"):
            owner.uspft_inward = Inward(product, call)
        made = owner.uspft_inward.part(name, plain, splits[id(plain)])
    if plain is module:
        setattr(owner, name, made)
        return
    module.base_layer = made

    def sum_columns(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return summed(out, call.group) if call.on_mesh else out

    (takes,) = (splits[id(thin)].columns for thin in module.lora_A.values())
    call.dropouts += [(one, takes) for one in dropouts_in(module)]
    for table in (module.lora_A, module.lora_B):
        for adapter, linear in table.items():
            table[adapter] = PartLinear(linear, splits[id(linear)].columns, call)
    for thin in module.lora_A.values():
        thin.register_forward_hook(sum_columns)


def products(bound: Bound) -> MeshSlice:
    """Return the algorithm that multiplies the matrices of a call."""
    return cast("MeshSlice", bound.world.tensor)


def whole_table(weight: Tensor, bound: Bound, config: Any, held: Layout | None) -> Tensor:
    """Return an embedding's or a head's weight with all features, for those rows (tokens) that a
    call on a mesh uses; differentiable. held: as in used_by."""
    tokens, features = MatrixSplit(COLUMNS, (config.vocab_size,)), features_of(config, ROWS)
    used = used_by(bound, held, tokens, features)
    return products(bound).whole(cut(weight, used), bound.world.mesh)


class SplitEmbedding(nn.Module):
    """An embedding whose features are split over mesh rows; a call gathers whole features."""

    def __init__(self, embedding: nn.Embedding, config: Any, held: Layout) -> None:
        super().__init__()
        self.weight = embedding.weight
        self._plain = (embedding,)  # in a tuple, so that it is not registered as a submodule
        self._config, self._held = config, held
        self.padding_idx = embedding.padding_idx
        """The row of this call's table that is the padding token's, if any."""

    def forward(self, tokens: Tensor, bound: Bound) -> Tensor:
        """Return all features of tokens [1, T], like transformers' own, [1, T, d].

        On a mesh, token indices are relative to the rows that the call uses, otherwise to those
        stored.
        """
        (plain,), weight = self._plain, self.weight
        if bound.world.layout.is_mesh:
            weight = whole_table(weight, bound, self._config, self._held)
        plain.padding_idx = self.padding_idx
        made: Tensor = functional_call(plain, {"weight": weight}, (tokens,))
        return made


class Inward(nn.Module):
    """The projections into a block, which are all computed when the first of them is called.

    transformers calls them one after another with the same tensor. Their weights belong to this
    module, so that ZeRO-3 fetches them together.
    """

    def __init__(self, product: int, call: Call) -> None:
        super().__init__()
        self._product, self._call = product, call
        self._names: list[str] = []
        self._splits: list[ProjectionSplits] = []
        self._of: Tensor | None = None
        self._made: dict[str, Tensor] = {}

    def part(self, name: str, linear: Any, splits: ProjectionSplits) -> InwardPart:
        """Take over a projection's parameters; return the module that replaces it."""
        self._names.append(name)
        self._splits.append(splits)
        self.register_parameter(f"{name}_weight", linear.weight)
        self.register_parameter(f"{name}_bias", linear.bias)
        return InwardPart(self, name)

    def take(self, name: str, x: Tensor) -> Tensor:
        """Return the output of one of the projections for x [1, t, d/C], [1, t, o/C]."""
        if self._of is not x or name not in self._made:
            self._of, self._made = x, dict(zip(self._names, self(x), strict=True))
        found = self._made.pop(name)
        if not self._made:
            self._of = None
        return found

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the output of each projection for x."""
        weights = [getattr(self, f"{name}_weight") for name in self._names]
        biases = [getattr(self, f"{name}_bias") for name in self._names]
        call = self._call
        made: Sequence[Tensor]
        if call.on_mesh:
            used = [call.used(split.columns, split.rows) for split in self._splits]
            made = products(call.bound).inward(
                x[0], weights, call.bound.world.mesh, self._product, used
            )
        else:
            every = zip(weights, self._splits, strict=True)
            made = [part_of_product(x[0], (w, None), split.columns, call) for w, split in every]
        three = zip(made, biases, self._splits, strict=True)
        return tuple(split.added(one, bias, call)[None] for one, bias, split in three)


class InwardPart(nn.Module):
    """The replacement of one of the projections into a block."""

    def __init__(self, together: Inward, name: str) -> None:
        super().__init__()
        # in a tuple, so that it is not registered as a submodule
        self._together, self._name = (together,), name

    def forward(self, x: Tensor) -> Tensor:
        """Return [1, t, o/C] for x [1, t, d/C] on a mesh; otherwise this rank's part for x with all
        features."""
        return self._together[0].take(self._name, x)


class Outward(nn.Module):
    """The projection out of a block."""

    def __init__(
        self, linear: nn.Linear, splits: ProjectionSplits, product: int, call: Call
    ) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self._splits, self._product, self._call = splits, product, call

    def forward(self, x: Tensor) -> Tensor:
        """Return [1, t, d/C] for x [1, t, i/C] on a mesh; otherwise this rank's partial output."""
        call, split = self._call, self._splits
        bias: Tensor | None = self.bias
        if call.on_mesh:
            used, mesh = call.used(split.columns, split.rows), call.bound.world.mesh
            made = products(call.bound).outward(x[0], self.weight, mesh, self._product, used)
        else:
            made = part_of_product(x[0], (self.weight, None), split.columns, call)
            bias = bias * 0.0 if bias is not None and call.group.index else bias
        return split.added(made, bias, call)[None]

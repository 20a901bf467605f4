"""Which of a model's parameters train, by the names of its modules, and how many a rank holds."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from uspft.families import Blocks, ModelShape, layer_blocks, state_sizes
from uspft.families.projections import STATE_LAYER, STATE_OWN
from uspft.planner.layer_kinds import Norms, layer_kind
from uspft.planner.products import (
    ProductShape,
    added_projections,
    head_projection,
    layer_projections,
    outside_modules,
    shared_projections,
    state_projections,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

PROJECTIONS = frozenset(
    {"q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"}
    | {"gate_proj", "up_proj", "gate_up_proj", "down_proj"}
    | {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"}
    | {"per_layer_input_gate", "per_layer_projection", "per_layer_model_projection", "proj"}
    | {"in_proj_qkvz", "in_proj_ba", "g_proj", "b_proj", "a_proj", "shared_expert_gate"}
)
"""The last words of the projections of a layer."""
EXPERT_WORDS = frozenset({"gate_proj", "up_proj", "gate_up_proj", "down_proj"})
"""Those that matrices of experts have too, fused or in files, where a model has any."""
EXPERTS = ("mlp.experts.", "block_sparse_moe.experts.", "experts.")
"""How the names of experts begin: of most families, of GraniteMoe, and of Gemma 4."""
_BESIDE_MLP_VECTORS = (
    *("post_feedforward_layernorm_1", "post_feedforward_layernorm_2"),
    *("pre_feedforward_layernorm_2", "router.scale"),
)
_OWN = (*STATE_OWN, "router.scale", "router.per_expert_scale")
"""How the names of parameters end that stand in no module of their own."""
EMBEDDING, LAST_NORM, HEAD = "model.embed_tokens", "model.norm", "lm_head"


@dataclass(frozen=True)
class Lora:
    """The adapters of a recipe."""

    rank: int
    modules: tuple[str, ...] | None = None
    """The last words of the projections that have one; None for all."""
    dropout: bool = False
    parameters: tuple[str, ...] = ()
    """The names of what has one beside these: matrices of experts, and of routers."""

    def adapts(self, name: str, words: Collection[str] = ()) -> bool:
        """Tell whether a projection of a layer, its experts' or its router's, has an adapter; one
        whose last word experts have too, as one of `words`, is named as a parameter."""
        if any(f".{_parameter(name)}".endswith(f".{one}") for one in self.parameters):
            return True
        word = name.rpartition(".")[2]
        if word in words or word not in PROJECTIONS:
            return False
        return self.modules is None or any(f".{name}".endswith(f".{one}") for one in self.modules)


@dataclass(frozen=True)
class Trained:
    """The names of the modules of one layer that train."""

    weights: frozenset[str]
    adapters: frozenset[str]

    def __bool__(self) -> bool:
        return bool(self.weights or self.adapters)

    def of_experts(self) -> Trained:
        """Return what of it is experts'."""
        return Trained(
            *(frozenset(filter(_of_experts, one)) for one in (self.weights, self.adapters))
        )


def layer_modules(shape: ModelShape, blocks: Blocks) -> dict[str, ProductShape]:
    """Return the modules with weights of a layer that has these blocks, by name, each with its
    matrix. shape: with the layer's sizes."""
    kind, state = layer_kind(shape), blocks.state
    query, key, value, out, *router, gate, up, down = layer_projections(
        shape, experts=blocks.experts
    )
    found = {"self_attn.q_proj": query}
    made = {"self_attn.k_proj": key, "self_attn.v_proj": value}
    found |= {name: one for name, one in made.items() if one.outputs}
    if kind.fused:
        found = {"self_attn.qkv_proj": _together(query, key, value)}
    found["self_attn.o_proj"] = out
    if state:
        found = {**state_projections(shape), **_state_modules(shape)}
    if blocks.experts:
        (found[kind.router],) = router
        into, back = matrices_of_experts(kind.router)
        found |= {into: _together(gate, up), back: down}
        found |= shared_projections(shape)
        if shape.beside_mlp:
            found |= {name: ProductShape(1, shape.hidden_size) for name in _BESIDE_MLP_VECTORS}
            found["router.per_expert_scale"] = ProductShape(1, shape.experts)
    elif kind.fused:
        found |= {"mlp.gate_up_proj": _together(gate, up), "mlp.down_proj": down}
    else:
        found |= {"mlp.gate_proj": gate, "mlp.up_proj": up, "mlp.down_proj": down}
    if shape.layer_features:
        found |= added_projections(shape)
        found["post_per_layer_input_norm"] = ProductShape(1, shape.hidden_size)
    norms = Norms() if state else kind.norms
    found |= {name: ProductShape(1, shape.hidden_size) for name in norms if name}
    if (kind.normed_heads or kind.normed_together) and not state:
        heads = (query.outputs, key.outputs) if kind.normed_together else (shape.head_dim,) * 2
        found |= {
            f"self_attn.{n}_norm": ProductShape(1, h)
            for n, h in zip("qk", heads, strict=True)
            if n == "q" or not shape.borrows_keys
        }
    return found


def _state_modules(shape: ModelShape) -> dict[str, ProductShape]:
    """Return what a layer with a state has beside projections."""
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


def _together(*shapes: ProductShape) -> ProductShape:
    """Return matrices that lie one below another."""
    return replace(shapes[0], outputs=sum(one.outputs for one in shapes))


def trained_layers(
    shape: ModelShape, lora: Lora | None, freeze: tuple[str, ...]
) -> tuple[Trained, ...]:
    """Return what of each layer trains. freeze: regular expressions over parameters' names."""
    kinds, numbers = modules_of_kinds(shape)
    return _trained(numbers, tuple(map(tuple, kinds)), lora, freeze, _words_of_experts(shape))


def modules_of_kinds(
    shape: ModelShape,
) -> tuple[list[dict[str, ProductShape]], tuple[int, ...]]:
    """Return the modules of each kind of layer, and of which kind each layer is."""
    every = layer_blocks(shape)
    kinds = list(dict.fromkeys(every))
    modules = [layer_modules(blocks.sizes(shape), blocks) for blocks in kinds]
    return modules, tuple(map(kinds.index, every))


@lru_cache(maxsize=64)
def _trained(
    numbers: tuple[int, ...],
    kinds: tuple[tuple[str, ...], ...],
    lora: Lora | None,
    freeze: tuple[str, ...],
    words: frozenset[str],
) -> tuple[Trained, ...]:
    """numbers: of which kind each layer is. kinds: the names of the modules of each. words: as of
    Lora.adapts."""
    found: list[Trained] = []
    for number, kind in enumerate(numbers):
        at, names = f"model.layers.{number}", kinds[kind]
        weights = [] if lora else [n for n in names if not _frozen(f"{at}.{_parameter(n)}", freeze)]
        adapted = [n for n in names if lora and lora.adapts(n, words)]
        adapted = [n for n in adapted if not _frozen(f"{at}.{n}.lora_A.weight", freeze)]
        one = Trained(frozenset(weights), frozenset(adapted))
        found.append(found[-1] if found and found[-1] == one else one)
    return tuple(found)


def _parameter(name: str) -> str:
    """Return the name of a module's weight; experts are parameters themselves, and so are gates."""
    own = _of_experts(name) or name.endswith(_OWN)
    return name if own else f"{name}.weight"


def _of_experts(name: str) -> bool:
    return name.startswith(EXPERTS)


def matrices_of_experts(router: str) -> tuple[str, str]:
    """Return the names of a layer's matrices into and out of experts, which stand beside its router
    or, in Gemma 4, beside the MLP."""
    block = router.rpartition(".")[0]
    at = f"{block}.experts." if f"{block}.experts." in EXPERTS else "experts."
    return f"{at}gate_up_proj", f"{at}down_proj"


def _words_of_experts(shape: ModelShape) -> frozenset[str]:
    """Return the last words of projections that a model's experts have too."""
    separate = {"gate_proj", "up_proj"} if shape.beside_mlp else set()
    return EXPERT_WORDS - separate if shape.routed else frozenset()


def _frozen(name: str, freeze: tuple[str, ...]) -> bool:
    return any(re.search(expression, name) for expression in freeze)


def outside_trains(lora: Lora | None, freeze: tuple[str, ...]) -> Mapping[str, bool]:
    """Tell which of the embedding, the last norm and the head train."""
    names = (EMBEDDING, LAST_NORM, HEAD)
    return {name: not lora and not _frozen(f"{name}.weight", freeze) for name in names}


@dataclass(frozen=True)
class ParameterCounts:
    """How many parameters a tensor rank holds."""

    every: int
    """Frozen ones and adapters counted."""
    trained: int
    largest_trained: int
    """Of one parameter that trains."""
    layer: int
    """Of a layer, adapters counted."""
    largest: int
    """Of one parameter of a layer."""
    head: int
    experts: int = 0
    """Of those of experts that ranks divide, which are counted among the others too."""
    experts_trained: int = 0
    vectors: bool = False
    """Whether any of one dimension trains."""
    tied: bool = False
    """Whether the head's gradient waits for that of the embedding, which is one parameter."""
    sizes: tuple[tuple[int, int], ...] = ()
    """Of parameters that train, and how many are so large."""

    def divided(self, ways: int) -> ParameterCounts:
        """Return what a mesh row holds of it."""
        counts = {one.name: -(-getattr(self, one.name) // ways) for one in fields(self)[:-1]}
        sizes = tuple((-(-size // ways), number) for size, number in self.sizes)
        return ParameterCounts(**counts, sizes=sizes)

    def above(self, elements: int) -> int:
        """Return how many of them are in parameters that train and are larger than that."""
        return sum(size * number for size, number in self.sizes if size > elements)


class StageLayers(NamedTuple):
    """What a rank of a pipeline has of a model."""

    layers: tuple[int, ...]
    first: bool
    """Whether it has the embedding."""
    last: bool
    """Whether it has the last norm and the head; of a tied table a copy, which is none of its
    parameters."""


def counts_of(
    shape: ModelShape,
    tensor: int,
    lora: Lora | None,
    freeze: tuple[str, ...],
    stage: StageLayers | None = None,
    experts: int = 1,
) -> ParameterCounts:
    """Count the parameters of a tensor rank, biases left out. stage: None has all layers. experts:
    the ranks that divide those of a layer."""
    kinds, numbers = modules_of_kinds(shape)
    words = _words_of_experts(shape)
    held = [_Held.of(kind, tensor, lora, experts, words) for kind in kinds]
    head, outside = head_projection(shape).on(tensor).parameters, outside_trains(lora, freeze)
    mine = stage or StageLayers(tuple(range(shape.layers)), first=True, last=True)
    every_layer = trained_layers(shape, lora, freeze)
    layers = Counter((every_layer[number], numbers[number]) for number in mine.layers)
    own = [held[kind] for kind in {numbers[number] for number in mine.layers}]
    met = [(one, held[kind], number) for (one, kind), number in layers.items()]
    trained = sum(number * sum(here.sizes_of(one)) for one, here, number in met)
    trained += mine.last * outside[LAST_NORM] * shape.hidden_size
    more, train = outside_counts(shape, lora, freeze)
    trained += sum(train)
    tables = [outside[EMBEDDING]] * mine.first
    tables += [outside[HEAD]] * (mine.last and not shape.tied)
    trained += sum(tables) * head
    every = len(tables) * head + mine.last * shape.hidden_size
    every += sum(held[numbers[number]].every for number in mine.layers) + more
    sizes = Counter(train)
    sizes[head] += sum(tables)
    for one, here, number in met:
        sizes.update({size: number * n for size, n in Counter(here.sizes_of(one)).items()})
    sizes = +sizes
    head *= mine.first or mine.last
    divided = [(one.of_experts(), here, number) for one, here, number in met if experts > 1]
    return ParameterCounts(
        every,
        trained,
        max(sizes, default=0),
        max((one.every for one in own), default=0),
        max((matrix.parameters for one in own for matrix in one.modules.values()), default=0),
        head,
        sum(number * here.of_experts for _, here, number in divided),
        sum(number * sum(here.sizes_of(one)) for one, here, number in divided),
        any(here.modules[name].inputs == 1 for one, here, _ in met for name in one.weights),
        shape.tied and mine.first and mine.last and outside[EMBEDDING],
        tuple(sizes.items()),
    )


def outside_counts(
    shape: ModelShape, lora: Lora | None, freeze: tuple[str, ...]
) -> tuple[int, list[int]]:
    """Count the parameters that make the embeddings of each layer, adapters among them, and each of
    these that trains."""
    every, trained = 0, list[int]()
    for name, one in outside_modules(shape).items():
        adapter = lora.rank * (one.inputs + one.outputs) if lora and lora.adapts(name) else 0
        every += one.parameters + adapter
        own = adapter if lora else one.parameters
        kind = "lora_A.weight" if lora else "weight"
        trained += [own] if own and not _frozen(f"{name}.{kind}", freeze) else []
    return every, trained


@dataclass(frozen=True)
class _Held:
    """The modules of a kind of layer as a tensor rank holds them."""

    modules: Mapping[str, ProductShape]
    adapters: Mapping[str, int]
    """The parameters of an adapter beside each."""
    adapted: frozenset[str]
    """The names of those that have one."""

    @classmethod
    def of(
        cls,
        kind: Mapping[str, ProductShape],
        tensor: int,
        lora: Lora | None,
        experts: int,
        words: Collection[str],
    ) -> _Held:
        modules = {name: one.on(tensor) for name, one in kind.items()}
        for name in filter(_of_experts, kind):
            modules[name] = replace(modules[name], copies=modules[name].copies // experts)
        rank = lora.rank if lora else 0
        adapters = {n: rank * (m.inputs + m.outputs) * m.copies for n, m in modules.items()}
        adapted = frozenset(n for n in kind if lora and lora.adapts(n, words))
        return cls(modules, adapters, adapted)

    def sizes_of(self, trained: Trained) -> list[int]:
        """Return the sizes of the parameters that train."""
        own = [self.modules[name].parameters for name in trained.weights]
        return own + [self.adapters[name] for name in trained.adapters]

    def _sum(self, names: Iterable[str]) -> int:
        return sum(
            self.modules[name].parameters + self.adapters[name] * (name in self.adapted)
            for name in names
        )

    @property
    def every(self) -> int:
        return self._sum(self.modules)

    @property
    def of_experts(self) -> int:
        return self._sum(filter(_of_experts, self.modules))

"""Which of a model's parameters train, by the names of its modules, and how many a rank holds."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from uspft.families import ModelShape, layer_blocks
from uspft.families.projections import STATE_OWN
from uspft.planner.products import (
    EXPERTS,
    ProductShape,
    head_projection,
    layer_modules,
    outside_modules,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

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


def all_layers(shape: ModelShape) -> StageLayers:
    """Return what a rank has where there are no stages."""
    return StageLayers(tuple(range(shape.layers)), first=True, last=True)


class _Held(NamedTuple):
    """A parameter as a tensor rank holds it; both factors of an adapter are one."""

    elements: int
    trains: bool
    of_experts: bool = False
    vector: bool = False
    adapter: bool = False


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
    mine = stage or all_layers(shape)
    outside = _outside_layers(shape, tensor, lora, freeze, mine)
    numbers, held = _of_layers(shape, tensor, lora, freeze, experts)
    many, sizes = Counter(map(numbers.__getitem__, mine.layers)), Counter[int]()
    in_layers = [(one, number) for kind, number in many.items() for one in held[kind]]
    every = [*((one, 1) for one in outside), *in_layers]
    for one, number in every:
        if one.trains:
            sizes[one.elements] += number
    divided = [(one, number) for one, number in in_layers if one.of_experts and experts > 1]
    ends = mine.first or mine.last
    return ParameterCounts(
        every=sum(one.elements * number for one, number in every),
        trained=sum(size * number for size, number in sizes.items()),
        largest_trained=max(sizes, default=0),
        layer=max((sum(one.elements for one in held[kind]) for kind in many), default=0),
        largest=max((one.elements for one, _ in in_layers if not one.adapter), default=0),
        head=head_projection(shape).on(tensor).parameters * ends,
        experts=sum(one.elements * number for one, number in divided),
        experts_trained=sum(one.elements * number for one, number in divided if one.trains),
        vectors=any(one.vector and one.trains for one, _ in in_layers),
        tied=shape.tied and mine.first and mine.last and outside[0].trains,
        sizes=tuple(sizes.items()),
    )


def trained_above(
    shape: ModelShape, tensor: int, lora: Lora | None, freeze: tuple[str, ...], experts: int
) -> list[int]:
    """Count, for each layer, the parameters of a tensor rank that train and whose gradients come
    before its own: of the layers behind it, the last norm and the head, tied to the embedding or
    not. The rest is as of counts_of."""
    numbers, held = _of_layers(shape, tensor, lora, freeze, experts)
    each = [sum(one.elements for one in kind if one.trains) for kind in held]
    outside = outside_trains(lora, freeze)
    first = (
        outside[EMBEDDING if shape.tied else HEAD] * head_projection(shape).on(tensor).parameters
    )
    first += outside[LAST_NORM] * shape.hidden_size
    return list(accumulate((each[kind] for kind in reversed(numbers[1:])), initial=first))[::-1]


def _of_layers(
    shape: ModelShape, tensor: int, lora: Lora | None, freeze: tuple[str, ...], experts: int
) -> tuple[list[int], list[list[_Held]]]:
    """Return of which kind each layer is, told apart by modules and by what of them trains; and
    what a tensor rank holds of each kind."""
    modules, words = modules_of_kinds(shape), _words_of_experts(shape)
    every = list(zip(modules[1], trained_layers(shape, lora, freeze), strict=True))
    kinds, found = list(dict.fromkeys(every)), list[list[_Held]]()
    for number, trained in kinds:
        held = list[_Held]()
        for name, whole in modules[0][number].items():
            one, routed = whole.on(tensor), _of_experts(name)
            one = replace(one, copies=one.copies // experts) if routed else one
            held.append(_Held(one.parameters, name in trained.weights, routed, one.inputs == 1))
            if lora and lora.adapts(name, words):
                size = lora.rank * (one.inputs + one.outputs) * one.copies
                held.append(_Held(size, name in trained.adapters, routed, adapter=True))
        found.append(held)
    places = {one: place for place, one in enumerate(kinds)}
    return [places[one] for one in every], found


def _outside_layers(
    shape: ModelShape, tensor: int, lora: Lora | None, freeze: tuple[str, ...], mine: StageLayers
) -> list[_Held]:
    """Return what a tensor rank of a stage holds outside of layers: the embedding, the head, the
    last norm, and what makes the embeddings of each layer."""
    trains, table = outside_trains(lora, freeze), head_projection(shape).on(tensor).parameters
    found = [_Held(table, trains[EMBEDDING])] * mine.first
    found += [_Held(table, trains[HEAD])] * (mine.last and not shape.tied)
    found += [_Held(shape.hidden_size, trains[LAST_NORM])] * mine.last
    for name, one in outside_modules(shape).items():
        found.append(_Held(one.parameters, not lora and not _frozen(f"{name}.weight", freeze)))
        if lora and lora.adapts(name):
            trained = not _frozen(f"{name}.lora_A.weight", freeze)
            found.append(_Held(lora.rank * (one.inputs + one.outputs), trained))
    return found

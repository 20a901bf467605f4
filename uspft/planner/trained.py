"""Which of a model's parameters train, by the names of its modules, and how many a rank stores."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from uspft.families import Blocks, ModelShape, layer_blocks
from uspft.families.projections import STATE_OWN
from uspft.planner.products import (
    EXPERTS,
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
"""Of these, the words that names of experts' matrices can have too, fused or in files."""
_OWN = (*STATE_OWN, "router.scale", "router.per_expert_scale")
"""The endings of the names of parameters that are not in a module of their own."""
EMBEDDING, LAST_NORM, HEAD = "model.embed_tokens", "model.norm", "lm_head"


@dataclass(frozen=True)
class Lora:
    """The adapters of a recipe."""

    rank: int
    modules: tuple[str, ...] | None = None
    """The last words of the projections with an adapter; None for all."""
    dropout: bool = False
    parameters: tuple[str, ...] = ()
    """The names of other parameters with an adapter: matrices of experts, and of routers."""

    def adapts(self, name: str, words: Collection[str] = ()) -> bool:
        """Tell whether a projection of a layer, its experts or its router has an adapter. words:
        last words that experts have too; a projection with one of these counts as a parameter."""
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
    """Return the trained modules of each layer.

    freeze: regular expressions over parameters' names.
    """
    kinds = list(dict.fromkeys(layer_blocks(shape)))
    names = tuple(tuple(layer_modules(blocks.sizes(shape), blocks)) for blocks in kinds)
    numbers = tuple(map(kinds.index, layer_blocks(shape)))
    return _trained(numbers, names, lora, freeze, _words_of_experts(shape))


TrainedBlocks = tuple[Blocks, Trained]
"""The blocks of a layer, and which of its modules train."""


def kinds_of_layers(
    shape: ModelShape, lora: Lora | None, freeze: tuple[str, ...]
) -> list[TrainedBlocks]:
    """Return the blocks of each layer with what trains, which may differ between layers with the
    same blocks."""
    return list(zip(layer_blocks(shape), trained_layers(shape, lora, freeze), strict=True))


@lru_cache(maxsize=64)
def _trained(
    numbers: tuple[int, ...],
    kinds: tuple[tuple[str, ...], ...],
    lora: Lora | None,
    freeze: tuple[str, ...],
    words: frozenset[str],
) -> tuple[Trained, ...]:
    """Return the trained modules of each layer. numbers: the kind of each layer. kinds: the names
    of the modules of each kind. words: as in Lora.adapts."""
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
    """Return the name of a module's weight; experts and gates are parameters themselves."""
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
    """Return for the embedding, the last norm and the head whether each trains."""
    names = (EMBEDDING, LAST_NORM, HEAD)
    return {name: not lora and not _frozen(f"{name}.weight", freeze) for name in names}


@dataclass(frozen=True)
class ParameterCounts:
    """The numbers of parameters that a tensor rank stores."""

    every: int
    """All of them, frozen ones and adapters included."""
    trained: int
    largest_trained: int
    """The elements of the largest parameter that trains."""
    layer: int
    """Those of a layer, adapters included."""
    largest: int
    """The elements of the largest parameter of a layer."""
    head: int
    experts: int = 0
    """Those of experts that are divided over ranks; they count in the others too."""
    experts_trained: int = 0
    vectors: bool = False
    """Whether any 1-D parameter trains."""
    tied: bool = False
    """Whether head and embedding are one parameter, whose gradient is complete only after both."""
    sizes: tuple[tuple[int, int], ...] = ()
    """(elements, number of such parameters) of parameters that train."""

    def divided(self, ways: int) -> ParameterCounts:
        """Return the counts on a mesh row."""
        counts = {one.name: -(-getattr(self, one.name) // ways) for one in fields(self)[:-1]}
        sizes = tuple((-(-size // ways), number) for size, number in self.sizes)
        return ParameterCounts(**counts, sizes=sizes)

    def above(self, elements: int) -> int:
        """Return the elements of trained parameters that are larger than this."""
        return sum(size * number for size, number in self.sizes if size > elements)


class StageLayers(NamedTuple):
    """The layers of a model on a rank of a pipeline."""

    layers: tuple[int, ...]
    first: bool
    """Whether it has the embedding."""
    last: bool
    """Whether it has the last norm and the head; if that is tied, it is a copy and not a
    parameter."""


def all_layers(shape: ModelShape) -> StageLayers:
    """Return what a rank has where there are no stages."""
    return StageLayers(tuple(range(shape.layers)), first=True, last=True)


class _Held(NamedTuple):
    """A parameter as a tensor rank stores it; both factors of an adapter count as one."""

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
    """Return the parameter counts of a tensor rank, without biases. stage: its layers; None: all.
    experts: the number of ranks that divide a layer's experts."""
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
    """Return, for each layer, the trained parameters of a tensor rank whose gradients are computed
    before the layer's own: those of later layers, the last norm and the head. The other arguments
    are as in counts_of."""
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
    """Return the kind of each layer, as an index (kinds differ in modules or in what trains), and a
    tensor rank's parameters of each kind."""
    every, words = kinds_of_layers(shape, lora, freeze), _words_of_experts(shape)
    kinds, found = list(dict.fromkeys(every)), list[list[_Held]]()
    for blocks, trained in kinds:
        held = list[_Held]()
        for name, whole in layer_modules(blocks.sizes(shape), blocks).items():
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
    """Return the parameters of a tensor rank of a stage outside of layers: the embedding, the head,
    the last norm, and per-layer embeddings."""
    trains, table = outside_trains(lora, freeze), head_projection(shape).on(tensor).parameters
    found = [_Held(table, trains[EMBEDDING])] * mine.first
    found += [_Held(table, trains[HEAD])] * (mine.last and not shape.tied)
    found += [_Held(shape.hidden_size, trains[LAST_NORM])] * mine.last
    every = trained_outside(shape, lora, freeze)
    for name, one in outside_modules(shape).items():
        word = name.rpartition(".")[2]
        found.append(_Held(one.parameters, word in every.weights))
        if lora and lora.adapts(name):
            size = lora.rank * (one.inputs + one.outputs)
            found.append(_Held(size, word in every.adapters))
    return found


def trained_outside(shape: ModelShape, lora: Lora | None, freeze: tuple[str, ...]) -> Trained:
    """Return which of the modules that make the embeddings of each layer train, by the last words
    of their names."""
    names = {name.rpartition(".")[2]: name for name in outside_modules(shape)}
    weights = [w for w, n in names.items() if not lora and not _frozen(f"{n}.weight", freeze)]
    adapters = [w for w, n in names.items() if lora and lora.adapts(n)]
    adapters = [w for w in adapters if not _frozen(f"{names[w]}.lora_A.weight", freeze)]
    return Trained(frozenset(weights), frozenset(adapters))

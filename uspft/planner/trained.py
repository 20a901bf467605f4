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
    from collections.abc import Collection, Iterable

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
MODEL = "model."
NOTHING = frozenset[str]()


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
    """The names of some modules that train, such as those of one layer."""

    weights: frozenset[str]
    adapters: frozenset[str]

    def __bool__(self) -> bool:
        return bool(self.weights or self.adapters)


@dataclass(frozen=True)
class Trains:
    """What a recipe trains: every parameter but the frozen ones, or only its adapters."""

    lora: Lora | None = None
    freeze: tuple[str, ...] = ()
    """Regular expressions over the names of parameters that do not train."""

    @property
    def everything(self) -> bool:
        return not self.lora and not self.freeze

    def of(
        self, names: Iterable[str], at: str = "", words: frozenset[str] = frozenset()
    ) -> Trained:
        """Return which modules train. at: what stands before their names in a parameter's name.
        words: as in Lora.adapts."""

        def kept(name: str) -> bool:
            return not any(re.search(expression, f"{at}{name}") for expression in self.freeze)

        if lora := self.lora:
            adapted = (name for name in names if lora.adapts(name, words))
            return Trained(NOTHING, frozenset(n for n in adapted if kept(f"{n}.lora_A.weight")))
        return Trained(frozenset(name for name in names if kept(_parameter(name))), NOTHING)

    @property
    def outside(self) -> frozenset[str]:
        """Those of the embedding, the last norm and the head that train."""
        return self.of((EMBEDDING, LAST_NORM, HEAD)).weights

    def of_embeddings(self, shape: ModelShape) -> Trained:
        """Return which of the modules that make the embeddings of each layer train, by the last
        words of their names."""
        return self.of((name.removeprefix(MODEL) for name in outside_modules(shape)), MODEL)


EVERYTHING = Trains()

TrainedBlocks = tuple[Blocks, Trained]
"""The blocks of a layer, and which of its modules train."""


def kinds_of_layers(shape: ModelShape, trains: Trains) -> list[TrainedBlocks]:
    """Return the blocks of each layer with what trains, which may differ between layers with the
    same blocks."""
    blocks = layer_blocks(shape)
    names = {one: tuple(layer_modules(one.sizes(shape), one)) for one in dict.fromkeys(blocks)}
    of_layers = tuple(map(names.__getitem__, blocks))
    found = _trained(of_layers, trains, _words_of_experts(shape))
    return list(zip(blocks, found, strict=True))


@lru_cache(maxsize=64)
def _trained(
    names: tuple[tuple[str, ...], ...], trains: Trains, words: frozenset[str]
) -> tuple[Trained, ...]:
    """Return the trained modules of each layer. names: of each layer's modules. words: as in
    Lora.adapts."""
    found: list[Trained] = []
    for number, of_layer in enumerate(names):
        one = trains.of(of_layer, f"{MODEL}layers.{number}.", words)
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
    tensor: int = 1,
    trains: Trains = EVERYTHING,
    stage: StageLayers | None = None,
    experts: int = 1,
) -> ParameterCounts:
    """Return the parameter counts of a tensor rank, without biases. stage: its layers; None: all.
    experts: the number of ranks that divide a layer's experts."""
    mine = stage or all_layers(shape)
    outside = _outside_layers(shape, tensor, trains, mine)
    numbers, held = _of_layers(shape, tensor, trains, experts)
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


def trained_above(shape: ModelShape, tensor: int, trains: Trains, experts: int) -> list[int]:
    """Return, for each layer, the trained parameters of a tensor rank whose gradients are computed
    before the layer's own: those of later layers, the last norm and the head. The other arguments
    are as in counts_of."""
    numbers, held = _of_layers(shape, tensor, trains, experts)
    each = [sum(one.elements for one in kind if one.trains) for kind in held]
    table = EMBEDDING if shape.tied else HEAD
    first = (table in trains.outside) * head_projection(shape).on(tensor).parameters
    first += (LAST_NORM in trains.outside) * shape.hidden_size
    return list(accumulate((each[kind] for kind in reversed(numbers[1:])), initial=first))[::-1]


def _of_layers(
    shape: ModelShape, tensor: int, trains: Trains, experts: int
) -> tuple[list[int], list[list[_Held]]]:
    """Return the kind of each layer, as an index (kinds differ in modules or in what trains), and a
    tensor rank's parameters of each kind."""
    every, words, lora = kinds_of_layers(shape, trains), _words_of_experts(shape), trains.lora
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
    shape: ModelShape, tensor: int, trains: Trains, mine: StageLayers
) -> list[_Held]:
    """Return the parameters of a tensor rank of a stage outside of layers: the embedding, the head,
    the last norm, and per-layer embeddings."""
    outside, table = trains.outside, head_projection(shape).on(tensor).parameters
    found = [_Held(table, EMBEDDING in outside)] * mine.first
    found += [_Held(table, HEAD in outside)] * (mine.last and not shape.tied)
    found += [_Held(shape.hidden_size, LAST_NORM in outside)] * mine.last
    every, lora = trains.of_embeddings(shape), trains.lora
    for name, one in outside_modules(shape).items():
        word = name.removeprefix(MODEL)
        found.append(_Held(one.parameters, word in every.weights))
        if lora and lora.adapts(word):
            found.append(_Held(lora.rank * (one.inputs + one.outputs), word in every.adapters))
    return found

"""Which of a model's parameters train, by the names of its modules, and how many a rank holds."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from uspft.families import Blocks, ModelShape, layer_blocks, state_sizes
from uspft.families.projections import STATE_LAYER, STATE_OWN
from uspft.planner.layer_kinds import Norms, usual_kind
from uspft.planner.products import (
    ProductShape,
    head_projection,
    layer_projections,
    shared_projections,
    state_projections,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

PROJECTIONS = frozenset(
    {"q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj"}
    | {"gate_proj", "up_proj", "gate_up_proj", "down_proj"}
    | {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"}
    | {"in_proj_qkvz", "in_proj_ba", "g_proj", "b_proj", "a_proj", "shared_expert_gate"}
)
"""The last words of the projections of a layer."""
EXPERT_WORDS = frozenset({"gate_proj", "up_proj", "gate_up_proj", "down_proj"})
"""Those that matrices of experts have too, where a model has any."""
EXPERTS = "mlp.experts."
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

    def adapts(self, name: str, *, routed: bool) -> bool:
        """Tell whether a projection of a layer, its experts' or its router's, has an adapter; one
        whose name experts have too is named as a parameter. routed: whether the model has any."""
        if any(f".{_parameter(name)}".endswith(f".{one}") for one in self.parameters):
            return True
        word = name.rpartition(".")[2]
        if (routed and word in EXPERT_WORDS) or word not in PROJECTIONS:
            return False
        return self.modules is None or any(f".{name}".endswith(f".{one}") for one in self.modules)


@dataclass(frozen=True)
class Trained:
    """The names of the modules of one layer that train."""

    weights: frozenset[str]
    adapters: frozenset[str]

    def __bool__(self) -> bool:
        return bool(self.weights or self.adapters)


def layer_modules(shape: ModelShape, blocks: Blocks) -> dict[str, ProductShape]:
    """Return the modules with weights of a layer that has these blocks, by name, each with its
    matrix."""
    kind, (state, experts) = usual_kind(shape), blocks
    of_layer = layer_projections(shape, experts=experts)
    query, key, value, out, *router, gate, up, down = of_layer
    found = {"self_attn.q_proj": query, "self_attn.k_proj": key, "self_attn.v_proj": value}
    if kind.fused:
        found = {"self_attn.qkv_proj": _together(query, key, value)}
    found["self_attn.o_proj"] = out
    if state:
        found = {**state_projections(shape), **_state_modules(shape)}
    if experts:
        (found[kind.router],) = router
        found |= {f"{EXPERTS}gate_up_proj": _together(gate, up), f"{EXPERTS}down_proj": down}
        found |= shared_projections(shape)
    elif kind.fused:
        found |= {"mlp.gate_up_proj": _together(gate, up), "mlp.down_proj": down}
    else:
        found |= {"mlp.gate_proj": gate, "mlp.up_proj": up, "mlp.down_proj": down}
    norms = Norms() if state else kind.norms
    found |= {name: ProductShape(1, shape.hidden_size) for name in norms if name}
    if (kind.normed_heads or kind.normed_together) and not state:
        heads = (query.outputs, key.outputs) if kind.normed_together else (shape.head_dim,) * 2
        found |= {
            f"self_attn.{n}_norm": ProductShape(1, h) for n, h in zip("qk", heads, strict=True)
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
    every = layer_blocks(shape)
    kinds = tuple((blocks, tuple(layer_modules(shape, blocks))) for blocks in dict.fromkeys(every))
    return _trained(every, kinds, lora, freeze)


@lru_cache(maxsize=64)
def _trained(
    every: tuple[Blocks, ...],
    kinds: tuple[tuple[Blocks, tuple[str, ...]], ...],
    lora: Lora | None,
    freeze: tuple[str, ...],
) -> tuple[Trained, ...]:
    """kinds: the names of the modules of each kind of layer."""
    found: list[Trained] = []
    modules, routed = dict(kinds), any(blocks.experts for blocks in every)
    for number, blocks in enumerate(every):
        at, names = f"model.layers.{number}", modules[blocks]
        weights = [] if lora else [n for n in names if not _frozen(f"{at}.{_parameter(n)}", freeze)]
        adapted = [n for n in names if lora and lora.adapts(n, routed=routed)]
        adapted = [n for n in adapted if not _frozen(f"{at}.{n}.lora_A.weight", freeze)]
        one = Trained(frozenset(weights), frozenset(adapted))
        found.append(found[-1] if found and found[-1] == one else one)
    return tuple(found)


def _parameter(name: str) -> str:
    """Return the name of a module's weight; experts are parameters themselves, and so are gates."""
    own = name.startswith(EXPERTS) or name.endswith(STATE_OWN)
    return name if own else f"{name}.weight"


def _of_experts(name: str) -> bool:
    return name.startswith(EXPERTS)


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
    head: int
    experts: int = 0
    """Of those of experts that ranks divide, which are counted among the others too."""
    experts_trained: int = 0
    vectors: bool = False
    """Whether any of one dimension trains."""

    def divided(self, ways: int) -> ParameterCounts:
        """Return what a mesh row holds of it."""
        return ParameterCounts(*(-(-getattr(self, one.name) // ways) for one in fields(self)))


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
    blocks = layer_blocks(shape)
    kinds = {one: layer_modules(shape, one) for one in dict.fromkeys(blocks)}
    modules = {name: one.on(tensor) for kind in kinds.values() for name, one in kind.items()}
    for name in [name for name in modules if name.startswith(EXPERTS)]:
        modules[name] = replace(modules[name], copies=modules[name].copies // experts)
    head, outside = head_projection(shape).on(tensor).parameters, outside_trains(lora, freeze)
    adapter = (
        {name: lora.rank * (one.inputs + one.outputs) * one.copies for name, one in modules.items()}
        if lora
        else {}
    )
    mine = stage or StageLayers(tuple(range(shape.layers)), first=True, last=True)
    every_layer = trained_layers(shape, lora, freeze)
    layers = Counter(every_layer[number] for number in mine.layers)
    routed = any(one.experts for one in blocks)
    beside = {name: n for name, n in adapter.items() if lora and lora.adapts(name, routed=routed)}
    held = {
        one: sum(modules[n].parameters + beside.get(n, 0) for n in kind)
        for one, kind in kinds.items()
    }
    trained = experts_trained = 0
    for one, number in layers.items():
        for name in filter(_of_experts, one.weights if experts > 1 else ()):
            experts_trained += number * modules[name].parameters
        for name in filter(_of_experts, one.adapters if experts > 1 else ()):
            experts_trained += number * adapter[name]
        trained += number * sum(modules[name].parameters for name in one.weights)
        trained += number * sum(adapter[name] for name in one.adapters)
    trained += mine.last * outside[LAST_NORM] * shape.hidden_size
    tables = [outside[EMBEDDING]] * mine.first
    tables += [outside[HEAD]] * (mine.last and not shape.tied)
    trained += sum(tables) * head
    every = len(tables) * head + mine.last * shape.hidden_size
    every += sum(held[blocks[number]] for number in mine.layers)
    sizes = [modules[name].parameters for one in layers for name in one.weights]
    sizes += [adapter[name] for one in layers for name in one.adapters]
    sizes += [head] * any(tables)
    head *= mine.first or mine.last
    vectors = any(modules[name].inputs == 1 for one in layers for name in one.weights)
    of_experts = sum(
        modules[name].parameters + beside.get(name, 0) for name in filter(_of_experts, modules)
    )
    return ParameterCounts(
        every,
        trained,
        max(sizes, default=0),
        max((held[blocks[number]] for number in mine.layers), default=0),
        head,
        sum(blocks[number].experts for number in mine.layers) * of_experts * (experts > 1),
        experts_trained,
        vectors,
    )

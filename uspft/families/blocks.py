"""What each layer of a model is made of, as its config.json has it."""

from __future__ import annotations

from typing import NamedTuple

from uspft.families.shape import ModelShape
from uspft.families.states import state_layers
from uspft.families.table import EXPERTS, FAMILIES


class Blocks(NamedTuple):
    """What a layer has of what layers of its family may have."""

    state: bool = False
    """Whether a state, and no attention."""
    experts: bool = False
    """Whether experts that tokens choose among, and no MLP that all of them meet alone."""


def layer_blocks(shape: ModelShape) -> tuple[Blocks, ...]:
    """Return what each layer of a model has."""
    return tuple(map(Blocks, state_layers(shape), expert_layers(shape)))


def expert_layers(shape: ModelShape) -> tuple[bool, ...]:
    """Tell of each layer of a model whether tokens choose among experts there; in others they all
    meet one MLP. Fields that transformers does not have for the family say nothing."""
    family, every = FAMILIES[shape.model_type], range(shape.layers)
    if not family.routed or not any(map(shape.full.get, EXPERTS)):
        return (False,) * shape.layers
    said = {name: value for name, value in shape.full.items() if name in family.defaults}
    first = said.get("first_k_dense_replace") or said.get("moe_layer_start_index") or 0
    last = shape.full.get("moe_layer_end_index", -1) if "moe_layer_interval" in said else -1
    end = shape.layers if last == -1 else last + 1
    step = said.get("decoder_sparse_step") or said.get("moe_layer_interval") or 1
    dense = said.get("mlp_only_layers") or ()
    return tuple(first <= n < end and (n + 1) % step == 0 and n not in dense for n in every)

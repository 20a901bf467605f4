"""How ranks divide the parameters of a layer's experts, and of the adapters beside them.

Tensor ranks have some inner features of every expert, its gate and its up; ranks that divide the
experts themselves have some experts, in rank order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from uspft.model.parameter_adapter import ParameterAdapter, adapters
from uspft.parameters.experts import is_experts
from uspft.parameters.names import BESIDE, plain_name
from uspft.parameters.shards import MatrixSplit

ExpertSplits = dict[str, MatrixSplit | None]
"""By a parameter's name how it is divided; None where each rank has all of it."""


def expert_modules(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield each module that has the weights of a layer's experts, with its name."""
    for name, module in model.named_modules():
        if any(is_experts(f"{name}.{own}") for own, _ in module.named_parameters(recurse=False)):
            yield name, module


def over_tensor_ranks(model: nn.Module) -> ExpertSplits:
    """Return how tensor ranks divide the parameters of all experts, and of their adapters."""
    found: ExpertSplits = {}
    for path, module in expert_modules(model):
        for name, parameter in module.named_parameters(recurse=False):
            found[plain_name(f"{path}.{name}")] = by_features(module, name, parameter.shape)
        for name, adapter in adapters(module):
            split = by_features(module, name, getattr(module, name).shape)
            for side in "AB":
                own = plain_name(f"{path}.{name}{BESIDE}.lora_{side}.weight")
                found[own] = _of_adapter(adapter, side, split)
    return found


def by_features(module: Any, name: str, shape: tuple[int, ...]) -> MatrixSplit:
    """Return how tensor ranks divide a parameter of all experts, [E, …].

    Of the bias that is added to hidden features, which ranks would add once each, each has some of
    these. name: the module's own.
    """
    dim = 1
    if not name.endswith("_bias") and name.startswith("down") != module.is_transposed:
        dim = 2
    size = shape[dim]
    if not name.startswith("gate_up"):
        return MatrixSplit(dim, (size,))
    if module.is_concatenated:
        return MatrixSplit(dim, (size // 2, size // 2))
    return MatrixSplit(dim, (size,), (size // 2,))


def _of_adapter(adapter: ParameterAdapter, side: str, split: MatrixSplit) -> MatrixSplit | None:
    """Return how tensor ranks divide a side of an adapter whose parameter they divide so."""
    gives = split.dim == (2 if adapter.inputs_first else 1)
    if gives != (side == "B"):
        return None
    return MatrixSplit(0 if gives else 1, split.stacked, split.units)


def over_experts(model: nn.Module) -> dict[str, MatrixSplit]:
    """Return how ranks divide the experts of all layers, and their adapters, in rank order."""
    found: dict[str, MatrixSplit] = {}
    for path, module in expert_modules(model):
        for name, parameter in module.named_parameters(recurse=False):
            split = MatrixSplit(0, (len(parameter),), in_order=True)
            found[plain_name(f"{path}.{name}")] = split
        for name, adapter in adapters(module):
            experts, owner = len(getattr(module, name)), f"{path}.{name}{BESIDE}"
            first = MatrixSplit(0, (experts * adapter.rank,), (experts,), in_order=True)
            found[plain_name(f"{owner}.lora_A.weight")] = first
            last = MatrixSplit(1, (experts,) * adapter.rank, in_order=True)
            found[plain_name(f"{owner}.lora_B.weight")] = last
    return found

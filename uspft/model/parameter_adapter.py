"""LoRA beside parameters that are no linear projection's: the matrices of experts, and of routers.

As peft has it for its `target_parameters`: a matrix W of each expert becomes
W + alpha ÷ rank · B A.

Shapes, as suffixes: E experts, r rank, i and o what a matrix takes and gives. A [E·r, i] has one
expert after another; B [o, r·E] has the expert fastest.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from uspft.parameters.names import BESIDE


class ParameterAdapter(nn.Module):
    """The two thin matrices of each expert beside a parameter; beside a router's, those of one."""

    def __init__(self, parameter: Tensor, rank: int, scale: float, *, inputs_first: bool) -> None:
        """Make it on the parameter's device, without values.

        inputs_first: whether the parameter is [E, i, o] and not [E, o, i].
        """
        super().__init__()
        experts, *sizes = parameter.shape if parameter.ndim == 3 else (1, *parameter.shape)
        takes, gives = sizes if inputs_first else sizes[::-1]
        how: dict[str, Any] = {"bias": False, "device": "meta", "dtype": parameter.dtype}
        self.rank, self.scale, self.inputs_first = rank, scale, inputs_first
        self.lora_A = nn.Linear(takes, rank * experts, **how)
        self.lora_B = nn.Linear(rank * experts, gives, **how)

    def added(self, parameter: Tensor) -> Tensor:
        """Return the parameter with the products that stand beside it, as peft merges them."""
        sides, first = (self.lora_A.weight, self.lora_B.weight), self.inputs_first
        return with_products(parameter, sides, self.rank, self.scale, inputs_first=first)


def with_products(
    value: Tensor, sides: tuple[Tensor, Tensor], rank: int, scale: float, *, inputs_first: bool
) -> Tensor:
    """Return W + scale · B A of every expert of a parameter [E, o, i], or [E, i, o].

    sides: A and B. Of a parameter of two dimensions there is one W.
    """
    a, b = sides
    if value.ndim == 2:
        return value + (b @ a) * scale
    a_Eri, b_Eor = a.unflatten(0, (-1, rank)), b.unflatten(1, (rank, -1)).permute(2, 0, 1)
    made = b_Eor @ a_Eri
    return value + (made.transpose(1, 2) if inputs_first else made) * scale


def adapt_parameter(module: Any, name: str, rank: int, scale: float) -> None:
    """Put an adapter beside a parameter of a module; one that is no module of experts then computes
    with both."""
    parameter = getattr(module, name)
    inputs_first = parameter.ndim == 3 and module.is_transposed
    beside = ParameterAdapter(parameter, rank, scale, inputs_first=inputs_first)
    setattr(module, f"{name}{BESIDE}", beside)
    if parameter.ndim == 2:
        form_weights(module)


def adapters(module: nn.Module) -> Iterator[tuple[str, ParameterAdapter]]:
    """Yield the parameters of a module that have an adapter, by their own name, with it."""
    for name, child in module.named_children():
        if isinstance(child, ParameterAdapter):
            yield name.removesuffix(BESIDE), child


def form_weights(module: nn.Module) -> None:
    """Make a module compute with adapted parameters to which the products have been added."""
    plain = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        table: dict[str, Any] = module._parameters
        held = {name: table[name] for name, _ in adapters(module)}
        try:
            for name, adapter in adapters(module):
                table[name] = adapter.added(held[name])
            return plain(*args, **kwargs)
        finally:
            table.update(held)

    module.forward = forward


def weight_of(weight: Tensor, side: str, rank: int) -> Tensor:
    """Return a side of an adapter as a matrix for each expert: A [E, r, i], B [E, r, o]."""
    if side == "A":
        return weight.unflatten(0, (-1, rank))
    return weight.unflatten(1, (rank, -1)).permute(2, 1, 0).contiguous()


def as_side(value: Tensor, side: str) -> Tensor:
    """Return a matrix for each expert as the side of an adapter, as `weight_of` has taken it."""
    return value.flatten(0, 1) if side == "A" else value.permute(2, 1, 0).flatten(1)

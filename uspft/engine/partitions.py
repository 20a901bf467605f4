"""Where DeepSpeed 0.19 keeps master weights, Adam moments and gradients, at each of its stages."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from deepspeed.utils import (
    safe_get_local_fp32_param,
    safe_get_local_grad,
    safe_get_local_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from torch import Tensor, nn

from uspft.engine.state import GRADIENT


class Partitions:
    """The master weights, Adam moments and gradients of one DeepSpeed engine, found by their
    parameters."""

    def __init__(self, optimizer: Any, adam: torch.optim.Optimizer, stage: int) -> None:
        """optimizer: DeepSpeed's own around adam, or adam itself. stage: ZeRO's."""
        self._optimizer, self._adam = optimizer, adam
        self._masters = _masters(optimizer, adam) if stage == 0 else {}

    def fragment(self, parameter: nn.Parameter, kind: str) -> tuple[int, Tensor]:
        """Return (start, flat values) of what this rank keeps of its part of a parameter.

        It is the whole part where each rank that holds the part keeps all of it, and nothing where
        this rank holds nothing. Nothing is moved. A frozen parameter has its weight alone, in the
        compute type.
        """
        if not getattr(parameter, "ds_numel", parameter.numel()):
            return 0, parameter.detach().flatten()
        if not parameter.requires_grad:
            if kind != "weight":
                shape = tuple(parameter.shape)
                raise RuntimeError(f"a frozen parameter of shape {shape} has no {kind}")
            if not hasattr(parameter, "ds_id"):
                return 0, parameter.detach().flatten()
            return _unpadded(parameter, parameter.ds_tensor.detach())  # type: ignore[attr-defined]
        if kind == GRADIENT:
            start, made = self._gradient(parameter)
            return start, made.float()
        master = self._masters.get(id(parameter))
        if master is not None:
            held: Tensor = master.detach() if kind == "weight" else self._adam.state[master][kind]
            return 0, held.flatten()
        if hasattr(parameter, "ds_id"):
            if kind == "weight":
                value = safe_get_local_fp32_param(parameter)
            else:
                value = safe_get_local_optimizer_state(parameter, kind)
            return _unpadded(parameter, value)
        mapping: Any = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:
            return 0, parameter.detach().new_empty(0, dtype=torch.float32)
        values: Tensor = mapping.get_hp_fragment(None if kind == "weight" else kind)
        return mapping.lp_fragment_address.start, values.detach()

    def _gradient(self, parameter: Any) -> tuple[int, Tensor]:
        """Return (start, flat values) of what this rank keeps of a gradient, scaled as the loss."""
        if id(parameter) in self._masters:
            made = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            return 0, made.detach().flatten()
        if hasattr(parameter, "ds_id"):
            return _unpadded(parameter, safe_get_local_grad(parameter))
        mapping = parameter._hp_mapping
        if mapping is None:
            return 0, parameter.detach().new_empty(0)
        kept = mapping.get_lp_grad_fragment(parameter._index_in_param_group).detach().flatten()
        place = mapping.lp_fragment_address
        if kept.numel() == parameter.numel():  # stage 1 sums bfloat16 whole, on every rank
            kept = kept[place.start : place.start + place.numel]
        return place.start, kept

    def write(self, parameter: Any, kind: str, read: Callable[[int, int], Tensor]) -> None:
        """Set the values that `fragment` reads, under ZeRO-3, where they are no view of what is
        kept. read: returns values [start, stop) of the part.

        The compute weight itself is set when the model is built.
        """
        start, held = self.fragment(parameter, kind)
        if not held.numel():
            return
        size: int = parameter.ds_tensor.numel()
        padded = torch.zeros(size, dtype=torch.float32, device=held.device)
        padded[: held.numel()] = read(start, start + held.numel())
        if kind == "weight":
            safe_set_local_fp32_param(parameter, padded)
        else:
            safe_set_local_optimizer_state(parameter, padded, kind)


def _masters(optimizer: Any, adam: torch.optim.Optimizer) -> dict[int, nn.Parameter]:
    """Return what AdamW holds for each parameter at stage 0, by the parameter's id.

    It is the parameter itself or its float32 copy.
    """
    if optimizer is adam:
        return {id(p): p for p in chain(*(group["params"] for group in adam.param_groups))}
    pairs = zip(chain(*optimizer.fp16_groups), chain(*optimizer.fp32_groups), strict=True)
    return {id(half): full for half, full in pairs}


def _unpadded(parameter: Any, values: Tensor) -> tuple[int, Tensor]:
    """Return (start, flat values) of this rank's fragment under ZeRO-3, without its padding.

    ZeRO-3 cuts a parameter in equal fragments; the last may be longer than what is left.
    """
    start = min(values.numel() * parameter.ds_zero_partition_rank, parameter.ds_numel)
    return start, values.flatten()[: parameter.ds_numel - start]

"""Weights and Adam moments by parameter name, whatever the ZeRO stage has done with them.

Reading and writing are collective: every rank calls for the same parameters in the same order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from deepspeed.runtime.zero import GatheredParameters
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
)
from torch import Tensor, nn

if TYPE_CHECKING:
    from uspft.batch import Batch
    from uspft.engine.zero import ZeroEngine

MOMENTS = ("exp_avg", "exp_avg_sq")
KINDS = ("weight", *MOMENTS)


def read_state(engine: ZeroEngine, parameter: nn.Parameter, kind: str) -> Tensor:
    """The whole float32 master weight or Adam moment of a parameter, on the device it lives on.

    A frozen parameter has its weight alone, in the compute type until it is read.
    """
    if not parameter.requires_grad:
        return _frozen(parameter, kind)
    master = engine.masters.get(id(parameter))
    if master is not None:
        held: Tensor = master.detach() if kind == "weight" else engine.adam.state[master][kind]
        return held
    if kind == "weight":
        value = safe_get_full_fp32_param(parameter)
    else:
        value = safe_get_full_optimizer_state(parameter, kind)
    if value is None:
        raise RuntimeError(f"DeepSpeed keeps no {kind} of a parameter of shape {parameter.shape}")
    whole: Tensor = value.view(getattr(parameter, "ds_shape", parameter.shape))
    return whole


def _frozen(parameter: nn.Parameter, kind: str) -> Tensor:
    if kind != "weight":
        raise RuntimeError(f"a frozen parameter of shape {parameter.shape} has no {kind}")
    if not hasattr(parameter, "ds_id"):
        return parameter.detach().float()
    with GatheredParameters([parameter]):
        return parameter.detach().to(torch.float32, copy=True)


def write_state(parameter: nn.Parameter, kind: str, value: Tensor, engine: ZeroEngine) -> None:
    """Set what `read_state` reads. The compute weight itself is set when the model is built."""
    master = engine.masters.get(id(parameter))
    if master is not None:
        target = master.data if kind == "weight" else engine.adam.state[master][kind]
        target.copy_(value)
    elif kind == "weight":
        safe_set_full_fp32_param(parameter, value.to(parameter.device))
    else:
        safe_set_full_optimizer_state(parameter, value.to(parameter.device), kind)


def make_moments(engine: ZeroEngine, empty: Batch) -> None:
    """Bring Adam's states into being: a step over rows without targets, at learning rate 0.

    DeepSpeed makes them at the first step only, and only through it; nothing else changes.
    """
    engine.step([empty] * engine.passes, 0.0, stop=False)


def adam_steps(engine: ZeroEngine) -> int:
    """How many updates Adam's bias correction has counted."""
    counts = {int(state["step"]) for state in engine.adam.state.values() if "step" in state}
    return counts.pop() if counts else 0


def set_adam_steps(engine: ZeroEngine, steps: int) -> None:
    for state in engine.adam.state.values():
        count: Any = state["step"]
        if isinstance(count, torch.Tensor):
            count.fill_(steps)
        else:
            state["step"] = steps

"""LoRA of plain peft on plain transformers, started from given weights."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.parametrize import register_parametrization

from tests.support.models import Reference
from uspft.tensor.parts import Part


def peft_adapter(
    start: Callable[[str, Part], torch.Tensor],
    *,
    masks: Callable[[str], Callable[[torch.Tensor], torch.Tensor]] | None = None,
    frozen: str | None = None,
    named: Callable[[str], str] = str,
    **lora: Any,
) -> Callable[[Any], dict[str, torch.nn.Parameter]]:
    """What `reference` prepares a model with: an adapter whose weights begin as start(name, part).

    masks: by a module's name what takes the place of its dropout; frozen: an expression for names
    of the adapter's weights that stay as they begin; named: gives peft's names as ours.
    """
    from peft import LoraConfig, get_peft_model

    def prepare(net: Any) -> dict[str, torch.nn.Parameter]:
        model = get_peft_model(net, LoraConfig(task_type="CAUSAL_LM", **lora))
        trained = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                plain = named(name.removeprefix("base_model.model.").replace(".default", ""))
                parameter.data = start(plain, Part.whole(parameter.shape))
                if frozen and re.search(frozen, plain):
                    parameter.requires_grad_(False)
                else:
                    trained[plain] = parameter
        for name, module in net.named_modules():
            if masks and name.endswith("lora_dropout"):
                module["default"] = _Masked(masks(name.removesuffix(".lora_dropout")))
        return trained

    return prepare


def compute_in(net: Any, dtype: torch.dtype) -> None:
    """An adapter's weights, whatever type they are held in, are cast to this one where they are
    used."""

    class Cast(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.to(dtype)

    sides = ("lora_A.default", "lora_B.default")
    thin = [module for name, module in net.named_modules() if name.endswith(sides)]
    assert thin
    for module in thin:
        register_parametrization(module, "weight", Cast(), unsafe=True)


class _Masked(torch.nn.Module):
    def __init__(self, apply: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._apply_mask = apply

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._apply_mask(x)


def rounded(value: torch.Tensor) -> torch.Tensor:
    return value.bfloat16().float()


def as_answer(alone: Reference) -> Any:
    """A reference as a run's records and end."""
    pairs = zip(alone.losses, alone.grad_norms, strict=True)
    return [{"loss": loss, "grad_norm": norm} for loss, norm in pairs], alone.end


def base_weights(folder: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return {name: value.detach() for name, value in net.named_parameters()}

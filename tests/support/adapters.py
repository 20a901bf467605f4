"""LoRA of plain peft on plain transformers, started from given weights."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.parametrize import register_parametrization


def peft_adapter(
    start: Callable[[str, torch.Size], torch.Tensor],
    *,
    masks: Callable[[str], Callable[[torch.Tensor], torch.Tensor]] | None = None,
    frozen: str | None = None,
    **lora: Any,
) -> Callable[[Any], dict[str, torch.nn.Parameter]]:
    """What `reference` prepares a model with: an adapter whose weights begin as start(name, shape).

    masks: by a module's name what takes the place of its dropout; frozen: an expression for names
    of the adapter's weights that stay as they begin.
    """
    from peft import LoraConfig, get_peft_model

    def prepare(net: Any) -> dict[str, torch.nn.Parameter]:
        model = get_peft_model(net, LoraConfig(task_type="CAUSAL_LM", **lora))
        trained = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                plain = name.removeprefix("base_model.model.").replace(".default", "")
                parameter.data = start(plain, parameter.shape)
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


def written_out_mask(p: float, seed: int, name: str, tokens: list[int], width: int) -> torch.Tensor:
    """The factors that dropout multiplies with, [tokens, width]: its definition in unsigned words
    of numpy, which wrap by themselves."""
    digest = hashlib.blake2b(f"dropout:{seed}:{name}".encode(), digest_size=8).digest()
    token_key, column_key = np.frombuffer(digest, "<u4")

    def mix(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
        for shift, factor in ((16, 0x21F0AAAD), (15, 0xD35A2D97)):
            x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
        return x ^ (x >> np.uint32(15))

    low = np.array([token & 0xFFFFFFFF for token in tokens], np.uint32)
    high = np.array([token >> 32 for token in tokens], np.uint32)
    rows = mix(mix(low ^ token_key) ^ high)
    draws = mix(rows[:, None] ^ mix(np.arange(width, dtype=np.uint32) ^ column_key))
    return torch.from_numpy((draws >= np.uint32(round(p * 2**32))) / (1 - p)).float()


def document_tokens(rows: list[list[Any]], row_tokens: int) -> Iterator[list[int]]:
    """The numbers of each document's tokens; rows: the documents of each row of a stream."""
    for index, documents in enumerate(rows):
        first = index * row_tokens
        for ids, _ in documents:
            yield list(range(first, first + len(ids)))
            first += len(ids)

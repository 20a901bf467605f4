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

from uspft.parameters.shards import Part


def peft_adapter(
    start: Callable[[str, Part], torch.Tensor],
    *,
    masks: Callable[[str], Callable[[torch.Tensor], torch.Tensor]] | None = None,
    frozen: str | None = None,
    **lora: Any,
) -> Callable[[Any], dict[str, torch.nn.Parameter]]:
    """What `reference` prepares a model with: an adapter whose weights begin as start(name, part).

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


def written_out_mask(p: float, seed: int, name: str, tokens: list[int], width: int) -> torch.Tensor:
    """The factors that dropout multiplies with, [tokens, width]: its definition in unsigned words
    of numpy, which wrap by themselves."""
    digest = hashlib.blake2b(f"dropout:{seed}:{name}".encode(), digest_size=8).digest()
    (key,) = np.frombuffer(digest, "<u8")
    half, factor = np.uint64(32), np.uint64(0xD6E8FEB86659FD93)

    def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        for _ in range(3):
            x = x * factor
            x = x ^ (x >> half)
        return x | np.uint64(1)

    rows = mix(np.array([2**64 - 1 - token for token in tokens], np.uint64))
    fours = mix(np.arange(-(-width // 4), dtype=np.uint64) ^ key)
    words = rows[:, None] * fours
    words = (words ^ (words >> half)) * factor
    words = words ^ (words >> half)
    # The lowest 16 bits of a word first, each as a signed number.
    fields = np.stack([words >> np.uint64(16 * i) & np.uint64(0xFFFF) for i in range(4)], -1)
    draws = (fields.astype(np.int64) ^ 0x8000).reshape(len(tokens), -1)[:, :width]
    level = round(p * 2**16)
    return torch.from_numpy((draws >= level) / (1 - level / 2**16)).float()


def document_tokens(rows: list[list[Any]], row_tokens: int) -> Iterator[list[int]]:
    """The numbers of each document's tokens; rows: the documents of each row of a stream."""
    for index, documents in enumerate(rows):
        first = index * row_tokens
        for ids, _ in documents:
            yield list(range(first, first + len(ids)))
            first += len(ids)

"""Where a parameter's values come from: safetensors files, or the seed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from torch import Tensor, nn


class WeightsError(Exception):
    """A model's files lack a parameter, or hold one of another shape."""


class Weights(Protocol):
    """Values of parameters by their Hugging Face name."""

    def read(self, name: str, shape: torch.Size) -> Tensor:
        """The whole tensor on CPU. Raises WeightsError where there is none of that shape."""
        ...


class FolderWeights:
    """A Hugging Face folder: model.safetensors, or shards with model.safetensors.index.json."""

    def __init__(self, folder: Path) -> None:
        index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
        self._folder = folder
        if index.exists():
            files: dict[str, str] = json.loads(index.read_text())["weight_map"]
        elif single.exists():
            with safe_open(single, "pt") as tensors:
                files = dict.fromkeys(tensors.keys(), single.name)
        else:
            raise WeightsError(
                f"{folder} holds no model.safetensors; save the model with "
                "save_pretrained (safetensors), or write model.config for random weights"
            )
        self._files = files

    def read(self, name: str, shape: torch.Size) -> Tensor:
        if name not in self._files:
            raise WeightsError(f"{self._folder} holds no parameter {name}")
        path = self._folder / self._files[name]
        try:
            with safe_open(path, "pt") as tensors:
                value: Tensor = tensors.get_tensor(name)
        except Exception as error:
            raise WeightsError(f"{path}: cannot read {name}: {error}") from error
        if value.shape != shape:
            raise WeightsError(
                f"{path}: {name} is {tuple(value.shape)}, the model's config says {tuple(shape)}"
            )
        return value


class RandomWeights:
    """Random weights as a function of the seed and each parameter's name alone.

    As transformers initialises LLaMA and Qwen: projections and embeddings normal(0,
    initializer_range), the padding token's embedding 0, norms 1, biases 0.
    """

    def __init__(self, model: nn.Module, seed: int, std: float) -> None:
        self._modules = dict(model.named_modules())
        self._seed, self._std = seed, std

    def read(self, name: str, shape: torch.Size) -> Tensor:
        owner, _, kind = name.rpartition(".")
        module = self._modules[owner]
        if kind == "bias":
            return torch.zeros(shape)
        if isinstance(module, nn.Linear | nn.Embedding):
            digest = hashlib.blake2b(f"{self._seed}:{name}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
            value = torch.empty(shape).normal_(0.0, self._std, generator=generator)
            padding = getattr(module, "padding_idx", None)
            if padding is not None:
                value[padding] = 0.0
            return value
        if len(shape) == 1 and "norm" in type(module).__name__.lower():
            return torch.ones(shape)
        raise WeightsError(f"no rule to initialise {name} of {type(module).__name__}")

"""Where a parameter's values come from: safetensors files, or the seed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from pathlib import Path
from typing import Protocol

import torch
from safetensors import safe_open
from torch import Tensor, nn

from uspft.config.families import FAMILIES
from uspft.config.problems import InputError, said
from uspft.model.experts import find, fused_shapes, is_experts, is_router
from uspft.model.names import plain_name


class WeightsError(InputError):
    """A model's files lack a parameter, or hold one of another shape."""

    def __init__(self, what: str, remedy: str) -> None:
        self.findings = [("model.name_or_path", what, remedy)]
        super().__init__(f"{what}; {remedy}")


_AGAIN = "save weights and config.json together, with save_pretrained"


class Weights(Protocol):
    """Values of parameters by their Hugging Face name."""

    def read(self, name: str, shape: torch.Size) -> Tensor:
        """The whole tensor on CPU. Raises WeightsError where there is none of that shape."""
        ...


class FolderWeights:
    """A Hugging Face folder: model.safetensors, or shards with model.safetensors.index.json.

    Raises WeightsError where the folder has neither, or one that cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = _file_of_each(folder)

    def read(self, name: str, shape: torch.Size) -> Tensor:
        stored = find(name, self._files)
        if stored is None:
            raise WeightsError(f"{self._folder} holds no parameter {name}", _AGAIN)
        held: dict[str, Tensor] = {}
        for file in sorted({self._files[part] for part in stored.parts}):
            path = self._folder / file
            try:
                with safe_open(path, "pt") as tensors:
                    mine = [part for part in stored.parts if self._files[part] == file]
                    held |= {part: tensors.get_tensor(part) for part in mine}
            except Exception as error:
                raise _unreadable(path, error) from error
        value = stored.join([held[part] for part in stored.parts])
        if value.shape != shape:
            what = f"{path}: {name} is {tuple(value.shape)}, the config says {tuple(shape)}"
            raise WeightsError(what, _AGAIN)
        return value

    @property
    def files(self) -> list[Path]:
        return [self._folder / file for file in sorted(set(self._files.values()))]

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name → shape of every tensor, experts fused, from the files' headers alone. Raises
        WeightsError."""
        found: dict[str, tuple[int, ...]] = {}
        for path in self.files:
            try:
                with safe_open(path, "pt") as tensors:
                    names = tensors.keys()
                    found |= {name: tuple(tensors.get_slice(name).get_shape()) for name in names}
            except Exception as error:  # safetensors has several kinds, none of them exported
                raise _unreadable(path, error) from error
        return fused_shapes(found)


def _file_of_each(folder: Path) -> dict[str, str]:
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        try:
            return {str(k): str(v) for k, v in json.loads(index.read_text())["weight_map"].items()}
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise _unreadable(index, error) from error
    if not single.exists():
        remedy = "save the model with save_pretrained, or write model.config for random weights"
        raise WeightsError(f"{folder} holds no model.safetensors", remedy)
    try:
        with safe_open(single, "pt") as tensors:
            return dict.fromkeys(tensors.keys(), single.name)
    except Exception as error:
        raise _unreadable(single, error) from error


def _unreadable(path: Path, error: Exception) -> WeightsError:
    return WeightsError(f"{path} cannot be read: {said(error)}", "copy or download it again")


def generator(seed: int, name: str) -> torch.Generator:
    """Draws that are a function of the seed and a parameter's name alone."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)


class RandomWeights:
    """Random weights as a function of the seed and each parameter's name alone.

    As transformers initialises them: projections, embeddings, experts and their routers normal(0,
    initializer_range), attention's sinks and a router's bias too, the padding token's embedding 0,
    norms 1 (0 where 1 is added to them), other biases 0.
    """

    def __init__(self, model: nn.Module, seed: int, std: float) -> None:
        # Of a projection and its adapter's wrapper, which share a name, the projection comes last.
        self._modules = {plain_name(name): module for name, module in model.named_modules()}
        self._seed, self._std = seed, std
        kind = getattr(getattr(model, "config", None), "model_type", None)
        self._norm = FAMILIES[kind].norm_start if kind in FAMILIES else 1.0

    def read(self, name: str, shape: torch.Size) -> Tensor:
        owner, _, kind = name.rpartition(".")
        module = self._modules[owner]
        routes = is_router(module)
        if kind.endswith("bias") and not routes:
            return torch.zeros(shape)
        projects = isinstance(module, nn.Linear | nn.Embedding)
        if projects or routes or kind == "sinks" or is_experts(name):
            source = generator(self._seed, name)
            value = torch.empty(shape).normal_(0.0, self._std, generator=source)
            padding = getattr(module, "padding_idx", None)
            if padding is not None:
                value[padding] = 0.0
            return value
        if len(shape) == 1 and "norm" in type(module).__name__.lower():
            return torch.full(shape, self._norm)
        what = f"no rule to initialise {name} of {type(module).__name__}"
        raise WeightsError(what, "name a folder with weights")


class SplitWeights:
    """What trains from one source, what is frozen from another."""

    def __init__(self, trained: Collection[str], source: Weights, rest: Weights) -> None:
        self._trained, self._source, self._rest = trained, source, rest

    def read(self, name: str, shape: torch.Size) -> Tensor:
        source = self._source if name in self._trained else self._rest
        return source.read(name, shape)

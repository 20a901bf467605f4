"""The source of a model's weights when it is built (a checkpoint for what trains, the base for the
rest), and the whole model of a run or a checkpoint, as an export reads it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from uspft.checkpoint.folder import Checkpoint, CheckpointError
from uspft.checkpoint.identity import BASE
from uspft.config import ModelBlock
from uspft.config.problems import InputError, said
from uspft.families.multimodal import is_multimodal
from uspft.model.adapter import AdapterStart, adapter_of, merge_order, merged, touched
from uspft.model.build import choose_trained, empty_model, trained_parameters
from uspft.model.fetch import fetch_model
from uspft.model.hf_config import language_config
from uspft.parameters.experts import corrections
from uspft.parameters.fill import RandomWeights, SplitWeights
from uspft.parameters.names import is_adapter, places
from uspft.parameters.source import FolderWeights, GrownWeights, Weights, base_digest, table_names
from uspft.tensor.parts import Part

WeightsOf = Callable[[ModelBlock, int, Any, Checkpoint | None], Weights]
"""The type of `weights_of` and its replacements."""


class CheckpointWeights:
    """A checkpoint as the source of a model's weights."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def draws(self, name: str) -> bool:
        return False

    def read(self, name: str, part: Part) -> Tensor:
        return self._checkpoint.read("weight", name, part)


def weights_of(
    block: ModelBlock, seed: int, model: Any, checkpoint: Checkpoint | None = None
) -> Weights:
    """Return the source of weights for a model on the meta device, after `choose_trained` has
    marked it.

    checkpoint: the source of what trains, if any; frozen parameters, and the routers' untrained
    bias, come from before the first step. Raises WeightsError.
    """
    if checkpoint is None:
        return _start(block, seed, model)
    held = CheckpointWeights(checkpoint)
    if all(one.requires_grad for one in model.parameters()) and not corrections(model):
        return held
    return SplitWeights(trained_parameters(model), held, _start(block, seed, model))


def multimodal_base(block: ModelBlock) -> FolderWeights | None:
    """Return the multimodal checkpoint if a run trains only its language model; None where the run
    trains a whole model.

    block: with folders in place of hub ids. Raises WeightsError.
    """
    folder = Path(block.name_or_path or "")
    if block.config is not None:
        return None
    raw = json.loads((folder / "config.json").read_text("utf-8"))
    return FolderWeights(folder) if is_multimodal(raw) else None


def _start(block: ModelBlock, seed: int, model: Any) -> Weights:
    """Return the source of the weights before the first step."""
    base: Weights
    if block.config is not None:
        config = model.config
        std = getattr(config, "initializer_range", math.sqrt(1 / config.hidden_size))
        base = RandomWeights(model, seed, std)
    else:
        folder = FolderWeights(Path(block.name_or_path or ""))
        base = GrownWeights(folder, table_names(model)) if block.add_tokens else folder
    return AdapterStart(base, seed) if block.adapter else base


@dataclass(frozen=True)
class WholeModel:
    """Every parameter of a trained model, each read on demand."""

    names: Collection[str]
    read: Callable[[str], Tensor]
    block: ModelBlock
    """The `model` block of the run's recipe, with the present location of the base model."""
    dtype: torch.dtype
    model_type: str
    base: FolderWeights | None = None
    """The multimodal checkpoint, if the model is its language model."""

    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the model's own parameters one at a time; for a multimodal checkpoint only those
        that the run may have changed."""
        return merged(self.names, self.read, self.block.adapter, self.model_type)

    def adapter(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the adapter's parameters one at a time."""
        return adapter_of(self.names, self.read)


def export_order(names: Collection[str], *, model: bool) -> list[str]:
    """Return the names in the order in which an export reads them, an adapter's twice: for its own
    folder, and for merging. model: whether the whole model is exported too."""
    own = filter(is_adapter, names)
    return [*own, *chain(*merge_order(names))] if model else list(own)


def whole_model(checkpoint: Checkpoint, base: str | None = None) -> WholeModel:
    """Return the whole model of a checkpoint, with frozen parameters from the base model.

    base: the base model's present location, if it has moved. Raises CheckpointError where it cannot
    be read, is another model, or is given but not needed; Fault.
    """
    config, raw = _config(checkpoint.model)
    identity = checkpoint.state["identity"]
    fields = {key: value for key, value in identity.items() if key.startswith("model.")}
    said = ModelBlock.model_validate({key.removeprefix("model."): v for key, v in fields.items()})
    dtype = getattr(torch, said.dtype)
    if not (said.adapter or said.freeze or is_multimodal(raw)):  # all of it was trained
        if base:
            what = f"{checkpoint.folder} holds the whole model"
            raise CheckpointError(f"command line: base: {what}, and needs no other; leave it out")
        read_own = partial(checkpoint.tensor, "weight")
        return WholeModel(checkpoint.names, read_own, said, dtype, config.model_type)
    if base:
        said = said.changed(**{"config" if said.config else "name_or_path": base})
    block = _base(said, identity[BASE], given=base is not None)
    seed = identity["seed"]
    model = empty_model(config, dtype)
    choose_trained(model, block, seed)
    weights = weights_of(block, seed, model, checkpoint)
    found = places(model)

    def read(name: str) -> Tensor:
        parameter, _ = found[name]
        value = weights.read(name, Part.whole(parameter.shape))
        return value if parameter.requires_grad else value.to(dtype).float()

    if (files := multimodal_base(block)) is None:
        return WholeModel(found, read, said, dtype, config.model_type)
    names = touched(found, trained_parameters(model))
    return WholeModel(names, read, said, dtype, config.model_type, files)


def _config(folder: Path) -> tuple[Any, dict[str, Any]]:
    """Read a checkpoint's config.json: the config of the language model, and the file's own fields.
    Raises CheckpointError."""
    try:
        return language_config(folder), json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError, LookupError) as error:
        raise CheckpointError(
            f"{folder} holds no config that can be read: {said(error)}"
        ) from error


def _base(said: ModelBlock, digest: str, *, given: bool) -> ModelBlock:
    """Return the block with the base model in a folder of this host, and without a tokenizer.

    digest: of the expected model. given: whether the command line named it. Raises CheckpointError.
    """
    place = "model.config" if isinstance(said.config, dict) else said.config or said.name_or_path
    try:
        block = said.changed(tokenizer=None)
        block = block.changed(**fetch_model(block))
        if base_digest(block) == digest:
            return block
        what = f"`{place}` is not the model that was trained on"
    except OSError as error:
        what = f"`{place}` cannot be read: {error.strerror}"
    except InputError as error:
        what = "; ".join(what for _, what, _ in error.findings) or str(error)
    if given:
        remedy = "name that model's folder, or its org/name of the hub"
    else:
        what = f"is needed, since the run's base model is not where it was: {what}"
        remedy = "put it back, or write base=FOLDER, where it is now"
    raise CheckpointError(f"command line: base: {what}; {remedy}")

"""The export to a Hugging Face folder: safetensors shards with an index, config and tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from uspft.checkpoint.model_card import ADAPTER_CARD
from uspft.durable import publish, save_tensors, start_partial
from uspft.families.multimodal import language_model
from uspft.parameters.experts import as_files, corrections
from uspft.parameters.source import FolderWeights

SHARD_BYTES = 5 * 10**9
CORRECTIONS = "corrections.safetensors"
"""The file beside a checkpoint's config with what corrects routers' choices, in float32, as an
export names it; it trains no more than the config does."""
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""The embedding, and the head that files may hold too where it is tied to it."""


def keep_corrections(folder: Path, model: nn.Module, config: Any) -> None:
    """Write what corrects a model's routers beside its config, where there is any. Raises
    OSError."""
    raw = {"model_type": config.model_type}
    every = [as_files(name, one, raw) for name, one in corrections(model).items()]
    if every:
        held = {name: _held(value, torch.float32) for name, value in chain(*every)}
        save_tensors(held, folder / CORRECTIONS, {"format": "pt"})


def export_folder(
    tensors: Iterator[tuple[str, Tensor]],
    dtype: torch.dtype,
    describe: Callable[[Path], object],
    target: Path,
    base: FolderWeights | None = None,
) -> Path:
    """Write parameters in dtype, with what from_pretrained needs beside them; return the folder.

    tensors: names and whole values, one at a time; only a shard is held in memory. describe: writes
    config and tokenizer into the folder; the config says how files name experts. target: a new
    name or an empty folder; it is complete or absent afterwards. base: the multimodal checkpoint
    whose language model the parameters are, and of which all else is written bit for bit. Raises
    OSError, and WeightsError where the base cannot be read.
    """
    aside = start_partial(target)
    describe(aside)
    (aside / ADAPTER_CARD).unlink(missing_ok=True)
    config = json.loads((aside / "config.json").read_text())
    named = _beside(tensors, dtype, base, config) if base else _alone(tensors, dtype, config)
    shards: list[dict[str, int]] = []
    held: dict[str, Tensor] = {}
    if (untrained := aside / CORRECTIONS).exists():
        held = load_file(untrained)
        untrained.unlink()
    held_bytes = sum(value.numel() * value.element_size() for value in held.values())
    for name, value in named:
        size = value.numel() * value.element_size()
        if held and held_bytes + size > SHARD_BYTES:
            shards.append(_write(held, aside, len(shards)))
            held, held_bytes = {}, 0
        held[name] = value
        held_bytes += size
    shards.append(_write(held, aside, len(shards)))
    _name_shards(aside, shards)
    publish(aside, target)
    return target


def _alone(
    tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, config: dict[str, Any]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a model's files."""
    for pair in tensors:
        for name, value in as_files(*pair, config):
            yield name, _held(value, dtype)


def _beside(
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    base: FolderWeights,
    config: dict[str, Any],
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a multimodal checkpoint, under the names that its files have.

    A trained tensor that has another type there than the embedding, as gates may, keeps it.
    """
    text, written, types = language_model(config), set[str](), base.dtypes()
    ((table, _),) = base.as_stored(TABLE, torch.empty(0))
    for name, value in tensors:
        copies = [name, HEAD] if text["tie_word_embeddings"] and name == TABLE else [name]
        for stored, part in chain.from_iterable(
            base.as_stored(one, value) for one in copies if one == name or base.holds(one)
        ):
            written.add(stored)
            own = types[stored]
            yield stored, _held(part, dtype if own == types[table] else own)
    yield from base.others(written, text["num_hidden_layers"])


def _held(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to("cpu", dtype).contiguous().clone()


def _write(held: dict[str, Tensor], folder: Path, number: int) -> dict[str, int]:
    save_tensors(held, folder / f"shard-{number}", {"format": "pt"})
    return {name: value.numel() * value.element_size() for name, value in held.items()}


def _name_shards(folder: Path, shards: list[dict[str, int]]) -> None:
    if len(shards) == 1:
        (folder / "shard-0").rename(folder / "model.safetensors")
        return
    where: dict[str, str] = {}
    for number, sizes in enumerate(shards):
        name = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"shard-{number}").rename(folder / name)
        where |= dict.fromkeys(sizes, name)
    total = sum(size for sizes in shards for size in sizes.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")

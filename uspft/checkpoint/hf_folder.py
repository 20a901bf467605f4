"""The export to a Hugging Face folder: safetensors shards with an index, config and tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from uspft.checkpoint.model_card import ADAPTER_CARD
from uspft.durable import publish, save_tensors, start_partial
from uspft.parameters.experts import as_files

SHARD_BYTES = 5 * 10**9


def export_folder(
    tensors: Iterator[tuple[str, Tensor]],
    dtype: torch.dtype,
    describe: Callable[[Path], object],
    target: Path,
) -> Path:
    """Write parameters in dtype, with what from_pretrained needs beside them; return the folder.

    tensors: names and whole values, one at a time; only a shard is held in memory. describe: writes
    config and tokenizer into the folder; the config says how files name experts. target: a new
    name or an empty folder; it is complete or absent afterwards. Raises OSError.
    """
    aside = start_partial(target)
    describe(aside)
    (aside / ADAPTER_CARD).unlink(missing_ok=True)
    kind = json.loads((aside / "config.json").read_text())["model_type"]
    shards: list[dict[str, int]] = []
    held: dict[str, Tensor] = {}
    held_bytes = 0
    for name, value in chain.from_iterable(as_files(*pair, kind) for pair in tensors):
        size = value.numel() * dtype.itemsize
        if held and held_bytes + size > SHARD_BYTES:
            shards.append(_write(held, aside, len(shards)))
            held, held_bytes = {}, 0
        held[name] = value.to("cpu", dtype).contiguous().clone()
        held_bytes += size
    shards.append(_write(held, aside, len(shards)))
    _name_shards(aside, shards)
    publish(aside, target)
    return target


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

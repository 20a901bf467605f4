"""Whether a base model is the one that an adapter was trained on, without reading all of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from uspft.parameters.source import FolderWeights

if TYPE_CHECKING:
    from uspft.config.recipe import ModelBlock

PIECE = 64
"""Bytes looked at in the middle of every tensor: training changes them all."""


def base_digest(block: ModelBlock) -> str:
    """A digest of config.json, of every tensor's name, type and shape, and of a piece of each.

    Of the config alone where weights are random. Raises WeightsError.
    """
    source = Path(block.config or block.name_or_path or "")
    file = source / "config.json" if source.is_dir() else source
    digest = hashlib.blake2b(file.read_bytes(), digest_size=16)
    if block.config is None:
        for name, what in sorted(_tensors(source)):
            digest.update(name.encode() + what)
    return digest.hexdigest()


def _tensors(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Of each tensor in a folder's safetensors files the name, and what is looked at."""
    for path in FolderWeights(folder).files:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            for name, entry in json.loads(file.read(length)).items():
                if name == "__metadata__":
                    continue
                first, stop = entry["data_offsets"]
                middle = max(first, (first + stop - PIECE) // 2)
                file.seek(8 + length + middle)
                shape = json.dumps([entry["dtype"], entry["shape"]]).encode()
                yield name, shape + file.read(min(PIECE, stop - middle))

"""A digest that tells whether a base model is the one trained on, without reading all of it."""

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
"""How many bytes in the middle of every tensor are looked at: training changes every tensor."""


def base_digest(block: ModelBlock) -> str:
    """Return a digest of config.json, every tensor's name, type and shape, and a piece of each.

    Where weights are random, it is of the config alone. Raises WeightsError, OSError.
    """
    if isinstance(block.config, dict):
        text = json.dumps(block.config, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    source = Path(block.config or block.name_or_path or "")
    file = source / "config.json" if source.is_dir() else source
    digest = hashlib.blake2b(file.read_bytes(), digest_size=16)
    if block.config is None:
        for name, what in sorted(_tensors(source)):
            digest.update(name.encode() + what)
    return digest.hexdigest()


def _tensors(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Yield each tensor's name in a folder's safetensors files, and the bytes to digest of it."""
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

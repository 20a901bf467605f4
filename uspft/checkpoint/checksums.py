"""Checksums of a checkpoint's files: computed while they are written, and compared before they are
read.

The checksum is 64-bit xxh3, four times as fast here as zlib's CRC-32 (benchmarks/saving): it
detects flipped bits, but not deliberate changes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import xxhash

from uspft.durable import sync

if TYPE_CHECKING:
    from torch import Tensor

CHUNK_BYTES = 1 << 20
"""How many bytes are read and hashed at a time, while they are in the cache."""
READERS = 8
"""How many files are read at a time: a disk is faster with several requests."""
SEAL = '{{"checksum": "{}", '
"""The beginning of a sealed JSON object: the checksum of everything after it in the file."""


class Written(NamedTuple):
    """A written file's length, and the checksum of the data that should be in it."""

    size: int
    checksum: str


def write_part(tensors: Mapping[str, Tensor], path: Path) -> Written:
    """Write a safetensors file of contiguous float32 tensors on CPU and flush it to the disk.

    The bytes equal those of safetensors' `save_file`, which returns no checksum. Raises OSError.
    """
    import torch

    header: dict[str, Any] = {}
    at = 0
    for name in sorted(tensors):
        value = tensors[name]
        stop = at + 4 * value.numel()
        header[name] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": [at, stop]}
        at = stop
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    data = [tensors[name].view(-1).view(torch.uint8).numpy().data for name in header]
    pieces: list[bytes | memoryview] = [len(text).to_bytes(8, "little") + text, *data]
    with ThreadPoolExecutor(1) as beside:  # hashing and writing both release the GIL
        summed = beside.submit(sum_of, pieces)
        with path.open("wb") as file:
            size = sum(map(file.write, pieces))
        sync(path)
        return Written(size, summed.result())


def sum_of(pieces: Iterable[bytes | memoryview]) -> str:
    """Return the checksum of the concatenation of pieces."""
    checksum = xxhash.xxh3_64()
    for piece in pieces:
        checksum.update(piece)
    return checksum.hexdigest()


def checksum_of(path: Path) -> str:
    """Return the checksum of a file's present contents. Raises OSError."""
    checksum = xxhash.xxh3_64()
    with path.open("rb", buffering=0) as file:
        while data := file.read(CHUNK_BYTES):
            checksum.update(data)
    return checksum.hexdigest()


def checksums_of(files: Iterable[Path]) -> list[str | OSError]:
    """Return the checksum of each file, or the error of one that cannot be read."""

    def found(file: Path) -> str | OSError:
        try:
            return checksum_of(file)
        except OSError as error:
            return error

    with ThreadPoolExecutor(READERS) as pool:
        return list(pool.map(found, files))


def sealed(tree: Mapping[str, Any]) -> str:
    """Return a JSON object that begins with the checksum of the rest of it."""
    rest = json.dumps(tree)[1:]
    return SEAL.format(xxhash.xxh3_64_hexdigest(rest.encode())) + rest


def is_sealed(text: bytes) -> bool:
    """Tell whether a JSON object begins with the checksum of the rest of it."""
    start = len(SEAL.format(xxhash.xxh3_64_hexdigest(b"")))
    rest = text[start:]
    return text[:start] == SEAL.format(xxhash.xxh3_64_hexdigest(rest)).encode()

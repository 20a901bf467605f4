"""Checksums of a checkpoint's files: computed beside their writing, compared before they are read.

The checksum is xxh3 of 64 bits, four times as fast here as zlib's CRC-32
(benchmarks/saving): it guards against flipped bits, and not against those who mean harm.
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
"""How much is read and then summed, while it is in the cache."""
READERS = 8
"""How many files are read at one time: a disk answers several sooner than one after another."""
SEAL = '{{"checksum": "{}", '
"""The beginning of a sealed JSON object: the checksum of all that follows it in the file."""


class Written(NamedTuple):
    """A file on the disk: its length, and the checksum of what was given to be written."""

    size: int
    checksum: str


def write_part(tensors: Mapping[str, Tensor], path: Path) -> Written:
    """Write a safetensors file of contiguous float32 tensors on CPU and bring it to the disk.

    The bytes are those of safetensors' `save_file`, which tells no checksum. Raises OSError.
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
    with ThreadPoolExecutor(1) as beside:  # neither summing nor writing holds the interpreter
        summed = beside.submit(sum_of, pieces)
        with path.open("wb") as file:
            size = sum(map(file.write, pieces))
        sync(path)
        return Written(size, summed.result())


def sum_of(pieces: Iterable[bytes | memoryview]) -> str:
    """Return the checksum of pieces laid end to end."""
    checksum = xxhash.xxh3_64()
    for piece in pieces:
        checksum.update(piece)
    return checksum.hexdigest()


def checksum_of(path: Path) -> str:
    """Return the checksum of a file as it is read now. Raises OSError."""
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

"""What the checksums of a checkpoint's files add to the time of writing them."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import xxhash
from safetensors.torch import save_file
from torch import Tensor

from uspft.checkpoint import checksums
from uspft.checkpoint.checksums import CHUNK_BYTES, write_part
from uspft.checkpoint.save import PART_BYTES
from uspft.durable import sync

TENSOR_BYTES = 1 << 26
MOST_COST = 0.05
"""The largest share of a save's time that its checksums may take."""


def measured(gigabytes: float, rounds: int, folder: Path) -> dict[str, Any]:
    """Return the seconds of a rank's files with checksums, without them and by safetensors alone,
    in turn, and the CPU seconds of the checksums of the same bytes alone, by xxh3 and by CRC-32:
    medians of rounds. cost: the median of what each round's checksums add, a share of the save."""
    files = _files(gigabytes)
    names = {number: folder / f"part-{number}" for number in range(len(files))}

    def ours() -> None:
        for number, tensors in enumerate(files):
            write_part(tensors, names[number])

    def unsummed() -> None:
        with patch.object(checksums, "sum_of", lambda pieces: ""):
            ours()

    def theirs() -> None:
        for number, tensors in enumerate(files):
            save_file(tensors, names[number])
            sync(names[number])

    def summed() -> None:
        checksum = xxhash.xxh3_64()
        for chunk in _chunks(files):
            checksum.update(chunk)

    def crc() -> None:
        checksum = 0
        for chunk in _chunks(files):
            checksum = zlib.crc32(chunk, checksum)

    turns = {
        "save_seconds": (ours, time.perf_counter),
        "unsummed_seconds": (unsummed, time.perf_counter),
        "safetensors_seconds": (theirs, time.perf_counter),
        "xxh3_seconds": (summed, time.process_time),
        "crc32_seconds": (crc, time.process_time),
    }
    found: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(rounds):
        for name, (run, clock) in turns.items():
            for file in names.values():
                file.unlink(missing_ok=True)
            began = clock()
            run()
            found[name].append(clock() - began)
    for file in names.values():
        file.unlink(missing_ok=True)
    middle = {name: median(each) for name, each in found.items()}
    size = sum(4 * value.numel() for tensors in files for value in tensors.values())
    pairs = zip(found["save_seconds"], found["unsummed_seconds"], strict=True)
    cost = median(save / without - 1 for save, without in pairs)
    return {"bytes": size, "rounds": rounds, **middle, "cost": cost}


def _files(gigabytes: float) -> list[dict[str, Tensor]]:
    """Return what a rank writes as files of PART_BYTES each, random."""
    count = max(1, round(gigabytes * 1e9 / TENSOR_BYTES))
    each = PART_BYTES // TENSOR_BYTES
    tensors = {f"weight/{n:03d}": torch.randn(TENSOR_BYTES // 4) for n in range(count)}
    pairs = list(tensors.items())
    return [dict(pairs[start : start + each]) for start in range(0, count, each)]


def _chunks(files: list[dict[str, Tensor]]) -> Iterator[memoryview]:
    for tensors in files:
        yield from _of(tensors)


def _of(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    for value in tensors.values():
        data = value.view(torch.uint8).numpy().data
        for start in range(0, len(data), CHUNK_BYTES):
            yield data[start : start + CHUNK_BYTES]

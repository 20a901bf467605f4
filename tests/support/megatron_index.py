"""Megatron's indexed data as its published layout says, byte by byte, without numpy."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

CODES = {"B": 1, "b": 2, "h": 3, "i": 4, "q": 5, "d": 6, "f": 7, "H": 8}
"""By struct's letter of a token, the number of its dtype in the index."""


def written(prefix: Path, documents: Sequence[Sequence[Sequence[int]]], letter: str = "H") -> Path:
    """PREFIX.idx and PREFIX.bin of documents, each some sequences of ids; returns the index."""
    sequences = [sequence for document in documents for sequence in document]
    data, lengths, pointers, bounds = b"", [], [], [0]
    for sequence in sequences:
        pointers.append(len(data))
        lengths.append(len(sequence))
        data += struct.pack(f"<{len(sequence)}{letter}", *sequence)
    for document in documents:
        bounds.append(bounds[-1] + len(document))
    index = b"MMIDIDX\x00\x00"
    index += struct.pack("<Q", 1)
    index += struct.pack("<B", CODES[letter])
    index += struct.pack("<Q", len(lengths))
    index += struct.pack("<Q", len(bounds))
    index += struct.pack(f"<{len(lengths)}i", *lengths)
    index += struct.pack(f"<{len(pointers)}q", *pointers)
    index += struct.pack(f"<{len(bounds)}q", *bounds)
    prefix.with_name(f"{prefix.name}.bin").write_bytes(data)
    to = prefix.with_name(f"{prefix.name}.idx")
    to.write_bytes(index)
    return to

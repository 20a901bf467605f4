"""Megatron-LM's indexed data: the token ids of documents in PREFIX.bin, found by PREFIX.idx.

Little-endian, version 1: the magic, the version (uint64), the dtype of tokens (uint8), how many
sequences and how many bounds of documents there are (uint64 each); then of each sequence its tokens
(int32) and its first byte in PREFIX.bin (int64), and the bounds of documents in sequences (int64).
Source: Megatron-LM, megatron/core/datasets/indexed_dataset.py.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from uspft.data.faults import BadRecord, SampleFault, place
from uspft.data.samples import Entry

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from uspft.data.files.sources import SourceFile

MAGIC, OLDER = b"MMIDIDX\0\0", b"TNTIDX\0\0"
_HEAD = struct.Struct("<9sQBQQ")
DTYPES: dict[int, type[np.integer[Any]]] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    8: np.uint16,
}
"""The dtypes of tokens by their codes; 6 and 7 are floating-point types."""
_FLOATS = (6, 7)
_AT_ONCE = 1 << 20
"""Sequences that are checked at a time."""
_AGAIN = "copy it again, or make it again with preprocess_data.py"


def documents(file: SourceFile) -> Iterator[Entry | BadRecord]:
    """Yield the documents of an index in order, each of one or more whole sequences, and split
    after each `eod` token if the file has one.

    The place of a document is its number in the index, with the number of the part if it was split.
    Raises SampleFault, and OSError.
    """
    tokens, lengths, pointers, bounds = _opened(file.path)
    width = tokens.dtype.itemsize
    for number in range(len(bounds) - 1):
        first, stop = bounds[number : number + 2].tolist()
        ids = np.array(tokens[:0])
        if first < stop:
            begin, last = int(pointers[first]) // width, int(pointers[stop - 1]) // width
            ids = np.array(tokens[begin : last + int(lengths[stop - 1])])
        if not len(ids):
            what = "a document without tokens; leave it out of the index"
            yield BadRecord(place(file.shown, number + 1), what)
            continue
        parts = [ids]
        if file.eod is not None:
            ends = np.flatnonzero(ids == file.eod) + 1
            parts = [part for part in np.split(ids, ends) if len(part)]
        for part, some in enumerate(parts, 1):
            which = part if len(parts) > 1 else 0
            yield Entry(number + 1, {"input_ids": some}, width * len(some), which)


def _opened(
    index: Path,
) -> tuple[NDArray[Any], NDArray[np.int32], NDArray[np.int64], NDArray[np.int64]]:
    """Return memory maps of an index: all tokens of PREFIX.bin; and from PREFIX.idx the tokens of
    each sequence, its first byte, and the first sequence of each document with the end.

    A corrupt index contradicts itself or the size of a file, and is detected; only a moved bound
    between documents of several sequences is not. Raises SampleFault.
    """
    dtype, sequences, bounds = _head(index)
    size, data = index.stat().st_size, index.with_suffix(".bin")
    ends = _HEAD.size + 12 * sequences + 8 * bounds
    if size == ends + sequences:
        what = "has modes of sequences, as multimodal data has, and only text is trained"
        raise SampleFault(f"{what}; make it without --multimodal")
    if size != ends or not sequences or bounds < 2:
        what = f"{size:,} bytes, and its head promises {ends:,}: it is cut or damaged"
        raise SampleFault(f"{what}; {_AGAIN}")
    width, held = np.dtype(dtype).itemsize, data.stat().st_size
    if held % width:
        what = f"{data.name} has {held:,} bytes, no whole number of tokens of {width}"
        raise SampleFault(f"{what}: it is cut or damaged; {_AGAIN}")
    tokens = np.memmap(data, dtype, mode="r") if held else np.zeros(0, dtype)
    lengths = np.memmap(index, np.int32, "r", _HEAD.size, (sequences,))
    pointers = np.memmap(index, np.int64, "r", _HEAD.size + 4 * sequences, (sequences,))
    rising = np.memmap(index, np.int64, "r", _HEAD.size + 12 * sequences, (bounds,))
    end = 0
    for first in range(0, len(lengths), _AT_ONCE):
        counts = lengths[first : first + _AT_ONCE].astype(np.int64)
        starts = end + np.cumsum(counts) - counts
        wrong = (counts < 0) | (starts * width != pointers[first : first + _AT_ONCE])
        if wrong.any():
            number = first + int(wrong.argmax()) + 1
            what = f"sequence {number} does not begin where the one before it ends"
            raise SampleFault(f"{what}: it is damaged; {_AGAIN}")
        end = int(starts[-1] + counts[-1])
    if end != len(tokens):
        what = f"{data.name} holds {len(tokens):,} tokens, and it promises {end:,}"
        raise SampleFault(
            f"{what}: one of them is cut, or they are not of one data set; copy both again"
        )
    for first in range(0, len(rising), _AT_ONCE):
        some = rising[first : first + _AT_ONCE + 1]
        if (np.diff(some) < 0).any():
            raise SampleFault(f"the bounds of documents do not rise: it is damaged; {_AGAIN}")
    if rising[0] != 0 or rising[-1] != len(lengths):
        what = "the documents do not begin and end with the sequences"
        raise SampleFault(f"{what}: it is damaged; {_AGAIN}")
    return tokens, lengths, pointers, rising


def _head(index: Path) -> tuple[type[np.integer[Any]], int, int]:
    """Return the dtype of tokens, and the numbers of sequences and of bounds of documents."""
    with index.open("rb") as handle:
        head = handle.read(_HEAD.size)
    if head.startswith(OLDER):
        what = "is Megatron's older index, which is not memory-mapped"
        raise SampleFault(f"{what}; make it again with --dataset-impl mmap")
    if not head.startswith(MAGIC):
        raise SampleFault(f"is no index of Megatron's: it does not begin with MMIDIDX; {_AGAIN}")
    if len(head) < _HEAD.size:
        raise SampleFault(f"its head is cut: {len(head)} bytes; {_AGAIN}")
    _, version, code, sequences, bounds = _HEAD.unpack(head)
    if version != 1:
        raise SampleFault(f"version {version} of the index is not read; make it as version 1")
    if code in _FLOATS:
        what = "its dtype is of floating-point numbers, which are no token ids"
        raise SampleFault(f"{what}; {_AGAIN}")
    if code not in DTYPES:
        raise SampleFault(f"dtype {code} is none of the index's: it is damaged; {_AGAIN}")
    return DTYPES[code], sequences, bounds

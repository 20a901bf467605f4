"""The rows of one step: its samples in buckets by length, packed inside each.

What a step's rows are depends on the samples and on the buckets' lengths alone: on no layout, and
on no number of ranks. Source: HotSPa (SOSP'24), section 4, without what its code drops or pads.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from uspft.data.rows.stream import best_fit


class BucketRow(NamedTuple):
    """A row of a bucket's length."""

    bucket: int
    samples: tuple[int, ...]
    """The samples that it holds, in their order."""


def rows_of_samples(
    lengths: Mapping[int, int], row_lengths: Sequence[int], packing: str
) -> list[BucketRow]:
    """Return the rows of samples, each sample once.

    lengths: the tokens of each sample, by its number in the data, in the data's order. row_lengths:
    the tokens of the rows of each bucket, rising; a sample goes to the first bucket that holds it.
    packing: none or best_fit. Rows come bucket by bucket, and in each in the order of their first
    sample. Raises ValueError where a sample is longer than every row.
    """
    members: list[list[int]] = [[] for _ in row_lengths]
    for sample, length in lengths.items():
        bucket = bisect_left(row_lengths, length)
        if bucket == len(row_lengths):
            raise ValueError(f"sample {sample} has {length} tokens, rows at most {row_lengths[-1]}")
        members[bucket].append(sample)
    found = []
    for bucket, (inside, capacity) in enumerate(zip(members, row_lengths, strict=True)):
        rows = [[i] for i in range(len(inside))]
        if packing == "best_fit":
            rows = best_fit([lengths[sample] for sample in inside], capacity)
        found += [BucketRow(bucket, tuple(inside[i] for i in row)) for row in rows]
    return found

"""The part of a held matrix that a call computes with, cut out of it, and its gradient put back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from uspft.tensor.parts import Range

Used = Sequence[Sequence[Range] | None]
"""What a call uses of a held tensor: along each of its first dimensions ranges of it, laid end to
end, or None for all."""


def cut(held: Tensor, used: Used) -> Tensor:
    """Return the part of a held tensor; with one range along each dimension it is a view."""
    for dim, ranges in enumerate(used):
        if ranges is not None:
            pieces = [held.narrow(dim, start, stop - start) for start, stop in ranges]
            held = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
    return held


def put_back(part: Tensor, held: Tensor, used: Used) -> Tensor:
    """Return a tensor like `held` with this part of it, and 0 elsewhere."""
    if all(ranges is None for ranges in used):
        return part
    whole = part.new_zeros(held.shape)
    pairs = [(whole, part)]
    for dim, ranges in enumerate(used):
        pairs = [
            (there.narrow(dim, start, stop - start), here.narrow(dim, at, stop - start))
            for there, here in pairs
            for at, (start, stop) in _laid_out(ranges or [(0, held.shape[dim])])
        ]
    for there, here in pairs:
        there.copy_(here)
    return whole


def _laid_out(ranges: Sequence[Range]) -> Iterator[tuple[int, Range]]:
    """Yield where each range begins in the part, and the range."""
    at = 0
    for start, stop in ranges:
        yield at, (start, stop)
        at += stop - start

"""For engines that know one document a row: one call for each document of a packed row."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.attention.engines.engine import Attention, Cannot
from benchmarks.attention.layer import Layer


def per_document(
    layer: Layer,
    parts: int,
    place: Callable[[int], Tensor],
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Attention:
    """This spreads each document over all ranks on its own.

    parts: what must divide a document. place: the positions of a document of so many tokens that
    this rank holds. Raises Cannot for documents that do not divide.
    """
    odd = [n for n in layer.lengths if n % parts]
    if odd:
        raise Cannot(f"a document of {odd[0]} tokens does not split into {parts} equal parts")
    held = [start + place(stop - start) for start, stop in layer.documents]
    if len(held) == 1:
        return Attention(held[0], attend)
    sizes = [len(positions) for positions in held]

    def attend_each(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        documents = zip(*(x.split(sizes) for x in (q, k, v)), strict=True)
        return torch.cat([attend(*document) for document in documents])

    return Attention(torch.cat(held), attend_each, note=f"{len(held)} calls, one a document")


def zigzag(rank: int, world: int, tokens: int) -> Tensor:
    """This returns the positions in chunks rank and 2 · world − 1 − rank of 2 · world."""
    chunks = torch.arange(tokens).chunk(2 * world)
    return torch.cat([chunks[rank], chunks[2 * world - 1 - rank]])

"""The bounds of the documents inside a row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Segments:
    """The documents of one row: document i covers positions [bounds[i], bounds[i + 1]).

    `bounds` starts at 0 and rises strictly. From bounds[-1] to length there is padding, which no
    query attends to and which attends to nothing. bounds == (0,) is a row of padding.
    """

    bounds: tuple[int, ...]
    length: int
    before: int = 0
    """How many tokens the first document has before position 0, if these positions are a chunk of a
    row."""

    @classmethod
    def single(cls, length: int) -> Segments:
        """Return the segments of a row that is one document."""
        return cls((0, length), length)

    def part(self, first: int, last: int) -> Segments:
        """Return the segments of positions [first, last)."""
        documents = [(a, b) for a, b in self if a < last and b > first]
        ends = [min(b, last) - first for _, b in documents]
        before = max(0, first - documents[0][0]) if documents else 0
        return Segments((0, *ends), last - first, before)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self.bounds, self.bounds[1:], strict=False)

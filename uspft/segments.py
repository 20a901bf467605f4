"""The bounds of the documents inside a row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Segments:
    """The documents of one row: document i covers positions [bounds[i], bounds[i + 1]).

    `bounds` starts at 0 and rises strictly. From bounds[-1] to length there is padding, which no
    query attends to and which attends to nothing. bounds == (0,) is a row of padding alone.
    """

    bounds: tuple[int, ...]
    length: int

    @classmethod
    def single(cls, length: int) -> Segments:
        """Return the segments of a row that one document fills."""
        return cls((0, length), length)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self.bounds, self.bounds[1:], strict=False)

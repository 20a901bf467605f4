"""The bounds of the documents inside a row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Segments:
    """Documents of one row: segment i covers positions [bounds[i], bounds[i + 1]).

    bounds starts at 0 and rises strictly; what lies between bounds[-1] and length is padding, which
    no query attends to and which attends to nothing. bounds == (0,) is a row of padding alone.
    """

    bounds: tuple[int, ...]
    length: int

    @classmethod
    def single(cls, length: int) -> Segments:
        """One document that fills the row."""
        return cls((0, length), length)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self.bounds, self.bounds[1:], strict=False)

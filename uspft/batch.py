"""The tensors of one step and the bounds of the documents inside each row."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


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


@dataclass(frozen=True)
class Batch:
    """This rank's share of one micro-batch, its rows laid end to end.

    input_ids and position_ids [1, T] int64 on the device; labels [T] int64, already shifted on the
    whole row, -100 where there is no target; chosen int64: the places where there is one, and
    targets their number, which the host knows without asking the device. tokens [T] int64 number
    them through the stream of rows: a row's index × its length + the position in the row. plan is
    what attention computes here; held are the tokens' positions in the rows; rows are the indices
    in the stream of rows (-1: an empty row that only keeps ranks in step); row_of [T] int64: which
    of these rows a token is of, -1 for padding.
    """

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    chosen: Tensor
    tokens: Tensor
    targets: int
    plan: Any
    held: tuple[tuple[int, int], ...]
    rows: tuple[int, ...]
    row_of: Tensor

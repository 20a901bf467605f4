"""The tensors of one micro-batch, and the share of its rows that goes with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from uspft.sequence import Share
    from uspft.world import World


@dataclass(frozen=True)
class Batch:
    """This rank's share of one micro-batch, its rows laid end to end.

    input_ids and position_ids [1, T] int64 on the device; labels [T] int64, already shifted on the
    whole row, -100 where there is no target; chosen int64: the places where there is one. tokens
    [T] int64 number them through the stream of rows: a row's index × its length + the position in
    the row. row_of [T] int64: which of these rows a token is of, -1 for padding.
    """

    world: World
    """The layout that the rows are split by, live."""
    share: Share
    """What this rank holds and computes of the rows."""
    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    chosen: Tensor
    tokens: Tensor
    row_of: Tensor
    targets: int
    """How many tokens have a target here, which the host knows without asking the device."""
    rows: tuple[int, ...]
    """Indices in the stream of rows; -1: an empty row that only keeps ranks in step."""

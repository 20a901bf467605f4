"""The tensors of one micro-batch, with this rank's share of its rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from uspft.sequence import Share
    from uspft.sequence.kept_keys import RowKeys
    from uspft.world import World


@dataclass(frozen=True)
class Batch:
    """This rank's share of one micro-batch, whose rows are laid end to end.

    Shapes: T tokens of this rank. Every tensor is int64 and on the device.
    """

    world: World
    """The live layout that the rows are split by."""
    share: Share
    """What this rank holds and computes of the rows."""
    input_ids: Tensor
    """The tokens, [1, T]."""
    position_ids: Tensor
    """Each token's position in its document, [1, T]; 0 for padding."""
    labels: Tensor
    """Each token's target, [T], already shifted on the whole row; -100 where there is none."""
    chosen: Tensor
    """The indices of those of the T tokens that have a target."""
    tokens: Tensor
    """Each token's number in the stream of rows, [T]: row index × row length + place in the row."""
    row_of: Tensor
    """Which row of this micro-batch each token is in, [T]; -1 for padding."""
    targets: int
    """How many of the tokens have a target, which the host knows without asking the device."""
    rows: tuple[int, ...]
    """The rows' indices in the stream of rows; -1 is an empty row that only keeps ranks in step."""
    chunks: tuple[Batch, ...] = ()
    """The same tokens chunk by chunk, where rows go through a pipeline in several; each has the
    share of its own tokens."""
    keys: RowKeys | None = None
    """What is kept of earlier chunks, where this is a chunk on its way through a stage."""

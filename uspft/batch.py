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
    """This rank's share of one micro-batch, whose rows are concatenated.

    Shapes: T tokens of this rank. Every tensor is int64 and on the device.
    """

    world: World
    """The live layout that the rows are split by."""
    share: Share
    """What this rank stores and computes of the rows."""
    input_ids: Tensor
    """The tokens, [1, T]."""
    position_ids: Tensor
    """Each token's position in its document, [1, T]; 0 for padding."""
    labels: Tensor
    """Each token's target, [T], already shifted on the whole row; -100 where there is none."""
    chosen: Tensor
    """The indices of the tokens (of the T) that have a target."""
    tokens: Tensor
    """Each token's number in the stream of rows, [T]: row index × row length + position in
    the row."""
    row_of: Tensor
    """Which row of this micro-batch each token is in, [T]; -1 for padding."""
    targets: int
    """How many tokens have a target; on the host, so that the device need not be asked."""
    rows: tuple[int, ...]
    """The rows' indices in the stream of rows; -1 is an empty row that only keeps ranks in step."""
    chunks: tuple[Batch, ...] = ()
    """The same tokens chunk by chunk, if rows pass through a pipeline in chunks; each chunk has its
    own share."""
    keys: RowKeys | None = None
    """What is saved of earlier chunks, if this is a chunk in a pipeline stage."""

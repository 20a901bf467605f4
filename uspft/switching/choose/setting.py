"""What a run is given, before its layouts are chosen."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from uspft.planner.machine import Hardware
from uspft.planner.memory import Options
from uspft.planner.step_shape import StepShape


@dataclass(frozen=True)
class Setting:
    """What a run is given: its model and batch, the cluster, and the memory of a rank."""

    step: StepShape
    hardware: Hardware
    ranks: int
    memory_bytes: float
    options: Options = field(default_factory=Options)
    """What else decides memory."""
    rows_at_once: int | None = None
    """Rows of one replica in one forward, as `training.micro_batch_size` says: of several layouts,
    of the one whose rows need most memory, and others take as much. None: as many as fit."""
    in_place: bool = True
    """Whether tensor degrees may switch in place."""
    moves: bool = True
    """Whether weights may move between layouts, where the stage lets them."""
    stages: Collection[int] | None = (1,)
    """How many pipeline stages layouts may have; None: as many as there are ranks."""

    @property
    def lockstep(self) -> bool:
        """Whether all ranks run as many passes, since each is a collective of all of them."""
        return self.step.stage > 1

"""Which evaluation of a run was the best, and how many have come since."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Best:
    """The evaluation with the least loss, the earliest of equals."""

    step: int | None = None
    """The step that it followed; None where no loss has been finite yet."""
    loss: float = math.inf
    since: int = 0
    """How many evaluations have come since without a lower loss."""

    @classmethod
    def of(cls, evaluations: Iterable[dict[str, Any]]) -> Best:
        """Return what is the best of these records of metrics.jsonl, in their order."""
        best = cls()
        for record in evaluations:
            best = best.after(record)
        return best

    def after(self, record: dict[str, Any]) -> Best:
        """Return what is the best after one more evaluation; a loss that is not finite is none."""
        loss = record["eval_loss"]
        if loss is not None and loss < self.loss:
            return Best(record["step"], loss)
        return Best(self.step, self.loss, self.since + 1)

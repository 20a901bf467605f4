"""The table of objectives, with a row for each; it is the only place that lists them.

A row names the objective's class, which is imported only when a model is made to train. A new
objective is one row here and one file in objective/.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, eq=False)
class ObjectiveRow:
    """The facts about an objective that are known without torch."""

    name: str
    """The value of `training.objective` that names it."""
    code: str
    """The place of its class, written `module:Class`."""
    plain: bool = False
    """Whether `verify` computes it in plain transformers too (verify/plain.py)."""


CAUSAL = ObjectiveRow("causal", "uspft.objective.causal:Causal", plain=True)
OBJECTIVES: dict[str, ObjectiveRow] = {CAUSAL.name: CAUSAL}

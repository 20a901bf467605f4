"""What a step minimises and divides by: one file for each objective in config/algorithms.py."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from uspft.config.algorithms import OBJECTIVES
from uspft.objective.objective import Divisor, Objective, Scales, Term, TrainedModel

__all__ = ["Divisor", "Objective", "Scales", "Term", "TrainedModel", "make_objective"]


def make_objective(name: str, config: Any) -> Objective:
    """Return the objective that a recipe names, of a model with this config."""
    module, _, code = OBJECTIVES[name].code.partition(":")
    objective: Objective = getattr(import_module(module), code)(config)
    return objective

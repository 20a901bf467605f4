"""Putting a checkpoint's state back into a running engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from uspft.checkpoint.folder import Checkpoint
from uspft.engine.state import KINDS, make_moments, set_adam_steps, write_state

if TYPE_CHECKING:
    from uspft.batch import Batch
    from uspft.engine.zero import ZeroEngine


def load_state(engine: ZeroEngine, checkpoint: Checkpoint, empty: Batch) -> None:
    """Master weights, Adam moments and step count, into whatever stage the engine has; collective.

    The model must have been built from the same checkpoint. empty: a batch without targets.
    """
    make_moments(engine, empty)
    for name, parameter in engine.module.trained().items():
        for kind in KINDS:
            write_state(parameter, kind, checkpoint.tensor(kind, name), engine)
    set_adam_steps(engine, int(checkpoint.state["adam_steps"]))

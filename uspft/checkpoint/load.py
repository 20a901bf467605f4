"""The loading of a checkpoint's state into a running engine."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from uspft.engine.state import KINDS, set_adam_steps

if TYPE_CHECKING:
    from uspft.batch import Batch
    from uspft.checkpoint.folder import Checkpoint
    from uspft.engine.step import Engine


def load_state(engine: Engine, checkpoint: Checkpoint, empty: Batch) -> None:
    """Load master weights, Adam moments and Adam's step count into an engine; collective.

    The engine may be any, at any ZeRO stage; each rank reads what it keeps and nothing else. The
    model must have been built from the same checkpoint. empty: a batch without targets.
    """
    engine.make_moments(empty)
    for name in engine.trained():
        part = engine.part_of(name)
        for kind in KINDS:
            read = partial(checkpoint.read_flat, kind, name, part)
            engine.write_fragment(name, kind, read)
    set_adam_steps(engine, int(checkpoint.state["adam_steps"]))

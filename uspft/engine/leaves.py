"""Modules whose weights ZeRO-3 gathers together, when they begin to work, and not one by one."""

from __future__ import annotations

from deepspeed.utils import set_z3_leaf_module
from torch import nn

from uspft.model.head_groups import WHOLE
from uspft.model.parameter_adapter import adapters
from uspft.model.tiles import Tiled


def gather_at_once(module: nn.Module) -> None:
    """Make ZeRO-3 gather all weights of a module in tiles once for all of its tiles, or of one that
    attends in groups of heads, once for all of these; and adapters with their parameters.

    DeepSpeed then hooks none of the modules inside it. It must be told before it has hooked any.
    """
    for part in module.modules():
        tiled = isinstance(part.forward, Tiled) and next(part.children(), None) is not None
        if tiled or getattr(part, WHOLE, False) or any(adapters(part)):
            set_z3_leaf_module(part, True)

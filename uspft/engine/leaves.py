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
    Where ranks divide experts, each has other tiles: activation functions that were hooked inside
    these would run more often on some ranks, which DeepSpeed refuses.
    """
    for part in module.modules():
        runs = part.forward, getattr(getattr(part, "uspft", None), "compute", None)
        tiled = any(isinstance(run, Tiled) for run in runs) and any(True for _ in part.children())
        if tiled or getattr(part, WHOLE, False) or any(adapters(part)):
            set_z3_leaf_module(part, True)

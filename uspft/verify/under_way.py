"""The weights that `verify` starts from: a recipe's own, with an adapter as it is amid training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from uspft.checkpoint.weights_of import weights_of
from uspft.parameters.source import generator

if TYPE_CHECKING:
    from torch import Tensor

    from uspft.checkpoint.folder import Checkpoint
    from uspft.config import ModelBlock
    from uspft.parameters.part import Part
    from uspft.parameters.source import Weights


def weights_under_way(
    block: ModelBlock, seed: int, model: Any, checkpoint: Checkpoint | None = None
) -> Weights:
    """Return the weights of `weights_of`, but with the B of an adapter not 0.

    Beside a B of 0 the adapter's A has no gradient, and a wrong one would not be seen.
    """
    found = weights_of(block, seed, model, checkpoint)
    return AdapterUnderWay(found, seed) if block.adapter else found


class AdapterUnderWay:
    """A model's weights, in which the B of an adapter is uniform(±0.1 ÷ √rank), a function of seed
    and name."""

    def __init__(self, start: Weights, seed: int) -> None:
        self._start, self._seed = start, seed

    def draws(self, name: str) -> bool:
        return self._start.draws(name)

    def read(self, name: str, part: Part) -> Tensor:
        if ".lora_B." not in name:
            return self._start.read(name, part)
        bound = 0.1 * part.shape[1] ** -0.5
        draw = torch.empty(part.shape).uniform_(
            -bound, bound, generator=generator(self._seed, name)
        )
        return part.cut(draw)

"""What the chunks of a row keep for one another, by layer: keys and values that later chunks attend
to, and states that the next one begins with; and the gradients that come back.

Shapes, as suffixes: n tokens that are kept of a chunk, g KV heads on this rank, D head dim.
"""

from __future__ import annotations

from collections import defaultdict

from torch import Tensor

from uspft.kernels.merge import Sum


class KeptKeys:
    """The keys and values of a chunk to which later ones attend, and the sum of the gradients that
    these make of them, in float32 or wider."""

    def __init__(self, k_ngD: Tensor, v_ngD: Tensor) -> None:
        self.k, self.v = k_ngD, v_ngD
        self.sum = Sum((2, *k_ngD.shape), k_ngD.new_empty(0))  # an empty tensor: it is kept

    def forget(self) -> None:
        """Free keys and values, which no later chunk asks for any more, and keep the sum."""
        self.k = self.v = self.k.new_empty(0)


LayerKeys = dict[int, KeptKeys]
"""What is kept in one layer, by chunk."""


class Carried:
    """What a document's tokens in one chunk leave for those in the next, in a layer with a state;
    and its gradient, which comes back."""

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self.found: Tensor | None = None

    @property
    def gradient(self) -> Tensor:
        assert self.found is not None  # later chunks go back first
        return self.found


LayerStates = dict[tuple[str, int, int], Carried]
"""What is left for the next chunk in one layer, by its use ("rule" or "taps"), chunk and
document."""


def leave(states: LayerStates, key: tuple[str, int, int], value: Tensor) -> None:
    """Leave a value for the next chunk; where a layer is recomputed it is there already, with its
    gradient."""
    if key not in states:
        states[key] = Carried(value)


class RowKeys:
    """What one stage keeps of the chunks of a micro-batch, by layer."""

    def __init__(self) -> None:
        self.layers: defaultdict[int, LayerKeys] = defaultdict(dict)
        """By a number that is a layer's own; so are states."""
        self.states: defaultdict[int, LayerStates] = defaultdict(dict)

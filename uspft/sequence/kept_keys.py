"""What the chunks of a row save for one another, by layer: keys and values for the attention of
later chunks, and states with which the next chunk begins; and the gradients of both.

Shapes, as suffixes: n saved tokens of a chunk, g KV heads on this rank, D head dim.
"""

from __future__ import annotations

from collections import defaultdict

from torch import Tensor

from uspft.kernels.merge import Sum


class KeptKeys:
    """A chunk's saved keys and values, and the sum of their gradients from later chunks, in float32
    or wider."""

    def __init__(self, k_ngD: Tensor, v_ngD: Tensor) -> None:
        self.k, self.v = k_ngD, v_ngD
        # an empty tensor, since it stays alive with this object
        self.sum = Sum((2, *k_ngD.shape), k_ngD.new_empty(0))

    def forget(self) -> None:
        """Free the keys and values when no later chunk needs them; the sum stays."""
        self.k = self.v = self.k.new_empty(0)


LayerKeys = dict[int, KeptKeys]
"""The saved keys and values of one layer, by chunk."""


class Carried:
    """A state (or a convolution's last tokens) of a document that one chunk passes to the next, and
    its gradient, which comes back."""

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self.found: Tensor | None = None

    @property
    def gradient(self) -> Tensor:
        assert self.found is not None  # later chunks run their backward first
        return self.found


LayerStates = dict[tuple[str, int, int], Carried]
"""The values passed to the next chunk in one layer, by use ("rule" or "taps"), chunk and
document."""


def leave(states: LayerStates, key: tuple[str, int, int], value: Tensor) -> None:
    """Store a value for the next chunk, unless the layer is being recomputed: then it is stored
    already, with its gradient."""
    if key not in states:
        states[key] = Carried(value)


class RowKeys:
    """What one pipeline stage saves of the chunks of a micro-batch, by layer."""

    def __init__(self) -> None:
        self.layers: defaultdict[int, LayerKeys] = defaultdict(dict)
        """Both dicts are keyed by the layer's index."""
        self.states: defaultdict[int, LayerStates] = defaultdict(dict)

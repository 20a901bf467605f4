"""The keys and values of chunks of rows that later chunks see, by layer, and what these find for
their gradients.

Shapes, as suffixes: n tokens that are kept of a chunk, g KV heads on this rank, D head dim.
"""

from __future__ import annotations

from collections import defaultdict

from torch import Tensor

from uspft.kernels.merge import Sum


class KeptKeys:
    """The keys and values of a chunk that later ones see, and the sum of what these find for their
    gradients, in float32 or wider."""

    def __init__(self, k_ngD: Tensor, v_ngD: Tensor) -> None:
        self.k, self.v = k_ngD, v_ngD
        self.sum = Sum((2, *k_ngD.shape), k_ngD.new_empty(0))  # which keeps what it is like

    def forget(self) -> None:
        """Let go of keys and values, of which no later chunk asks for more, and not of the sum."""
        self.k = self.v = self.k.new_empty(0)


LayerKeys = dict[int, KeptKeys]
"""By chunk, what is kept in one layer."""


class Carried:
    """What a chunk hands to the next one of a document in a layer with a state, and its gradient,
    which comes back."""

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self.found: Tensor | None = None

    @property
    def gradient(self) -> Tensor:
        assert self.found is not None  # later chunks go back first
        return self.found


LayerStates = dict[tuple[str, int, int], Carried]
"""By what it is for, chunk and document, what is handed on in one layer."""


def leave(states: LayerStates, key: tuple[str, int, int], value: Tensor) -> None:
    """Hand a value on; in a layer's second run it is there already, with its gradient."""
    if key not in states:
        states[key] = Carried(value)


class RowKeys:
    """What one stage keeps of the chunks of a micro-batch, by layer."""

    def __init__(self) -> None:
        self.layers: defaultdict[int, LayerKeys] = defaultdict(dict)
        self.states: defaultdict[int, LayerStates] = defaultdict(dict)

    def of_layer(self, layer: int) -> LayerKeys:
        """Return what is kept in a layer. layer: a number that is its own."""
        return self.layers[layer]

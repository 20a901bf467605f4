"""The sizes of a model's layers with a state, as its config.json has them."""

from __future__ import annotations

from typing import NamedTuple

from uspft.families.shape import ModelShape
from uspft.families.table import FAMILIES


class StateSizes(NamedTuple):
    """The heads of a layer with a state, and the features of each."""

    keys: int
    """Key heads, each of which as many value heads share."""
    values: int
    """Value heads; each has a state [key_dim, value_dim]."""
    key_dim: int
    value_dim: int
    taps: int = 4
    """How many tokens the convolution before the rule sees, the token itself counted."""

    @property
    def channels(self) -> int:
        """The features that the convolution takes: of queries, keys and values."""
        return 2 * self.keys * self.key_dim + self.values * self.value_dim

    def on(self, ranks: int) -> StateSizes:
        """Return the sizes of the tensor rank with most heads; a key head stands with all its value
        heads."""
        keys = -(-self.keys // ranks)
        return self._replace(keys=keys, values=keys * (self.values // self.keys))


def state_layers(shape: ModelShape) -> tuple[bool, ...]:
    """Tell of each layer of a model whether it has a state and no attention."""
    if not FAMILIES[shape.model_type].states:
        return (False,) * shape.layers
    types, every = shape.raw.get("layer_types"), int(shape.raw.get("full_attention_interval", 4))
    usual = [(number + 1) % every != 0 for number in range(shape.layers)]
    named = [kind == "linear_attention" for kind in types or ()]
    return tuple((named or usual)[: shape.layers])


def state_sizes(shape: ModelShape) -> StateSizes | None:
    """Return the sizes of a model's layers with a state; None where it has none.

    OLMo Hybrid's are made of those of attention where its config has none.
    """
    if not FAMILIES[shape.model_type].states:
        return None
    usual = {"key_heads": 16, "value_heads": 32}
    if shape.model_type == "olmo_hybrid":
        usual = {"key_heads": shape.heads, "value_heads": shape.heads}
    raw = {key: value for key, value in shape.raw.items() if value is not None}
    keys = int(raw.get("linear_num_key_heads", usual["key_heads"]))
    values = int(raw.get("linear_num_value_heads", usual["value_heads"]))
    dims = 128, 128
    if shape.model_type == "olmo_hybrid":
        key_dim = int(raw.get("linear_key_head_dim", 0.75 * shape.hidden_size / keys))
        dims = key_dim, 2 * key_dim
    key_dim = int(raw.get("linear_key_head_dim", dims[0]))
    value_dim = int(raw.get("linear_value_head_dim", dims[1]))
    return StateSizes(keys, values, key_dim, value_dim, int(raw.get("linear_conv_kernel_dim", 4)))

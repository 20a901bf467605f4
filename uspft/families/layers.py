"""What each layer of a model has by its config.json: attention with its sliding window, or a
recurrent state; experts, or an MLP."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from uspft.families.shape import ModelShape
from uspft.families.table import EXPERTS, FAMILIES, NO_KEYS


class Blocks(NamedTuple):
    """The kinds of blocks in one layer of a model; layers of a kind take the same time."""

    state: bool
    """Whether it has a recurrent state (linear attention) in place of attention."""
    experts: bool
    """Whether it has experts in place of a single MLP."""
    sees_all: bool = False
    """Whether it has full attention in a model whose layers with a window have heads of another
    size."""
    borrows: bool = False
    """Whether it uses the keys and values of another layer."""
    window: int | None = None
    """The sliding window in keys; None: full attention; NO_KEYS: none."""

    def sizes(self, shape: ModelShape) -> ModelShape:
        """Return the model's shape with the sizes of this kind of layer."""
        of = shape.of_window(None) if self.sees_all else shape
        return of.borrowing if self.borrows else of


def layer_blocks(shape: ModelShape) -> tuple[Blocks, ...]:
    """Return the blocks of each layer."""
    for known in shape.known_blocks:
        return tuple(known)
    every, two = zip(layer_windows(shape), expert_layers(shape), strict=True), shape.seeing_all
    own = shape.layers - shape.borrowers
    found = tuple(
        Blocks(window == NO_KEYS, some, bool(two) and window is None, number >= own, window)
        for number, (window, some) in enumerate(every)
    )
    shape.known_blocks.append(found)
    return found


def attention_windows(shape: ModelShape) -> Counter[int | None]:
    """Return the number of layers with attention by their sliding window; None: full attention."""
    return Counter(one.window for one in layer_blocks(shape) if not one.state)


def expert_layers(shape: ModelShape) -> tuple[bool, ...]:
    """Return for each layer whether it has experts rather than a single MLP. Fields that
    transformers does not have for the family are ignored."""
    family, every = FAMILIES[shape.model_type], range(shape.layers)
    if not shape.routed or not any(map(shape.full.get, EXPERTS)):
        return (False,) * shape.layers
    said = {name: value for name, value in shape.full.items() if name in family.defaults}
    first = said.get("first_k_dense_replace") or said.get("moe_layer_start_index") or 0
    last = shape.full.get("moe_layer_end_index", -1) if "moe_layer_interval" in said else -1
    end = shape.layers if last == -1 else last + 1
    step = said.get("decoder_sparse_step") or said.get("moe_layer_interval") or 1
    dense = said.get("mlp_only_layers") or ()
    return tuple(first <= n < end and (n + 1) % step == 0 and n not in dense for n in every)


def layer_windows(shape: ModelShape) -> tuple[int | None, ...]:
    """Return the window of each layer in keys; None for full attention, NO_KEYS for a layer without
    attention."""
    window, family = shape.window, FAMILIES[shape.model_type]
    types, layers = shape.raw.get("layer_types"), range(shape.layers)
    if family.states:
        return tuple(NO_KEYS if state else None for state in state_layers(shape))
    one_for_all = family.windows == "all" or shape.model_type == "qwen3_moe"
    if window is None or (one_for_all and not types):
        return (window,) * shape.layers
    if types:
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    if family.windows == "switched":
        if shape.model_type == "smollm3":  # layers without rotary positions
            every = int(shape.raw.get("no_rope_layer_interval", 4))
            turned = shape.raw.get("no_rope_layers") or [(i + 1) % every for i in layers]
            return tuple(None if turned[i] else window for i in layers)
        first = shape.raw.get("max_window_layers", 28)
        if shape.model_type == "qwen2_moe":  # every second one of the first layers
            return tuple(None if i >= first or i % 2 else window for i in layers)
        return tuple(window if i >= first else None for i in layers)
    full = 6 if shape.model_type == "gemma3_text" else 2
    return tuple(window if (i + 1) % full else None for i in layers)


class StateSizes(NamedTuple):
    """The heads of a layer with a state, and the features of each."""

    keys: int
    """Key heads, each shared by the same number of value heads."""
    values: int
    """Value heads; each has a state [key_dim, value_dim]."""
    key_dim: int
    value_dim: int
    taps: int = 4
    """How many tokens the convolution before the delta rule sees, the token itself included."""

    @property
    def channels(self) -> int:
        """The features of the convolution's input: queries, keys and values."""
        return 2 * self.keys * self.key_dim + self.values * self.value_dim

    def on(self, ranks: int) -> StateSizes:
        """Return the sizes on the tensor rank with most heads; a key head is on the same rank as
        its value heads."""
        keys = -(-self.keys // ranks)
        return self._replace(keys=keys, values=keys * (self.values // self.keys))


def state_layers(shape: ModelShape) -> tuple[bool, ...]:
    """Return for each layer whether it has a state instead of attention."""
    if not FAMILIES[shape.model_type].states:
        return (False,) * shape.layers
    types, every = shape.raw.get("layer_types"), int(shape.raw.get("full_attention_interval", 4))
    usual = [(number + 1) % every != 0 for number in range(shape.layers)]
    named = [kind == "linear_attention" for kind in types or ()]
    return tuple((named or usual)[: shape.layers])


def state_sizes(shape: ModelShape) -> StateSizes | None:
    """Return the sizes of a model's layers with a state; None without such layers.

    OLMo Hybrid's default to those of attention.
    """
    if not FAMILIES[shape.model_type].states:
        return None
    raw = {key: value for key, value in shape.raw.items() if value is not None}
    as_attention = shape.model_type == "olmo_hybrid"
    keys = int(raw.get("linear_num_key_heads", shape.heads if as_attention else 16))
    values = int(raw.get("linear_num_value_heads", shape.heads if as_attention else 32))
    usual = 0.75 * shape.hidden_size / keys if as_attention else 128
    key_dim = int(raw.get("linear_key_head_dim", usual))
    value_dim = int(raw.get("linear_value_head_dim", 2 * key_dim if as_attention else 128))
    return StateSizes(keys, values, key_dim, value_dim, int(raw.get("linear_conv_kernel_dim", 4)))

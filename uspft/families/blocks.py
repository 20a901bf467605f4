"""What each layer of a model is made of, as its config.json has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from uspft.families.shape import ModelShape
from uspft.families.table import EXPERTS, FAMILIES, NO_KEYS
from uspft.families.windows import layer_windows


class Blocks(NamedTuple):
    """What a layer has of what layers of its family may have."""

    state: bool
    """Whether a state, and no attention."""
    experts: bool
    """Whether experts that tokens choose among, and no MLP that all of them meet alone."""
    sees_all: bool = False
    """Whether heads of the size of those without a window, where others have another."""
    borrows: bool = False
    """Whether the keys and values of another layer."""

    def sizes(self, shape: ModelShape) -> ModelShape:
        """Return a model with the sizes of such a layer."""
        of = shape.of_window(None) if self.sees_all else shape
        return of.borrowing if self.borrows else of


def layer_blocks(
    shape: ModelShape,
    windows: Sequence[int | None] | None = None,
    experts: Sequence[bool] | None = None,
) -> tuple[Blocks, ...]:
    """Return what each layer of a model has. windows, experts: of each layer; None: as the config
    says."""
    windows = layer_windows(shape) if windows is None else windows
    experts, own = experts or expert_layers(shape), shape.layers - shape.borrowers
    return tuple(
        Blocks(window == NO_KEYS, some, bool(shape.seeing_all) and window is None, number >= own)
        for number, (window, some) in enumerate(zip(windows, experts, strict=True))
    )


def expert_layers(shape: ModelShape) -> tuple[bool, ...]:
    """Tell of each layer of a model whether tokens choose among experts there; in others they all
    meet one MLP. Fields that transformers does not have for the family say nothing."""
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

"""An estimate of the memory of a rank: what ZeRO leaves of the model's state, and of the rows."""

from __future__ import annotations

from uspft.layout import Layout
from uspft.model.loss import tile_tokens
from uspft.planner.products import head_projection, layer_projections, parameters_of
from uspft.planner.step_shape import GRADIENT_BYTES, StepShape

USABLE_SHARE = 0.85
"""The share of the memory at hand that an estimate may fill: libraries and gaps take the rest, and
estimates are less exact than what need.py adds up, which may fill more."""
OPTIMIZER_BYTES = 12
"""Master weight and two moments of Adam, in float32."""
TILES = 3
"""Float32 numbers that the loss has of each logit of a tile: itself, its exponential, gradient."""
KEPT, MADE = 2, 8
"""Times the hidden size of a token: what a layer keeps for its backward where it is recomputed, and
what norms and residuals make in it."""


def state_bytes(step: StepShape, held: Layout) -> float:
    """Return the bytes of weights, gradients and optimizer of one rank.

    held: the layout of what ranks hold of the parameters. Gradients are there in the model's type
    and as a sum in float32; ZeRO divides the optimizer from stage 1 on, gradients from 2 and
    weights at 3, where two layers at a time are whole.
    """
    outside, layer = parameters_of(step.model, held.mesh_columns)
    whole = (outside + step.model.layers * layer) / held.mesh_rows
    of_stage = [held.copies if step.stage >= first else 1 for first in (1, 2, 3)]
    optimizer = OPTIMIZER_BYTES * step.trained / of_stage[0]
    gradients = (step.element_bytes + GRADIENT_BYTES) * step.trained / of_stage[1]
    gathered = 2 * step.element_bytes * layer if step.stage == 3 else 0
    return whole * (optimizer + gradients + step.element_bytes / of_stage[2]) + gathered


def moving_state_bytes(step: StepShape, layout: Layout) -> float:
    """Return the bytes of one rank's state where weights move between layouts.

    Each parameter's master, moments and summed gradient are in as many pieces as there are ranks;
    weights and their float32 gradient are there as the layout at work has them.
    """
    outside, layer = parameters_of(step.model, layout.mesh_columns)
    mine = outside + step.model.layers * layer
    outside, layer = parameters_of(step.model)
    pieces = (outside + step.model.layers * layer) / layout.ranks
    at_work = (step.element_bytes + GRADIENT_BYTES * step.trained) * mine
    return at_work + (OPTIMIZER_BYTES + GRADIENT_BYTES) * step.trained * pieces


def token_bytes(step: StepShape, layout: Layout) -> float:
    """Return the bytes of activations for each token that a rank holds."""
    model, tensor = step.model, layout.mesh_columns
    divided = tensor if step.use_seq_parallel or step.slices is not None else 1
    heads = (model.heads + 2 * model.kv_heads) * model.head_dim
    inner = sum(
        one.outputs * one.per_token
        for one in layer_projections(model)
        if one.splits == "outputs" and one.unit == 1
    )
    made = MADE * model.hidden_size / divided + (3 * heads + 2 * inner) / tensor
    if not step.recompute:
        return step.element_bytes * made * (model.layers + 1)
    kept = KEPT * model.hidden_size / divided
    return step.element_bytes * (model.layers * kept + 2 * made)


def row_bytes(step: StepShape, layout: Layout, length: int) -> float:
    """Return the bytes of activations of a row of so many tokens on the fullest rank of those that
    share it."""
    return length / layout.context * token_bytes(step, layout)


def room_bytes(step: StepShape, layout: Layout, state: float, memory_bytes: float) -> float:
    """Return the bytes that are left for rows beside the state and a tile of logits; below 0 where
    the state alone does not fit.

    memory_bytes: what a rank has.
    """
    vocabulary = head_projection(step.model).on(layout.mesh_columns).outputs
    tile = tile_tokens("auto", step.model.vocab_size) or 0
    return USABLE_SHARE * memory_bytes - state - TILES * 4 * tile * vocabulary

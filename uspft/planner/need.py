"""The bytes that a rank needs for a recipe, and the longest row for which it has them.

Activations are by planner/activations.py; weights, gradients and the optimizer's state follow from
the ZeRO stage by arithmetic, with DeepSpeed's buckets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from uspft.config.algorithms import row_of
from uspft.families import ModelShape
from uspft.planner.activations import Activations, activations, unknown_activations
from uspft.planner.products import head_projection, parameters_of

if TYPE_CHECKING:
    from uspft.config import Recipe
    from uspft.config.algorithms import AlgorithmRow
    from uspft.layout import Layout

USABLE_SHARE = 0.92
"""The share of a card's memory that tensors can fill: the context, NCCL and gaps take the rest."""
BUCKET = 5e8
"""The elements of DeepSpeed's reduce_bucket_size where a recipe says none."""
CHOICES = ("nothing", "exchange", "attention")
"""What of attention may be made again, the least work first."""


@dataclass(frozen=True)
class Need:
    """What one rank needs."""

    state_bytes: float
    """Weights, gradients, the optimizer's state and buckets."""
    state_host_bytes: float
    """Those of them that lie in the host's memory."""
    activations: Activations

    @property
    def bytes(self) -> float:
        return self.state_bytes + self.activations.peak_bytes

    @property
    def host_bytes(self) -> float:
        return self.state_host_bytes + self.activations.host_bytes

    def fits(self, memory_bytes: float) -> bool:
        """Tell whether a card with this much memory has what the rank needs."""
        return self.bytes <= USABLE_SHARE * memory_bytes


def need_of(
    recipe: Recipe, shape: ModelShape, layout: Layout, *, row: AlgorithmRow | None = None
) -> Need | None:
    """Return what a rank needs for a recipe; None where the formula does not know.

    row: of the algorithm that shares rows, in place of the recipe's.
    """
    if unknown(recipe, shape, layout, row=row):
        return None
    row, tokens = _row_and_tokens(recipe, layout, row)
    stages = recipe.parallel_config.exchange_stages
    cut = stages if isinstance(stages, int) else 0
    found = activations(shape, layout, tokens, recipe.memory, row, stages=cut)
    return Need(*state_bytes(recipe, shape, layout), found) if found else None


def unknown(
    recipe: Recipe, shape: ModelShape, layout: Layout, *, row: AlgorithmRow | None = None
) -> list[str]:
    """Return what there is of a recipe that the formula does not know; nothing where it knows all.

    row: as of `need_of`.
    """
    model = recipe.model
    found = {
        "float32": model.dtype == "float32",
        "LoRA": bool(model.adapter),
        "frozen weights": bool(model.freeze),
    }
    row, tokens = _row_and_tokens(recipe, layout, row)
    of_layers = unknown_activations(shape, layout, tokens, recipe.memory, row)
    return [what for what, here in found.items() if here] + of_layers


def weight_bytes(recipe: Recipe, shape: ModelShape, layout: Layout) -> float:
    """Return the bytes of the weights that a rank has on its device, whatever it needs beside."""
    zero = recipe.deepspeed.zero_optimization
    if (zero.get("offload_param") or {}).get("device", "none") != "none":
        return 0.0
    outside, layer = parameters_of(shape, layout.tensor)
    ranks = layout.context * layout.data if zero.get("stage", 1) == 3 else 1
    element = 4 if recipe.model.dtype == "float32" else 2
    return element * (outside + shape.layers * layer) / ranks


def fits(
    recipe: Recipe,
    shape: ModelShape,
    layout: Layout,
    memory_bytes: float,
    *,
    row: AlgorithmRow | None = None,
) -> bool | None:
    """Tell whether a card with this much memory has what a rank needs; None where the formula does
    not know, and weights alone are not too much. row: as of `need_of`."""
    need = need_of(recipe, shape, layout, row=row)
    if need:
        return need.fits(memory_bytes)
    alone = weight_bytes(recipe, shape, layout)
    return False if alone > USABLE_SHARE * memory_bytes else None


def _row_and_tokens(
    recipe: Recipe, layout: Layout, row: AlgorithmRow | None
) -> tuple[AlgorithmRow, int]:
    """Return the algorithm that shares rows, and how many tokens a rank has in one forward."""
    rows = recipe.training.micro_batch_size
    tokens = -(-rows * recipe.data.sequence_length // layout.context)
    return row or row_of(recipe.parallel_config.context_parallel_algo, layout.context), tokens


def state_bytes(recipe: Recipe, shape: ModelShape, layout: Layout) -> tuple[float, float]:
    """Return the bytes of weights, gradients and the optimizer's state under the ZeRO stage, on
    the device and on the host.

    Weights are in 16 bits; gradients are summed in float32, in which the master weights and two
    moments are too. Stage 3 fills buckets in the type that crosses ranks, and has the head, or two
    layers, whole at a time; where it offloads the optimizer's state, gradients are summed beside it
    (DeepSpeed's grad_partitions_flat_buffer).
    """
    zero = recipe.deepspeed.zero_optimization
    stage, ranks = int(zero.get("stage", 1)), layout.context * layout.data
    outside, layer = parameters_of(shape)
    every = outside + shape.layers * layer
    if stage == 0:
        return 20.0 * every, 0.0
    crossing = 2 if recipe.memory.gradient_reduction == "bfloat16" else 4
    bucket = crossing * min(float(zero.get("reduce_bucket_size") or BUCKET), every)
    optimizer_away, weights_away = (
        (zero.get(key) or {}).get("device") == "cpu"
        for key in ("offload_optimizer", "offload_param")
    )
    if stage == 3:
        whole = 2 * max(head_projection(shape).parameters, 2 * layer)
        away = (4 + 12) * optimizer_away + 2 * weights_away
        return (2 + 4 + 12 - away) * every / ranks + whole + bucket, away * every / ranks
    optimizer = 12 * every / ranks
    if stage == 1 and recipe.model.dtype == "bfloat16" and not optimizer_away:
        # Gradients in 16 bits until the backward ends, then summed (DeepSpeed's BF16_Optimizer).
        return (2 + 2 + 4) * every + optimizer, 0.0
    matrix = 2 * shape.hidden_size * shape.intermediate_size
    if stage == 2:
        # In 16 bits, laid flat once more, and cast, while the gradient that is next waits; stage 1
        # has float32, and reduces when the backward has ended.
        bucket = bucket * (2 + 2 + (4 if crossing == 4 else 0)) / crossing + matrix
    else:
        bucket *= 4 / crossing
    device = 2 * every + 4 * every / (ranks if stage == 2 else 1) + bucket
    if not optimizer_away:
        return device + optimizer, 0.0
    # The host also has gradients and new weights of its part; both sides a buffer for one gradient.
    buffer = max(2 * head_projection(shape).parameters, matrix)
    return device + buffer, optimizer + (4 + 2) * every / ranks + buffer


def least_work(recipe: Recipe, shape: ModelShape, layout: Layout, memory_bytes: float) -> str:
    """Return what `memory.recompute: auto` is on a card: the least work that fits, or where
    nothing does, what keeps least."""
    for choice in CHOICES:
        if choice == "exchange" and layout.ulysses == 1:
            continue
        need = need_of(_with(recipe, recompute=choice), shape, layout)
        if need is None:
            return CHOICES[0]
        if need.fits(memory_bytes):
            return choice
    return CHOICES[-1]


def longest_row(
    recipe: Recipe,
    shape: ModelShape,
    layout: Layout,
    memory_bytes: float,
    *,
    row: AlgorithmRow | None = None,
    **options: str,
) -> int | None:
    """Return the longest row in tokens that fits a card, by kilotokens of each rank; None where
    the formula does not know. row: as of `need_of`. options: of `memory`, in place of the
    recipe's."""
    step = 1024 * layout.context
    changed = _with(recipe, **options)

    def fits(count: int) -> bool:
        data = changed.data.model_copy(update={"sequence_length": count * step})
        need = need_of(changed.model_copy(update={"data": data}), shape, layout, row=row)
        return need is not None and need.fits(memory_bytes)

    return _most(fits) * step or None


def _most(fits: Callable[[int], bool]) -> int:
    """Return the largest number that fits, or 0, where all smaller ones do."""
    low, high = 0, 1
    while high < 1 << 20 and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _with(recipe: Recipe, **options: str) -> Recipe:
    return recipe.model_copy(update={"memory": recipe.memory.model_copy(update=options)})
